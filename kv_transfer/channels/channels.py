"""The channels of one connection. Each hand-over borrows one for itself, so that none waits behind another's bytes.

A plug that has channels keeps one pool for each of its connections. It must never lend a channel in which bytes of
an earlier hand-over may be left: whoever borrows one says at the end whether it may be lent again.
"""

from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from protos.links.base import LinkClosed

MOST_IDLE = 8
"""Channels kept for later, at most; a burst may open more."""


class Channel(Protocol):
    """What the pool asks of a channel."""

    @property
    def usable(self) -> bool:
        """False when it is broken, as far as can be known without waiting."""

    def break_off(self) -> None:
        """Whatever uses it ends at once, on both sides. Idempotent."""


ChannelT = TypeVar("ChannelT", bound=Channel)


class Channels(Generic[ChannelT]):
    """`open_channel` makes one and raises LinkClosed when it cannot; it is bounded in time."""

    def __init__(self, open_channel: Callable[[], Awaitable[ChannelT]]) -> None:
        self._open_channel = open_channel
        self._lent: set[ChannelT] = set()
        self._idle: list[ChannelT] = []
        self._closed = False

    async def borrow(self) -> ChannelT:
        """A channel that nobody else has: the last one that came back and still works, else a new one. Raises
        LinkClosed."""
        channel = self._reusable()
        if channel is None:
            channel = await self._open_channel()
        if self._closed:
            channel.break_off()
            raise LinkClosed("this connection is closed")
        self._lent.add(channel)
        return channel

    def give_back(self, channel: ChannelT, *, reuse: bool) -> None:
        """The one who borrowed it is done, to be called once. `reuse`: nothing of the hand-over is left in it."""
        if self._closed:
            return  # it is broken already
        self._lent.remove(channel)
        if reuse and len(self._idle) < MOST_IDLE:
            self._idle.append(channel)
        else:
            channel.break_off()

    def close(self) -> None:
        """Break every channel, those that are lent too; nothing can be borrowed any more. Idempotent."""
        self._closed = True
        for channel in (*self._idle, *self._lent):
            channel.break_off()
        self._idle.clear()
        self._lent.clear()

    def _reusable(self) -> ChannelT | None:
        while self._idle:
            channel = self._idle.pop()
            if channel.usable:
                return channel
            channel.break_off()
        return None
