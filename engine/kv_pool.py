"""The memory of the KV pool: [block, layer, 2, kv_head, token, dim] in host memory.

The runner computes in it and kv_transfer copies blocks in and out of it. It knows nothing of who owns a
block, and must never move one.
"""

import numpy as np
import torch

from contracts.errors import StartupError
from contracts.kv import KvLayout

_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class KvPool:
    """A BlockStore whose blocks torch reads and writes in place.

    All memory is zero at first and is mapped by the system only where it is touched, so an unused block
    costs nothing and can never hold a stray NaN.
    """

    def __init__(self, layout: KvLayout, blocks: int) -> None:
        """Raises StartupError when the system refuses the memory."""
        try:
            memory = np.zeros((blocks, layout.block_bytes), np.uint8)
        except (MemoryError, ValueError) as error:
            size = blocks * layout.block_bytes / (1 << 30)
            raise StartupError(
                f"cannot allocate {size:.2f} GiB for {blocks} KV blocks; lower kv.memory or kv.blocks"
            ) from error
        self._layout = layout
        self._memory = memory
        shape = (blocks, layout.layers, 2, layout.kv_heads, layout.block_size, layout.head_dim)
        self._tensor = torch.from_numpy(memory).view(_TORCH_DTYPES[layout.dtype]).view(shape)

    @property
    def layout(self) -> KvLayout:
        return self._layout

    @property
    def blocks(self) -> int:
        """How many blocks the pool has."""
        return len(self._memory)

    def layer(self, index: int) -> torch.Tensor:
        """One layer of all blocks: a strided view [block, 2, kv_head, token, dim]."""
        return self._tensor[:, index]

    def read(self, block: int) -> memoryview:
        """The bytes of one block, read-only, without a copy."""
        self._check(block)
        return memoryview(self._memory[block]).toreadonly()

    def write(self, block: int, data: memoryview | bytes) -> None:
        """Overwrite one whole block. Raises ValueError when the size differs."""
        self._check(block)
        source = np.frombuffer(data, np.uint8)
        if source.size != self._layout.block_bytes:
            raise ValueError(f"a block has {self._layout.block_bytes} bytes, not {source.size}")
        self._memory[block] = source

    def _check(self, block: int) -> None:
        assert 0 <= block < len(self._memory), f"block {block} of a pool of {len(self._memory)}"
