"""Bodies that are as large as they may be and made to cost time: where they are decoded, and how far."""

import threading
from pathlib import Path
from typing import Any

import orjson
import pytest
from pydantic import ValidationError

from contracts.errors import InvalidRequest, RequestTooLarge
from router.http.openai_schemas import ChatBody, CompletionBody, Sampling
from tests.helpers.public_api import MODEL, FakeService, answer, asgi_client, frontends, tiny_text

LIMIT = 8 << 20
CHAT = b'{"model":"m","messages":[{"role":"user","content":"x"}],'


def many(item: bytes, size: int = LIMIT - 100) -> bytes:
    """A list of it, of about so many bytes."""
    return b"[" + b",".join([item] * (size // (len(item) + 1))) + b"]"


@pytest.fixture
def unparsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be made of the body: the parser cannot be interrupted."""

    def parse(_: bytes) -> Any:
        raise AssertionError("parsed")

    monkeypatch.setattr("router.http.openai_schemas.orjson.loads", parse)


@pytest.mark.usefixtures("unparsed")
@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":' + many(b"{}") + b"}",
        b'{"messages":' + many(b"[]") + b"}",
        b'{"metadata":' + many(b'""') + b"}",
        b'{"metadata":' + many(b"1") + b"}",
        b'{"metadata":' + many(b'"\\\\"') + b"}",
        b'{"metadata":' + many(b'{"\\"":"["}') + b"}",
        b"{" + b",".join(b'"%x":1' % number for number in range(500_000)) + b"}",
    ],
    ids=["objects", "lists", "strings", "numbers", "escaped", "quotes", "keys"],
)
def test_more_structure_than_any_request_needs_is_counted_and_not_made(body: bytes) -> None:
    with pytest.raises(RequestTooLarge, match="objects and lists"):
        ChatBody.decode(body)


@pytest.mark.parametrize("text", ['{"[' * 100_000, '"' * 200_000, "\\" * 200_001, '\\"' * 100_000 + "{["])
def test_text_may_hold_any_number_of_brackets_and_quotes(text: str) -> None:
    (message,) = ChatBody.decode(orjson.dumps({"model": "m", "messages": [{"role": "user", "content": text}]})).messages
    assert message.content == text


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (ChatBody, b'{"model":"m","messages":' + many(b"{}", 60_000 * 3) + b"}", "messages"),
        (ChatBody, b'{"model":"m","messages":' + many(b"1", 2_000_000) + b"}", "messages"),
        (ChatBody, b'{"model":"m","messages":' + many(b'{"role":"user","content":""}', 29 * 5000) + b"}", "messages"),
        (ChatBody, CHAT + b'"stop_token_ids":' + many(b"1", 2_000_000) + b"}", "stop_token_ids"),
        (ChatBody, CHAT + b'"stop_token_ids":' + many(b'"1"', 400_000) + b"}", "stop_token_ids"),
        (ChatBody, CHAT + b'"stop":' + many(b"1", 2_000_000) + b"}", "stop"),
        (ChatBody, CHAT + b",".join(b'"%x":1' % number for number in range(100_000)) + b"}", None),
        (
            ChatBody,
            b'{"model":"m","messages":[{' + b",".join(b'"%x":1' % number for number in range(100_000)) + b"}]}",
            "messages",
        ),
        (CompletionBody, b'{"model":"m","prompt":' + many(b"1", 2_000_000)[:-1] + b',"a"]}', "prompt"),
    ],
    ids=["empty", "numbers", "messages", "ids", "no ids", "stops", "fields", "message fields", "prompt"],
)
def test_the_check_of_fields_stops_at_the_first_wrong_one(kind: type[Sampling], body: bytes, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as refused:
        kind.decode(body)
    assert refused.value.param == param
    assert isinstance(refused.value.__cause__, ValidationError)
    assert refused.value.__cause__.error_count() <= 2  # of one message: its role and its content


@pytest.fixture
def decoders(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that decoded a body."""
    names: list[str] = []
    decode = CompletionBody.decode

    def noting(body: bytes) -> CompletionBody:
        names.append(threading.current_thread().name)
        return decode(body)

    monkeypatch.setattr(CompletionBody, "decode", noting)
    return names


@pytest.mark.parametrize("size", [60_000, 70_000, LIMIT])
async def test_large_bodies_are_decoded_off_the_event_loop(size: int, decoders: list[str], tmp_path: Path) -> None:
    made = frontends(FakeService(answer("a")), tiny_text(tmp_path))
    async with asgi_client(made) as client:
        body = orjson.dumps({"model": MODEL, "prompt": "hi"})
        response = await client.post("/v1/completions", content=body.ljust(size))
        assert response.status_code == 200
    (thread,) = decoders
    assert thread.startswith("tokenise") == (size > 65_536)
    assert (thread == threading.main_thread().name) == (size <= 65_536)
