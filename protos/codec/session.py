"""Codec of the session: contracts/session.py to and from the bytes of pdserve.v1.Worker.

Called by protos/links/grpc.py; knows no stream and no rule of the protocol.
"""

from typing import assert_never

from contracts.errors import InvalidRequest
from contracts.requests import SamplingParams
from contracts.session import (
    Cancel,
    Failed,
    Hello,
    Reserved,
    RouterMessage,
    Source,
    Submit,
    Tokens,
    Welcome,
    WorkerEvent,
    WorkerFrame,
    WorkerMessage,
)
from contracts.workers import Role, WorkerCapacity, WorkerInfo, WorkerLoad, WorkerState
from protos.codec import shared
from protos.pdserve.v1 import common_pb2
from protos.pdserve.v1 import session_pb2 as pb


def encode_router(message: RouterMessage | None) -> bytes:
    """None is the orderly end of the stream."""
    match message:
        case Hello():
            hello = pb.Hello(
                router_id=message.router_id, router_incarnation=message.router_incarnation, secret=message.secret
            )
            wire = pb.RouterMessage(hello=hello)
        case Submit():
            wire = pb.RouterMessage(submit=_encode_submit(message))
        case Cancel():
            wire = pb.RouterMessage(cancel=pb.Cancel(key=shared.encode_key(message.key), reason=message.reason))
        case None:
            wire = pb.RouterMessage(goodbye=common_pb2.Goodbye())
        case _:
            assert_never(message)
    return wire.SerializeToString()


def decode_router(data: bytes) -> RouterMessage | None:
    """None is the orderly end of the stream. Raises InvalidRequest for what is no RouterMessage."""
    wire = shared.parse(pb.RouterMessage, data)
    match wire.WhichOneof("message"):
        case "hello":
            return Hello(wire.hello.router_id, wire.hello.router_incarnation, wire.hello.secret)
        case "submit":
            return _decode_submit(wire.submit)
        case "cancel":
            shared.require(wire.cancel, "key")
            return Cancel(shared.decode_key(wire.cancel.key), wire.cancel.reason)
        case "goodbye":
            return None
        case _:
            raise InvalidRequest("malformed RouterMessage: none of the known messages is set")


def encode_worker(message: WorkerMessage) -> bytes:
    match message:
        case Welcome():
            welcome = pb.Welcome(
                worker=_encode_info(message.worker),
                capacity=_encode_capacity(message.capacity),
                load=_encode_load(message.load),
            )
            wire = pb.WorkerMessage(welcome=welcome)
        case WorkerFrame():
            events = [_encode_event(event) for event in message.events]
            wire = pb.WorkerMessage(frame=pb.WorkerFrame(load=_encode_load(message.load), events=events))
        case _:
            assert_never(message)
    return wire.SerializeToString()


def decode_worker(data: bytes) -> WorkerMessage:
    """Raises InvalidRequest for what is no WorkerMessage."""
    wire = shared.parse(pb.WorkerMessage, data)
    match wire.WhichOneof("message"):
        case "welcome":
            shared.require(wire.welcome, "worker", "capacity", "load")
            worker, capacity = _decode_info(wire.welcome.worker), _decode_capacity(wire.welcome.capacity)
            return Welcome(worker, capacity, _decode_load(wire.welcome.load))
        case "frame":
            shared.require(wire.frame, "load")
            events = tuple(_decode_event(event) for event in wire.frame.events)
            return WorkerFrame(_decode_load(wire.frame.load), events)
        case _:
            raise InvalidRequest("malformed WorkerMessage: none of the known messages is set")


def encode_scrape(text: str) -> bytes:
    return pb.ScrapeResponse(text=text).SerializeToString()


def decode_scrape(data: bytes) -> str:
    """Raises InvalidRequest for what is no ScrapeResponse."""
    return shared.parse(pb.ScrapeResponse, data).text


def _encode_submit(submit: Submit) -> pb.Submit:
    return pb.Submit(
        key=shared.encode_key(submit.key),
        incarnation=submit.incarnation,
        ticket=submit.ticket,
        prompt_ids=submit.prompt_ids,
        relayed=submit.relayed,
        sampling=_encode_sampling(submit.sampling),
        cache_salt=submit.cache_salt,
        deadline_ms=submit.deadline_ms,
        traceparent=submit.traceparent,
        source=_encode_source(submit.source),
        prefix=_encode_source(submit.prefix),
    )


def _decode_submit(submit: pb.Submit) -> Submit:
    shared.require(submit, "key", "sampling")
    return Submit(
        key=shared.decode_key(submit.key),
        incarnation=submit.incarnation,
        ticket=submit.ticket,
        prompt_ids=tuple(submit.prompt_ids),
        relayed=tuple(submit.relayed),
        sampling=_decode_sampling(submit.sampling),
        cache_salt=submit.cache_salt,
        deadline_ms=submit.deadline_ms,
        traceparent=submit.traceparent,
        source=_decode_source(submit.source) if submit.HasField("source") else None,
        prefix=_decode_source(submit.prefix) if submit.HasField("prefix") else None,
    )


def _encode_source(source: Source | None) -> pb.Source | None:
    if source is None:
        return None
    return pb.Source(worker_id=source.worker_id, address=source.address, incarnation=source.incarnation)


def _decode_source(source: pb.Source) -> Source:
    return Source(source.worker_id, source.address, source.incarnation)


def _encode_sampling(sampling: SamplingParams) -> pb.SamplingParams:
    return pb.SamplingParams(
        max_tokens=sampling.max_tokens,
        seed=sampling.seed,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_tokens=sampling.min_tokens,
        stop=sampling.stop,
        include_stop=sampling.include_stop,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
    )


def _decode_sampling(sampling: pb.SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        seed=sampling.seed,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_tokens=sampling.min_tokens,
        stop=tuple(sampling.stop),
        include_stop=sampling.include_stop,
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
    )


def _encode_event(event: WorkerEvent) -> pb.WorkerEvent:
    key = shared.encode_key(event.key)
    match event:
        case Reserved():
            return pb.WorkerEvent(reserved=pb.Reserved(key=key))
        case Tokens():
            tokens = [shared.encode_token(token) for token in event.tokens]
            return pb.WorkerEvent(tokens=pb.Tokens(key=key, tokens=tokens, cached_tokens=event.cached_tokens))
        case Failed():
            return pb.WorkerEvent(failed=pb.Failed(key=key, error=shared.encode_error(event.error)))
        case _:
            assert_never(event)


def _decode_event(event: pb.WorkerEvent) -> WorkerEvent:
    match event.WhichOneof("event"):
        case "reserved":
            shared.require(event.reserved, "key")
            return Reserved(shared.decode_key(event.reserved.key))
        case "tokens":
            shared.require(event.tokens, "key")
            tokens = tuple(shared.decode_token(token) for token in event.tokens.tokens)
            return Tokens(shared.decode_key(event.tokens.key), tokens, event.tokens.cached_tokens)
        case "failed":
            shared.require(event.failed, "key", "error")
            return Failed(shared.decode_key(event.failed.key), shared.decode_error(event.failed.error))
        case _:
            raise InvalidRequest("malformed WorkerEvent: none of the known events is set")


def _encode_info(info: WorkerInfo) -> pb.WorkerInfo:
    return pb.WorkerInfo(
        id=info.id,
        role=_ROLES[info.role],
        address=info.address,
        incarnation=info.incarnation,
        pid=info.pid,
        state=_STATES[info.state],
    )


def _decode_info(info: pb.WorkerInfo) -> WorkerInfo:
    role = shared.from_enum(_ROLES, info.role, "role")
    state = shared.from_enum(_STATES, info.state, "state")
    return WorkerInfo(info.id, role, info.address, info.incarnation, info.pid, state)


def _encode_capacity(capacity: WorkerCapacity) -> pb.WorkerCapacity:
    return pb.WorkerCapacity(
        blocks=capacity.blocks,
        slots=capacity.slots,
        backlog_tokens=capacity.backlog_tokens,
        max_context=capacity.max_context,
        layout=shared.encode_layout(capacity.layout),
    )


def _decode_capacity(capacity: pb.WorkerCapacity) -> WorkerCapacity:
    shared.require(capacity, "layout")
    return WorkerCapacity(
        blocks=capacity.blocks,
        slots=capacity.slots,
        backlog_tokens=capacity.backlog_tokens,
        max_context=capacity.max_context,
        layout=shared.decode_layout(capacity.layout),
    )


def _encode_load(load: WorkerLoad) -> pb.WorkerLoad:
    return pb.WorkerLoad(
        free_blocks=load.free_blocks,
        free_slots=load.free_slots,
        backlog_tokens=load.backlog_tokens,
        running=load.running,
        waiting=load.waiting,
        stuck=load.stuck,
        draining=load.draining,
        linked=load.linked,
    )


def _decode_load(load: pb.WorkerLoad) -> WorkerLoad:
    return WorkerLoad(
        free_blocks=load.free_blocks,
        free_slots=load.free_slots,
        backlog_tokens=load.backlog_tokens,
        running=load.running,
        waiting=load.waiting,
        stuck=load.stuck,
        draining=load.draining,
        linked=load.linked,
    )


_ROLES: dict[Role, pb.Role] = {
    Role.ROUTER: pb.ROLE_ROUTER,
    Role.PREFILL: pb.ROLE_PREFILL,
    Role.DECODE: pb.ROLE_DECODE,
}
_STATES: dict[WorkerState, pb.WorkerState] = {
    WorkerState.READY: pb.WORKER_STATE_READY,
    WorkerState.DRAINING: pb.WORKER_STATE_DRAINING,
}
