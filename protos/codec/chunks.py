"""Codec of Chunk, the one message that is large: its payload is copied once to send and not at all to receive.

Same bytes on the wire as kv_transfer.proto describes (https://protobuf.dev/programming-guides/encoding). The protobuf
library would copy the payload into a message and again into its serialisation, and out of it on the other side.
Called by handover.py.
"""

from contracts.handover import Chunk
from protos.pdserve.v1 import kv_transfer_pb2 as pb

_CHUNK = b"\x0a"  # ExporterMessage.chunk: field 1, length-delimited
_PAYLOAD = b"\x22"  # Chunk.payload: field 4, length-delimited


def encode_chunk(chunk: Chunk) -> bytes:
    """The whole ExporterMessage."""
    fields = pb.Chunk(first_block=chunk.first_block, count=chunk.count, checksums=chunk.checksums).SerializeToString()
    size = len(chunk.payload)
    inner = fields + _PAYLOAD + _varint(size) if size else fields
    return b"".join((_CHUNK, _varint(len(inner) + size), inner, chunk.payload))


def decode_chunk(data: bytes) -> Chunk | None:
    """What encode_chunk makes, with the payload as a view into `data`; None for everything else, also for a Chunk that
    is written in another order: that is for the library to read, or to refuse."""
    if data[:1] != _CHUNK:
        return None
    view = memoryview(data)
    size, at = _read_varint(view, 1)
    if size is None or at + size != len(data):
        return None
    end = _end_of_fields(view, at)
    if end is None or view[end : end + 1] != _PAYLOAD:
        return None
    payload, start = _read_varint(view, end + 1)
    if payload is None or start + payload != len(data):
        return None
    fields = pb.Chunk.FromString(bytes(view[at:end]))
    return Chunk(fields.first_block, fields.count, tuple(fields.checksums), view[start:])


_FIRST_BLOCK, _COUNT, _CHECKSUMS = 0x08, 0x10, 0x1A


def _end_of_fields(view: memoryview, at: int) -> int | None:
    """Behind the fields before the payload, each at most once and in order; None when they end too late."""
    for tag in (_FIRST_BLOCK, _COUNT, _CHECKSUMS):
        if at >= len(view) or view[at] != tag:
            continue
        number, at = _read_varint(view, at + 1)
        if number is None:
            return None
        if tag == _CHECKSUMS:
            if number % 8:
                return None
            at += number
    return at if at < len(view) else None


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _read_varint(view: memoryview, at: int) -> tuple[int | None, int]:
    """The number and where it ends; None when it does not end in the five bytes that a length may have."""
    number = 0
    for index, byte in enumerate(view[at : at + 5]):
        number |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return number, at + index + 1
    return None, at
