"""What a peer may send that is no message of ours."""

from typing import Any

import pytest

from contracts.errors import InvalidRequest
from protos.codec import handover, session
from protos.pdserve.v1 import common_pb2, kv_transfer_pb2, session_pb2

KEY = common_pb2.AttemptKey(request_id="1-1", attempt=1)
LOAD = session_pb2.WorkerLoad()
LAYOUT = common_pb2.KvLayout()


def tokens(token: common_pb2.Token) -> session_pb2.WorkerMessage:
    event = session_pb2.WorkerEvent(tokens=session_pb2.Tokens(key=KEY, tokens=[token]))
    return session_pb2.WorkerMessage(frame=session_pb2.WorkerFrame(load=LOAD, events=[event]))


def events(event: session_pb2.WorkerEvent) -> session_pb2.WorkerMessage:
    return session_pb2.WorkerMessage(frame=session_pb2.WorkerFrame(load=LOAD, events=[event]))


def welcome(role: Any, state: Any) -> session_pb2.WorkerMessage:
    info = session_pb2.WorkerInfo(id="d", role=role, state=state)
    capacity = session_pb2.WorkerCapacity(layout=LAYOUT)
    return session_pb2.WorkerMessage(
        welcome=session_pb2.Welcome(worker=info, capacity=capacity, load=session_pb2.WorkerLoad())
    )


@pytest.mark.parametrize(
    ("decode", "wire", "says"),
    [
        (session.decode_router, session_pb2.RouterMessage(), "RouterMessage"),
        (session.decode_router, session_pb2.RouterMessage(cancel=session_pb2.Cancel()), "no key"),
        (session.decode_router, session_pb2.RouterMessage(submit=session_pb2.Submit()), "no key"),
        (session.decode_router, session_pb2.RouterMessage(submit=session_pb2.Submit(key=KEY)), "no sampling"),
        (session.decode_worker, session_pb2.WorkerMessage(), "WorkerMessage"),
        (session.decode_worker, session_pb2.WorkerMessage(welcome=session_pb2.Welcome()), "no worker"),
        (session.decode_worker, welcome(0, 1), "role cannot be 0"),
        (session.decode_worker, welcome(9, 1), "role cannot be 9"),
        (session.decode_worker, welcome(1, 0), "state cannot be 0"),
        (session.decode_worker, session_pb2.WorkerMessage(frame=session_pb2.WorkerFrame()), "no load"),
        (session.decode_worker, events(session_pb2.WorkerEvent()), "WorkerEvent"),
        (session.decode_worker, events(session_pb2.WorkerEvent(reserved=session_pb2.Reserved())), "no key"),
        (session.decode_worker, events(session_pb2.WorkerEvent(tokens=session_pb2.Tokens())), "no key"),
        (session.decode_worker, events(session_pb2.WorkerEvent(failed=session_pb2.Failed(key=KEY))), "no error"),
        (session.decode_worker, tokens(common_pb2.Token(finish=7)), "finish cannot be 7"),  # type: ignore[arg-type]  # on purpose
        (session.decode_worker, tokens(common_pb2.Token(choice=1)), "choice 1"),
        (handover.decode_puller, kv_transfer_pb2.PullerMessage(), "PullerMessage"),
        (handover.decode_puller, kv_transfer_pb2.PullerMessage(pull=kv_transfer_pb2.PullRequest()), "no key"),
        (handover.decode_puller, kv_transfer_pb2.PullerMessage(pull=kv_transfer_pb2.PullRequest(key=KEY)), "layout"),
        (handover.decode_exporter, kv_transfer_pb2.ExporterMessage(), "ExporterMessage"),
        (handover.decode_puller, kv_transfer_pb2.PullerMessage(fetch=kv_transfer_pb2.FetchRequest()), "no key"),
        (handover.decode_puller, kv_transfer_pb2.PullerMessage(introduce=kv_transfer_pb2.Introduce()), "no layout"),
        (handover.decode_exporter, kv_transfer_pb2.ExporterMessage(failed=kv_transfer_pb2.PullFailed()), "no error"),
    ],
)
def test_incomplete_messages_are_refused(decode: Any, wire: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        decode(wire.SerializeToString())


@pytest.mark.parametrize(
    "decode",
    [
        session.decode_router,
        session.decode_worker,
        session.decode_scrape,
        handover.decode_puller,
        handover.decode_exporter,
    ],
)
def test_bytes_that_are_no_protobuf_are_refused(decode: Any) -> None:
    with pytest.raises(InvalidRequest, match="malformed"):
        decode(b"\xff\xff\xff\xff")


def test_a_goodbye_is_none() -> None:
    assert session.decode_router(session.encode_router(None)) is None
    assert handover.decode_puller(handover.encode_puller(None)) is None
