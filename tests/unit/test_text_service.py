"""Waiting for a thread that reads text: bounded in number, and by the request's deadline."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from contracts.errors import Overloaded
from router.request_parser import Draft, RequestParser
from router.text_service import TextService
from tests.helpers.public_api import CONTEXT, MODEL, VOCABULARY, FakeService, answer, asgi_client, frontends, tiny_text
from text.text_processor import TextProcessor


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextProcessor:
    return tiny_text(tmp_path_factory.mktemp("model"))


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What work in the threads waits for; open at the end at the latest."""
    event = threading.Event()
    yield event
    event.set()


async def test_only_so_many_wait(text: TextProcessor, gate: threading.Event) -> None:
    service = TextService(text, max_context=CONTEXT, most_waiting=4)
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(service.run(gate.wait)) for _ in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="4 requests wait"):
            await service.completion_ids("a")
        waiting[3].cancel()
        await asyncio.wait([waiting[3]])
        last = tasks.create_task(service.completion_ids("a"))  # in its place
        gate.set()
    assert last.result() == text.template.completion_ids("a")
    service.close()


async def test_a_prompt_that_waits_too_long_for_its_tokens_is_late(
    text: TextProcessor, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(_: str) -> list[int]:
        gate.wait()
        return [1]

    monkeypatch.setattr(text.template, "completion_ids", slow)
    service = FakeService(answer("a"))
    async with asgi_client(frontends(service, text, request_seconds=0.05)) as client, asyncio.timeout(10):
        response = await client.post("/v1/completions", json={"model": MODEL, "prompt": "a"})
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert not service.requests


@pytest.mark.parametrize(("timeout", "left"), [(None, 500), (1000, 500), (150, 50)])
async def test_the_deadline_counts_from_the_arrival(text: TextProcessor, timeout: float | None, left: float) -> None:
    service = TextService(text, max_context=CONTEXT, most_waiting=4)
    parser = RequestParser(
        FakeService(), service, model=MODEL, vocab_size=VOCABULARY, max_context=CONTEXT, request_seconds=600
    )
    arrived = asyncio.get_running_loop().time() - 100
    for prompt in ("a", [7]):
        request = await parser.parse(Draft(MODEL, prompt, arrived, timeout=timeout))
        assert left - 20 < request.timeout <= left
    service.close()
