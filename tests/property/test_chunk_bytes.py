"""The codec of Chunk against the protobuf library: damaged bytes mean the same to both, or it leaves them alone."""

import random
from contextlib import suppress

import pytest

from contracts.errors import InvalidRequest
from contracts.handover import Chunk
from protos.codec.chunks import decode_chunk, encode_chunk
from protos.codec.handover import decode_exporter
from protos.pdserve.v1 import kv_transfer_pb2 as pb

MESSAGES = 100_000


def draw(rng: random.Random) -> bytes:
    """A Chunk as we, or another writer, would encode it."""
    count = rng.choice((0, 1, 2, 40))
    payload = rng.randbytes(rng.choice((0, 1, 5, 127, 128, 300)))
    checksums = tuple(rng.getrandbits(64) for _ in range(count))
    chunk = Chunk(rng.choice((0, 1, 127, 128, 2**32 - 1)), count, checksums, payload)
    if rng.random() < 0.5:
        return encode_chunk(chunk)
    wire = pb.Chunk(first_block=chunk.first_block, count=count, checksums=checksums, payload=payload)
    message: bytes = pb.ExporterMessage(chunk=wire).SerializeToString()
    return message


def damage(rng: random.Random, message: bytes) -> bytes:
    data = bytearray(message)
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        at = rng.randrange(min(len(data), 48) or 1)
        match rng.randrange(6):
            case 0:
                data[at : at + 1] = bytes([rng.choice((0x08, 0x0A, 0x10, 0x1A, 0x22, 0x00, 0x80, 0xFF, 0x7F))])
            case 1:
                data.insert(at, rng.randrange(256))
            case 2:
                del data[at : at + 1]
            case 3:
                del data[rng.randrange(len(data) + 1) :]
            case 4:
                data += data[at:]
            case 5:
                data[at : at + 1] = bytes([rng.randrange(256)])
    return bytes(data)


def test_whatever_arrives_means_what_the_library_says() -> None:
    rng = random.Random(7)
    read = 0
    for _ in range(MESSAGES):
        data = damage(rng, draw(rng))
        chunk = decode_chunk(data)
        if chunk is None:
            continue
        read += 1
        wire = pb.ExporterMessage.FromString(data)  # the library reads it too
        assert wire.WhichOneof("message") == "chunk"
        came = wire.chunk
        assert chunk == Chunk(came.first_block, came.count, tuple(came.checksums), came.payload), data.hex()
    assert MESSAGES / 20 < read < MESSAGES


def test_whatever_arrives_is_a_message_or_refused() -> None:
    rng = random.Random(8)
    for _ in range(MESSAGES // 4):
        with suppress(InvalidRequest):
            decode_exporter(damage(rng, draw(rng)))


@pytest.mark.parametrize("size", [0, 1, 127, 128, 70_000])
def test_what_we_write_is_what_the_library_reads(size: int) -> None:
    chunk = Chunk(3, 2, (1, 2**64 - 1), bytes(size))
    wire = pb.ExporterMessage.FromString(encode_chunk(chunk)).chunk
    assert Chunk(wire.first_block, wire.count, tuple(wire.checksums), wire.payload) == chunk
