"""Checksums of blocks, and how many blocks share a frame. Exporter and receiver both call it.

XXH3-64 (https://xxhash.com, seed 0): it finds damage, it does not protect against somebody who forges.
"""

import struct
from collections.abc import Iterable

import xxhash

from contracts.config import MOST_FRAME_BYTES
from contracts.errors import ConfigError

_PIECE_BYTES = 256 * 1024


def checksum(block: memoryview | bytes) -> int:
    """XXH3-64 of one block's bytes, hashed in pieces that stay in the cache of one core."""
    view = memoryview(block)
    hasher = xxhash.xxh3_64()
    for start in range(0, len(view), _PIECE_BYTES):
        hasher.update(view[start : start + _PIECE_BYTES])
    return int(hasher.intdigest())


def digest(checksums: Iterable[int]) -> int:
    """XXH3-64 over block checksums in order, each a little-endian uint64."""
    values = tuple(checksums)
    return int(xxhash.xxh3_64_intdigest(struct.pack(f"<{len(values)}Q", *values)))


def blocks_per_frame(frame_bytes: int, block_bytes: int) -> int:
    """As many whole blocks as fit into `frame_bytes`, at least one. Raises ConfigError when that one is larger
    than a frame may ever be."""
    if block_bytes > MOST_FRAME_BYTES:
        raise ConfigError(
            f"a KV block has {block_bytes} bytes, but a message carries at most {MOST_FRAME_BYTES}; "
            "choose a smaller kv.block_size",
            param="kv.block_size",
        )
    return max(1, frame_bytes // block_bytes)
