"""Callers that go away, streamed or not, in every phase: blocks and slots are back within two steps."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from kv_transfer.receiver import Receiver
from tests.helpers.answers import Metrics, ask, generate_request, post, settled, stub, until
from tests.helpers.checkpoints import greedy_prompts
from tests.helpers.model_cluster import Served, model_config, served_cluster
from tests.helpers.steps import Steps

PROMPT = greedy_prompts()[-2]
"""100 tokens."""
CLIENTS = 60
CALL_SECONDS = 2.0
"""A gRPC call's own deadline: long enough that the request has reached its phase before it, on a busy machine too."""
ROUTER_SECONDS = 0.3
"""limits.request_seconds for requests that are held before their first step."""

Leave = Callable[[], Awaitable[None]]


@pytest.fixture
def kv_plane(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Blocks that were sent arrive only once this is set."""
    opened = asyncio.Event()
    fetch = Receiver._fetch

    async def late(self: Receiver, *arguments: Any) -> Any:
        await opened.wait()
        return await fetch(self, *arguments)

    monkeypatch.setattr(Receiver, "_fetch", late)
    return opened


def caller(served: Served, way: str) -> Leave:
    """Ask for 400 tokens; call what comes back to go away (a deadline goes by itself)."""
    if way.startswith("grpc"):
        timeout = CALL_SECONDS if way == "grpc deadline" else None
        call = stub(served).Generate(generate_request(PROMPT, max_tokens=400, ignore_eos=True), timeout=timeout)

        async def read() -> grpc.StatusCode:
            with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
                async for _ in call:
                    pass
            code: grpc.StatusCode = await call.code()
            return code

        reading = asyncio.create_task(read())

        async def leave() -> None:
            expected = grpc.StatusCode.DEADLINE_EXCEEDED if timeout else grpc.StatusCode.CANCELLED
            if not timeout:
                call.cancel()
            assert await reading is expected

        return leave
    fields: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True, "stream": way == "stream"}
    posting = asyncio.create_task(post(served, PROMPT, **fields))

    async def hang_up() -> None:
        posting.cancel()
        await asyncio.wait({posting})
        assert posting.cancelled()

    return hang_up


def left(metrics: Metrics) -> float:
    """How many requests the router has seen end because their callers went away."""
    name = "pdserve_router_requests_total"
    return metrics(name, outcome="cancelled") + metrics(name, outcome="deadline_exceeded")


async def assert_stopped(served: Served, prompt: list[int], expected: str) -> None:
    """All is back, no cancel took more than two steps, and the next request gets its answer."""
    metrics = await settled(served)
    cancels = metrics("pdserve_cancel_to_stop_steps_count")
    assert metrics("pdserve_cancel_to_stop_steps_bucket", le="2.0") == cancels
    assert (await ask(served, "whole", prompt, max_tokens=5, temperature=0)).text == expected
    await settled(served)


@pytest.fixture
async def expected(noise_llama: Path) -> str:
    """What the model answers to PROMPT."""
    async with served_cluster(model_config(noise_llama, aggregated=True)) as served:
        return (await ask(served, "whole", PROMPT, max_tokens=5, temperature=0)).text


WAYS_TO_LEAVE = ("whole", "stream", "grpc cancel", "grpc deadline")


@pytest.mark.parametrize("way", WAYS_TO_LEAVE)
async def test_while_queued(way: str, noise_llama: Path, expected: str) -> None:
    async with served_cluster(model_config(noise_llama, max_running=1)) as served:
        steps = Steps(served.cluster, "decode-0", hold=2)
        first = asyncio.create_task(ask(served, "whole", PROMPT, max_tokens=5, temperature=0))
        await steps.held.wait()
        leave = caller(served, way)
        queued = await until(served, lambda found: found("pdserve_queue_requests") == 1)
        await leave()
        gone = await until(served, lambda found: found("pdserve_queue_requests") == 0)
        assert left(gone) == 1
        assert gone("pdserve_prefill_tokens_total") == queued("pdserve_prefill_tokens_total")
        steps.open()
        assert (await first).text == expected
        await assert_stopped(served, PROMPT, expected)


@pytest.mark.parametrize("way", WAYS_TO_LEAVE)
@pytest.mark.parametrize(("worker", "hold"), [("prefill-0", 0), ("prefill-0", 2), ("decode-0", 0), ("decode-0", 5)])
async def test_while_it_is_computed(worker: str, hold: int, way: str, noise_llama: Path, expected: str) -> None:
    """While the first or the third chunk of the prompt is computed, and in the first and a later step of decode."""
    async with served_cluster(model_config(noise_llama, transport="grpc", step_tokens=16)) as served:
        steps = Steps(served.cluster, worker, hold=hold)
        leave = caller(served, way)
        await steps.held.wait()
        await leave()
        await until(served, lambda found: left(found) == 1)
        steps.open()
        await settled(served)
        assert steps.count <= hold + 2
        await assert_stopped(served, PROMPT, expected)


@pytest.mark.parametrize("way", WAYS_TO_LEAVE)
async def test_while_its_blocks_are_handed_over(
    way: str, kv_plane: asyncio.Event, noise_llama: Path, expected: str
) -> None:
    async with served_cluster(model_config(noise_llama, transport="grpc")) as served:
        leave = caller(served, way)
        await until(served, lambda found: found("pdserve_first_tokens_total") == 1)
        await leave()
        metrics = await settled(served)  # without a step and without a block
        assert left(metrics) == 1
        assert metrics("pdserve_step_seconds_count", role="decode") == 0
        kv_plane.set()
        await assert_stopped(served, PROMPT, expected)


@pytest.mark.parametrize("transport", ["memory", "grpc"])
async def test_many_that_leave_with_their_first_token(
    transport: str, kv_plane: asyncio.Event, noise_llama: Path, expected: str
) -> None:
    """Prefill is done, decode does not have the blocks yet; the pools hold three of the requests."""
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 400, "temperature": 0, "stream": True, "ignore_eos": True}

    async def read_one_token(served: Served) -> None:
        async with served.client.stream("POST", "/v1/completions", json=body) as response:
            await anext(response.aiter_bytes())

    config = model_config(noise_llama, transport=transport, blocks=32)
    async with served_cluster(config) as served:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(CLIENTS):
                tasks.create_task(read_one_token(served))
        metrics = await settled(served)
        assert left(metrics) == CLIENTS
        assert metrics("pdserve_first_tokens_total", role="prefill") == CLIENTS
        assert metrics("pdserve_generated_tokens_total", role="decode") == 0
        await read_one_token(served)  # the next one prefills at once
        kv_plane.set()
        await assert_stopped(served, PROMPT, expected)


async def test_the_deadline_of_the_router(noise_llama: Path, expected: str) -> None:
    """Whoever waits for longer than limits.request_seconds is told so."""
    config = model_config(noise_llama)
    config = replace(config, limits=replace(config.limits, request_seconds=ROUTER_SECONDS))
    async with served_cluster(config) as served:
        steps = Steps(served.cluster, "prefill-0", hold=0)
        for stream in (False, True):
            response = await post(served, PROMPT, max_tokens=5, stream=stream)
            assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
        steps.open()
        await assert_stopped(served, PROMPT, expected)
