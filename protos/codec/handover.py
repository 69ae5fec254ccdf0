"""Codec of the hand-over: contracts/handover.py to and from the bytes of pdserve.v1.KvTransfer.

Called by protos/links/grpc.py; knows no stream and no rule of the protocol.
"""

from typing import assert_never

from contracts.errors import InvalidRequest
from contracts.handover import (
    Abandon,
    Ack,
    Alive,
    Chunk,
    Ended,
    Endpoint,
    ExporterMessage,
    Fetch,
    Introduce,
    Introduced,
    Last,
    Probe,
    Progress,
    Pull,
    PullerMessage,
    PullFailed,
)
from protos.codec import shared
from protos.codec.chunks import decode_chunk, encode_chunk
from protos.pdserve.v1 import common_pb2
from protos.pdserve.v1 import kv_transfer_pb2 as pb


def encode_puller(message: PullerMessage | None) -> bytes:
    """None is the orderly end of the stream."""
    match message:
        case Introduce():
            introduce = pb.Introduce(
                puller=message.puller,
                secret=message.secret,
                incarnation=message.incarnation,
                layout=shared.encode_layout(message.layout),
            )
            wire = pb.PullerMessage(introduce=introduce)
        case Probe():
            wire = pb.PullerMessage(probe=pb.Probe(transport=message.transport, channel=message.channel))
        case Pull():
            wire = pb.PullerMessage(pull=_encode_pull(message))
        case Fetch():
            wire = pb.PullerMessage(fetch=_encode_fetch(message))
        case Alive():
            wire = pb.PullerMessage(alive=pb.Alive())
        case Ack():
            wire = pb.PullerMessage(ack=pb.Ack())
        case Abandon():
            wire = pb.PullerMessage(abandon=pb.Abandon(reason=message.reason))
        case None:
            wire = pb.PullerMessage(goodbye=common_pb2.Goodbye())
        case _:
            assert_never(message)
    return wire.SerializeToString()


def decode_puller(data: bytes) -> PullerMessage | None:
    """None is the orderly end of the stream. Raises InvalidRequest for what is no PullerMessage."""
    wire = shared.parse(pb.PullerMessage, data)
    message: PullerMessage | None
    match wire.WhichOneof("message"):
        case "introduce":
            message = _decode_introduce(wire.introduce)
        case "probe":
            message = Probe(wire.probe.transport, wire.probe.channel)
        case "pull":
            message = _decode_pull(wire.pull)
        case "fetch":
            message = _decode_fetch(wire.fetch)
        case "alive":
            message = Alive()
        case "ack":
            message = Ack()
        case "abandon":
            message = Abandon(wire.abandon.reason)
        case "goodbye":
            message = None
        case _:
            raise InvalidRequest("malformed PullerMessage: none of the known messages is set")
    return message


def encode_exporter(message: ExporterMessage) -> bytes:
    match message:
        case Introduced():
            endpoints = [pb.Endpoint(transport=e.transport, address=e.address) for e in message.endpoints]
            wire = pb.ExporterMessage(introduced=pb.Introduced(endpoints=endpoints))
        case Chunk():
            return encode_chunk(message)
        case Progress():
            wire = pb.ExporterMessage(progress=pb.Progress(computed=message.computed, queued=message.queued))
        case Last():
            last = pb.Last(
                token=None if message.token is None else shared.encode_token(message.token),
                kv_tokens=message.kv_tokens,
                blocks=message.blocks,
                digest=message.digest,
            )
            wire = pb.ExporterMessage(last=last)
        case Ended():
            wire = pb.ExporterMessage(ended=pb.Ended())
        case PullFailed():
            wire = pb.ExporterMessage(failed=pb.PullFailed(error=shared.encode_error(message.error)))
        case _:
            assert_never(message)
    return wire.SerializeToString()


def decode_exporter(data: bytes) -> ExporterMessage:
    """Raises InvalidRequest for what is no ExporterMessage."""
    if (plain := decode_chunk(data)) is not None:
        return plain
    wire = shared.parse(pb.ExporterMessage, data)
    message: ExporterMessage
    match wire.WhichOneof("message"):
        case "introduced":
            message = Introduced(tuple(Endpoint(e.transport, e.address) for e in wire.introduced.endpoints))
        case "chunk":
            chunk = wire.chunk
            message = Chunk(chunk.first_block, chunk.count, tuple(chunk.checksums), chunk.payload)
        case "progress":
            message = Progress(wire.progress.computed, wire.progress.queued)
        case "last":
            token = shared.decode_token(wire.last.token) if wire.last.HasField("token") else None
            message = Last(token, wire.last.kv_tokens, wire.last.blocks, wire.last.digest)
        case "ended":
            message = Ended()
        case "failed":
            shared.require(wire.failed, "error")
            message = PullFailed(shared.decode_error(wire.failed.error))
        case _:
            raise InvalidRequest("malformed ExporterMessage: none of the known messages is set")
    return message


def _decode_introduce(introduce: pb.Introduce) -> Introduce:
    shared.require(introduce, "layout")
    layout = shared.decode_layout(introduce.layout)
    return Introduce(introduce.puller, introduce.secret, introduce.incarnation, layout)


def _encode_pull(pull: Pull) -> pb.PullRequest:
    return pb.PullRequest(
        key=shared.encode_key(pull.key),
        ticket=pull.ticket,
        incarnation=pull.incarnation,
        puller=pull.puller,
        secret=pull.secret,
        layout=shared.encode_layout(pull.layout),
        transport=pull.transport,
        first_block=pull.first_block,
        traceparent=pull.traceparent,
        channel=pull.channel,
    )


def _decode_pull(pull: pb.PullRequest) -> Pull:
    shared.require(pull, "key", "layout")
    return Pull(
        key=shared.decode_key(pull.key),
        ticket=pull.ticket,
        incarnation=pull.incarnation,
        puller=pull.puller,
        secret=pull.secret,
        layout=shared.decode_layout(pull.layout),
        transport=pull.transport,
        first_block=pull.first_block,
        traceparent=pull.traceparent,
        channel=pull.channel,
    )


def _encode_fetch(fetch: Fetch) -> pb.FetchRequest:
    return pb.FetchRequest(
        key=shared.encode_key(fetch.key),
        hashes=fetch.hashes,
        deadline_ms=fetch.deadline_ms,
        incarnation=fetch.incarnation,
        puller=fetch.puller,
        secret=fetch.secret,
        layout=shared.encode_layout(fetch.layout),
        transport=fetch.transport,
        traceparent=fetch.traceparent,
        channel=fetch.channel,
    )


def _decode_fetch(fetch: pb.FetchRequest) -> Fetch:
    shared.require(fetch, "key", "layout")
    return Fetch(
        key=shared.decode_key(fetch.key),
        hashes=tuple(fetch.hashes),
        deadline_ms=fetch.deadline_ms,
        incarnation=fetch.incarnation,
        puller=fetch.puller,
        secret=fetch.secret,
        layout=shared.decode_layout(fetch.layout),
        transport=fetch.transport,
        traceparent=fetch.traceparent,
        channel=fetch.channel,
    )
