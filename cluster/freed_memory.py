"""Tells the C library to keep freed memory: called once at the start of a process that moves KV in messages.

By default glibc gives a buffer of the size of a frame back to the system when it is freed, and each new one is mapped
and faulted in page by page, which takes longer than to copy it: bare gRPC moves 0.9 to 1.2 GB/s with the defaults and
2.3 to 2.8 GB/s without, in the same minute (benchmarks/handover.py).
"""

import ctypes
import logging

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST_BUFFER = 32 << 20  # glibc takes no more
_KEPT = 1 << 30

_log = logging.getLogger(__name__)


def keep_freed_memory() -> None:
    """See the module. Without glibc it does nothing but say so."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        _log.info("this C library has no mallopt: freed memory is handled as it likes")
        return
    for parameter, value in ((_M_MMAP_THRESHOLD, _LARGEST_BUFFER), (_M_TRIM_THRESHOLD, _KEPT)):
        if not mallopt(parameter, value):
            _log.warning("mallopt(%d, %d) is refused", parameter, value)
