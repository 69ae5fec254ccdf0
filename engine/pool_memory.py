"""The memory of a pool of KV blocks: a file without a name, of which others can only map a read-only view.

Runners compute in it and kv_transfer reads and writes blocks. It knows nothing of who owns a block or of what a block
means, and must never move one.
"""

import fcntl
import mmap
import os
import weakref

import numpy as np
from numpy.typing import NDArray

from contracts.errors import StartupError
from contracts.kv import SPARE_BLOCKS, KvLayout
from engine.available_memory import available_memory

_F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h, not named by the fcntl of Python 3.11
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | _F_SEAL_FUTURE_WRITE


class PoolMemory:
    """A BlockStore in host memory, zero at first. `array`: its bytes, [block, byte], with the spare blocks at the end.

    All of it is there from the start, spare blocks too: neither a step nor a peer that has mapped it can fail, or
    wait, for a page. It takes about half a second for each GiB.
    """

    def __init__(self, layout: KvLayout, blocks: int) -> None:
        """Raises StartupError when the system does not have the memory, or is too old to protect it."""
        self.layout = layout
        self.blocks = blocks
        size = (blocks + SPARE_BLOCKS) * layout.block_bytes
        if size > (available := available_memory()):  # the kernel would not refuse it, but end some process for it
            raise _too_large(size, blocks, f"only {available / (1 << 30):.2f} GiB are free")
        self._descriptor = os.memfd_create("pdserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # a pool that nobody closes must not leave its file open
        self._close_descriptor = weakref.finalize(self, os.close, self._descriptor)
        try:
            os.posix_fallocate(self._descriptor, 0, size)
            mapping = mmap.mmap(self._descriptor, size)
        except OSError as error:
            self._close_descriptor()
            raise _too_large(size, blocks, str(error)) from error
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            self._close_descriptor()
            raise StartupError(f"memory cannot be sealed here ({error}); Linux 5.1 or newer is needed") from error
        whole = np.frombuffer(mapping, np.uint8)
        # touched once, as the first write into a page of a mapping costs 4 times what it costs later
        whole[:: mmap.PAGESIZE] = 0
        self.array: NDArray[np.uint8] = whole.reshape(-1, layout.block_bytes)

    @property
    def descriptor(self) -> int:
        """Open until `close`."""
        assert self._close_descriptor.alive, "the pool is closed"
        return self._descriptor

    def read(self, block: int) -> memoryview:
        """The block's bytes, read-only."""
        return self.writable(block).toreadonly()

    def writable(self, block: int) -> memoryview:
        """The block's bytes."""
        assert 0 <= block < len(self.array), f"block {block} of a pool of {self.blocks}"
        view: memoryview = self.array[block].data
        return view

    def close(self) -> None:
        """Give the memory back. Whoever still holds a view of it keeps the mapping, and nothing else, alive: memory
        must not vanish under a thread that reads it. Idempotent."""
        self.array = np.empty((0, self.layout.block_bytes), np.uint8)
        self._close_descriptor()


def _too_large(size: int, blocks: int, reason: str) -> StartupError:
    return StartupError(
        f"cannot allocate {size / (1 << 30):.2f} GiB for {blocks} KV blocks: {reason}; lower kv.memory or kv.blocks"
    )
