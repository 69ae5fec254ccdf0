"""Inline transports of which one end misbehaves."""

from collections.abc import Callable

from contracts.kv import BlockStore
from kv_transfer.channels.inline import InlineEnd, InlineTransport


def bent(end: Callable[[BlockStore], InlineEnd]) -> Callable[[BlockStore], InlineTransport]:
    """A transport whose outlets and inlets are made by `end`."""
    return lambda store: InlineTransport(end(store))


plain = bent(InlineEnd)
"""One that behaves."""
