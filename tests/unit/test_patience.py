"""Silence is the peer's only while we listen."""

import asyncio

import pytest

from protos.links.base import LinkClosed
from protos.patience import receive_within
from simulator.virtual_time import run


class Stream:
    """Delivers messages at given loop times."""

    def __init__(self, *due: float) -> None:
        self._due = list(due)

    async def send(self, message: str) -> None:
        raise LinkClosed("one way")

    async def receive(self) -> str | None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._due[0] - loop.time()))
        return f"due at {self._due.pop(0):g}"

    async def close(self) -> None:
        """Nothing to end."""


def test_a_message_within_the_time_is_received() -> None:
    assert run(receive_within(Stream(2.9), 3.0)) == "due at 2.9"


def test_silence_is_given_up() -> None:
    with pytest.raises(TimeoutError):
        run(receive_within(Stream(3.1), 3.0))


def test_a_pause_of_ours_is_not_the_peers_silence() -> None:
    """The loop stands still for longer than the limit while messages arrive: they are read afterwards."""

    async def main() -> str | None:
        loop = asyncio.get_running_loop()
        waiting = asyncio.create_task(receive_within(Stream(1.0), 3.0))
        await asyncio.sleep(0.1)
        stopped = loop.time() + 60.0
        loop._clock.now = stopped  # type: ignore[attr-defined]  # as if the process had been stopped
        return await waiting

    assert run(main()) == "due at 1"
