"""KV blocks: their layout, their content hash, and the store that holds them.

The layout of a pool is [block, layer, 2, kv_head, token, dim]: one block is one contiguous piece of
memory across all layers, so it travels as one copy.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

BlockHash = bytes
"""16 bytes; equal hashes mean equal token prefixes under the same key, salt and model."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """What two workers must share to exchange blocks. Compared field by field at the handshake."""

    model: str  # fingerprint of the weights and configuration
    tokenizer: str  # fingerprint
    numerics: str  # kernels, dtype and quantisation that made the KV
    dtype: str  # of the KV elements, e.g. "float32"
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int  # tokens per block
    rope: str  # fingerprint of the rotary parameters

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.layers * 2 * self.kv_heads * self.block_size * self.head_dim * _DTYPE_BYTES[self.dtype]

    def difference(self, other: "KvLayout") -> str | None:
        """None when blocks can be exchanged, else one line that names the first field and both values."""
        for f in fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if mine != theirs:
                return f"{f.name}: {mine!r} here, {theirs!r} there"
        return None


_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint64": 8}


SPARE_BLOCKS = 2
"""Blocks of a BlockStore behind its pool, see BlockStore.blocks."""


class BlockStore(Protocol):
    """Memory of a pool of blocks. kv_transfer moves bytes in and out of it and knows nothing else."""

    @property
    def layout(self) -> KvLayout: ...

    @property
    def blocks(self) -> int:
        """How many blocks the pool has; they are numbered from 0. Behind them lie SPARE_BLOCKS more that are nobody's:
        links are verified with them. The first shows a pattern to others, the second takes theirs."""

    @property
    def descriptor(self) -> int | None:
        """The file whose bytes are all blocks, block b from b * layout.block_bytes on; others can only map it
        read-only. None where the memory is no file."""

    def read(self, block: int) -> memoryview:
        """The bytes of one block (layout.block_bytes), read-only, without a copy."""

    def writable(self, block: int) -> memoryview:
        """The same bytes to write in place: only for the one who owns the block."""


class BlockHasher:
    """Keyed, chained content hash of full blocks (BLAKE2b, RFC 7693, keyed mode, 16-byte digest).

    hash(k) = H(key, parent hash, salt | model of the root, token ids as little-endian int32). Engine and
    router use this one class, so that the router can tell which worker holds a prefix.
    """

    def __init__(self, key: bytes, block_size: int, model: str) -> None:
        self._key = key[:64]
        self._block_size = block_size
        self._model = model.encode()

    def root(self, salt: str) -> BlockHash:
        """The parent of the first block of a prompt under this salt."""
        salted = salt.encode()
        return self._digest(struct.pack("<I", len(salted)) + salted + self._model)

    def extend(self, parent: BlockHash, tokens: Sequence[int]) -> BlockHash:
        """Hash of a full block of `block_size` token ids whose predecessor is `parent`."""
        if len(tokens) != self._block_size:
            raise ValueError(f"a block has {self._block_size} tokens, not {len(tokens)}")
        return self._digest(parent + struct.pack(f"<{len(tokens)}i", *tokens))

    def _digest(self, data: bytes) -> BlockHash:
        return hashlib.blake2b(data, key=self._key, digest_size=16).digest()


def blocks_for(tokens: int, block_size: int) -> int:
    """How many blocks hold `tokens` tokens."""
    return -(-tokens // block_size)
