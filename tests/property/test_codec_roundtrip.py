"""Every message survives the codec, and no bytes get past it as anything but a message."""

import contextlib
import dataclasses
import math
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts import handover, session
from contracts.errors import ErrorInfo, InvalidRequest
from contracts.handover import ExporterMessage, PullerMessage
from contracts.kv import KvLayout
from contracts.requests import AttemptKey, FinishReason, SamplingParams, Token, TokenLogprobs
from contracts.session import RouterMessage, WorkerEvent, WorkerMessage
from contracts.workers import Role, WorkerCapacity, WorkerInfo, WorkerLoad, WorkerState
from protos.codec import handover as handover_codec
from protos.codec import session as session_codec

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NUMBER = st.floats(allow_nan=False)


def tuples(elements: st.SearchStrategy[Any], max_size: int = 5) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(elements, max_size=max_size).map(tuple)


KEYS = st.builds(AttemptKey, request_id=TEXT, attempt=U32)
LAYOUTS = st.builds(
    KvLayout,
    model=TEXT,
    tokenizer=TEXT,
    numerics=TEXT,
    dtype=TEXT,
    layers=U32,
    kv_heads=U32,
    head_dim=U32,
    block_size=U32,
    rope=TEXT,
)
TOKENS = st.builds(
    Token,
    position=U32,
    token_id=U32,
    text=TEXT,
    logprobs=st.none() | st.builds(TokenLogprobs, logprob=NUMBER, top=tuples(st.tuples(U32, NUMBER))),
    finish=st.none() | st.sampled_from(FinishReason),
)
ERRORS = st.builds(ErrorInfo, code=TEXT, message=TEXT, param=st.none() | TEXT, retry_after=st.none() | U32)
SAMPLING = st.builds(
    SamplingParams,
    max_tokens=U32,
    seed=U64,
    temperature=NUMBER,
    top_p=NUMBER,
    top_k=U32,
    min_tokens=U32,
    stop=tuples(TEXT),
    include_stop=st.booleans(),
    stop_token_ids=tuples(U32),
    ignore_eos=st.booleans(),
    logprobs=st.none() | U32,
)
LOADS = st.builds(
    WorkerLoad,
    free_blocks=U32,
    free_slots=U32,
    backlog_tokens=U32,
    running=U32,
    waiting=U32,
    stuck=st.booleans(),
    draining=st.booleans(),
    linked=st.booleans(),
)
SOURCES = st.none() | st.builds(session.Source, worker_id=TEXT, address=TEXT, incarnation=U64)
EVENTS: dict[type, st.SearchStrategy[Any]] = {
    session.Reserved: st.builds(session.Reserved, key=KEYS),
    session.Tokens: st.builds(session.Tokens, key=KEYS, tokens=tuples(TOKENS), cached_tokens=U32),
    session.Failed: st.builds(session.Failed, key=KEYS, error=ERRORS),
}
MESSAGES: dict[type, st.SearchStrategy[Any]] = {
    session.Hello: st.builds(session.Hello, router_id=TEXT, router_incarnation=U64, secret=TEXT),
    session.Submit: st.builds(
        session.Submit,
        key=KEYS,
        incarnation=U64,
        ticket=st.binary(max_size=16),
        prompt_ids=tuples(U32, 50),
        relayed=tuples(U32),
        sampling=SAMPLING,
        cache_salt=TEXT,
        deadline_ms=U64,
        traceparent=TEXT,
        source=SOURCES,
        prefix=SOURCES,
    ),
    session.Cancel: st.builds(session.Cancel, key=KEYS, reason=TEXT),
    session.Welcome: st.builds(
        session.Welcome,
        worker=st.builds(
            WorkerInfo,
            id=TEXT,
            role=st.sampled_from(Role),
            address=TEXT,
            incarnation=U64,
            pid=U32,
            state=st.sampled_from(WorkerState),
        ),
        capacity=st.builds(WorkerCapacity, blocks=U32, slots=U32, backlog_tokens=U32, max_context=U32, layout=LAYOUTS),
        load=LOADS,
    ),
    session.WorkerFrame: st.builds(session.WorkerFrame, load=LOADS, events=tuples(st.one_of(*EVENTS.values()))),
    handover.Introduce: st.builds(handover.Introduce, puller=TEXT, secret=TEXT, incarnation=U64, layout=LAYOUTS),
    handover.Probe: st.builds(handover.Probe, transport=TEXT, channel=st.binary(max_size=16)),
    handover.Fetch: st.builds(
        handover.Fetch,
        key=KEYS,
        hashes=tuples(st.binary(max_size=16)),
        deadline_ms=U64,
        incarnation=U64,
        puller=TEXT,
        secret=TEXT,
        layout=LAYOUTS,
        transport=TEXT,
        traceparent=TEXT,
        channel=st.binary(max_size=16),
    ),
    handover.Pull: st.builds(
        handover.Pull,
        key=KEYS,
        ticket=st.binary(max_size=16),
        incarnation=U64,
        puller=TEXT,
        secret=TEXT,
        layout=LAYOUTS,
        transport=TEXT,
        first_block=U32,
        traceparent=TEXT,
        channel=st.binary(max_size=16),
    ),
    handover.Alive: st.builds(handover.Alive),
    handover.Ack: st.builds(handover.Ack),
    handover.Abandon: st.builds(handover.Abandon, reason=TEXT),
    handover.Introduced: st.builds(
        handover.Introduced, endpoints=tuples(st.builds(handover.Endpoint, transport=TEXT, address=TEXT))
    ),
    handover.Chunk: st.builds(
        handover.Chunk, first_block=U32, count=U32, checksums=tuples(U64), payload=st.binary(max_size=100)
    ),
    handover.Progress: st.builds(handover.Progress, computed=U32, queued=U32),
    handover.Last: st.builds(handover.Last, token=st.none() | TOKENS, kv_tokens=U32, blocks=U32, digest=U64),
    handover.Ended: st.builds(handover.Ended),
    handover.PullFailed: st.builds(handover.PullFailed, error=ERRORS),
}
CODECS: list[tuple[Any, Any, Any]] = [
    (RouterMessage, session_codec.encode_router, session_codec.decode_router),
    (WorkerMessage, session_codec.encode_worker, session_codec.decode_worker),
    (PullerMessage, handover_codec.encode_puller, handover_codec.decode_puller),
    (ExporterMessage, handover_codec.encode_exporter, handover_codec.decode_exporter),
]
CASES = [
    pytest.param(kind, encode, decode, id=kind.__name__) for union, encode, decode in CODECS for kind in get_args(union)
]


def test_every_message_has_a_strategy_that_fills_every_field() -> None:
    assert set(MESSAGES) == {kind for union, _, _ in CODECS for kind in get_args(union)}
    assert set(EVENTS) == set(get_args(WorkerEvent))


@pytest.mark.parametrize(("kind", "encode", "decode"), CASES)
@given(data=st.data())
def test_round_trip(kind: type, encode: Any, decode: Any, data: st.DataObject) -> None:
    message = data.draw(MESSAGES[kind])
    decoded = decode(encode(message))
    assert decoded == message
    assert type(decoded) is kind


@pytest.mark.parametrize("codec", CODECS, ids=["router", "worker", "puller", "exporter"])
@given(data=st.binary(max_size=60))
def test_any_bytes_are_a_message_or_refused(codec: tuple[Any, Any, Any], data: bytes) -> None:
    union, _, decode = codec
    with contextlib.suppress(InvalidRequest):
        decoded = decode(data)
        assert decoded is None or isinstance(decoded, get_args(union))


@given(text=TEXT)
def test_scrape_round_trip(text: str) -> None:
    assert session_codec.decode_scrape(session_codec.encode_scrape(text)) == text


def test_not_a_number_survives() -> None:
    load = WorkerLoad(free_blocks=0, free_slots=0, backlog_tokens=0, running=0, waiting=0)
    token = Token(1, 2, "", TokenLogprobs(math.nan, ((3, -math.inf),)))
    frame = session.WorkerFrame(load, (session.Tokens(AttemptKey("1-1", 1), (token,)),))
    decoded = session_codec.decode_worker(session_codec.encode_worker(frame))
    assert repr(decoded) == repr(frame)
    assert dataclasses.is_dataclass(decoded)
