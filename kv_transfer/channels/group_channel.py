"""One channel of transports/nccl.py: a communicator of two ranks, and a socket that tells when an end is gone.

On the socket the two ends meet and tell each other where their ranks are; no block travels on it. Its end breaks the
channel at once, where a communicator without anything to do would notice nothing.
"""

import socket
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from kv_transfer.channels.tcp_channel import TcpChannel
from kv_transfer.channels.threads import Threads
from protos.links.base import LinkClosed

T = TypeVar("T")


class Group(Protocol):
    """One rank of a communicator of two, over a pool. Its calls block, each message is one block, and send and receive
    raise ConnectionError when the communicator has broken."""

    def send(self, blocks: Sequence[int]) -> None:
        """When it ends, however it ends, nothing reads the blocks any more."""

    def receive(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """Into these blocks, in order; the word sums of what the pool holds then. When it ends, however it ends,
        nothing writes into the blocks any more."""

    def abort(self) -> None:
        """From another thread: what is pending fails on both sides. It blocks for milliseconds."""


class GroupChannel:
    """One end of a channel, see channels.Channel. `dispose` is called once, with its group; it must abort the group,
    and not in the thread of the loop. `on_break` is called once."""

    def __init__(
        self,
        name: bytes,
        sock: socket.socket,
        threads: Threads,
        dispose: Callable[[Group], object],
        on_break: Callable[["GroupChannel"], None],
    ) -> None:
        self.name = name
        self._group: Group | None = None
        self._dispose = dispose
        self._on_break = on_break
        self._link = TcpChannel(name, sock, threads, self._leave)

    @property
    def usable(self) -> bool:
        """False when it is broken or the other end is gone."""
        return self._link.usable

    def next_number(self) -> int:
        """Of a chunk that travels on it: 0, 1, ..., counted by each end for itself."""
        return self._link.next_number()

    async def form(self, form: Callable[[socket.socket], Group]) -> None:
        """The first job: the group, made by `form` in a thread, which must be bounded in time; the two ends may talk
        on the socket meanwhile. Raises LinkClosed."""

        def job(sock: socket.socket) -> None:
            self._group = form(sock)

        try:
            await self._run(job)
        finally:
            if not self._link.usable:
                self._link.break_off()
                self._end_group()  # it was not there yet if the channel broke before
        if self._group is None:
            raise LinkClosed("the other end of the channel is gone")

    def watch(self) -> None:
        """Break when the other end is gone. Not before the group is formed."""
        self._link.watch()

    async def run(self, job: Callable[[Group], T]) -> T:
        """A job that sends or receives, see TcpChannel.run. One that comes early waits until the group is formed."""
        return await self._run(lambda _: job(self._formed()))

    def break_off(self) -> None:
        """Whatever uses it ends at once, on both sides. Idempotent."""
        self._link.break_off()

    async def _run(self, job: Callable[[socket.socket], T]) -> T:
        def attempt(sock: socket.socket) -> T:
            try:
                return job(sock)
            except OSError as error:
                why = str(error)
            raise ConnectionError(why)  # a new one: the frames behind the other keep the group's descriptors open

        return await self._link.run(attempt)

    def _formed(self) -> Group:
        if self._group is None:
            raise ConnectionError("it is broken")
        return self._group

    def _end_group(self) -> None:
        if self._group is not None:
            self._dispose(self._group)
            self._group = None

    def _leave(self, _: TcpChannel) -> None:
        self._end_group()
        self._on_break(self)
