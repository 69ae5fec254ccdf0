"""Inline transports of which one end misbehaves."""

from collections.abc import Callable

from contracts.kv import BlockStore
from kv_transfer.channels.inline import InlineEnd, InlineTransport


def bent(end: Callable[[BlockStore], InlineEnd]) -> Callable[[BlockStore], InlineTransport]:
    """A transport whose outlets and inlets are made by `end`."""

    def make(store: BlockStore) -> InlineTransport:
        transport = InlineTransport(store)
        transport._end = end(store)
        return transport

    return make
