"""The KV pool as torch sees it: [block, layer, 2, kv_head, token, dim] in host memory.

The runner computes in it and kv_transfer copies blocks in and out of it. It knows nothing of who owns a
block, and must never move one.
"""

import torch

from contracts.kv import KvLayout
from engine.pool_memory import PoolMemory

_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class KvPool:
    """A BlockStore whose blocks torch reads and writes in place. An unused block is zero and can never hold a stray
    NaN."""

    def __init__(self, layout: KvLayout, blocks: int) -> None:
        """Raises StartupError when the system does not have the memory."""
        self._memory = PoolMemory(layout, blocks)
        shape = (blocks, layout.layers, 2, layout.kv_heads, layout.block_size, layout.head_dim)
        in_pool = torch.from_numpy(self._memory.array[:blocks])  # the spare blocks are not for attention
        self._tensor = in_pool.view(_TORCH_DTYPES[layout.dtype]).view(shape)

    @property
    def layout(self) -> KvLayout:
        return self._memory.layout

    @property
    def blocks(self) -> int:
        return self._memory.blocks

    @property
    def descriptor(self) -> int:
        """See PoolMemory."""
        return self._memory.descriptor

    def layer(self, index: int) -> torch.Tensor:
        """One layer of all blocks: a strided view [block, 2, kv_head, token, dim]."""
        return self._tensor[:, index]

    def read(self, block: int) -> memoryview:
        """The bytes of one block, read-only, without a copy."""
        return self._memory.read(block)

    def writable(self, block: int) -> memoryview:
        """The same bytes, to write in place."""
        return self._memory.writable(block)

    def close(self) -> None:
        """Give the memory back, see PoolMemory. Idempotent."""
        self._tensor = torch.empty(0)
        self._memory.close()
