"""Who has which channel of a connection, and what is lent again."""

import asyncio
from dataclasses import dataclass

import pytest

from kv_transfer.channels.channels import MOST_IDLE, Channels
from protos.links.base import LinkClosed


@dataclass(eq=False)
class FakeChannel:
    broken: bool = False
    ended: bool = False

    @property
    def usable(self) -> bool:
        return not (self.broken or self.ended)

    def break_off(self) -> None:
        self.broken = True


class Opener:
    """Opens channels, when it may."""

    def __init__(self) -> None:
        self.opened: list[FakeChannel] = []
        self.free = asyncio.Event()
        self.free.set()

    async def __call__(self) -> FakeChannel:
        await self.free.wait()
        self.opened.append(FakeChannel())
        return self.opened[-1]


async def test_each_borrower_has_one_for_itself_and_it_is_lent_again() -> None:
    opener = Opener()
    channels = Channels(opener)
    first, second = await channels.borrow(), await channels.borrow()
    assert first is not second
    channels.give_back(first, reuse=True)
    assert await channels.borrow() is first
    assert not first.broken
    assert len(opener.opened) == 2


async def test_one_that_may_hold_bytes_is_broken_and_not_lent_again() -> None:
    channels = Channels(Opener())
    first = await channels.borrow()
    channels.give_back(first, reuse=False)
    assert first.broken
    assert await channels.borrow() is not first


async def test_one_that_ended_while_idle_is_replaced() -> None:
    channels = Channels(Opener())
    first = await channels.borrow()
    channels.give_back(first, reuse=True)
    first.ended = True
    assert await channels.borrow() is not first
    assert first.broken  # so that its socket is freed


async def test_few_are_kept() -> None:
    opener = Opener()
    channels = Channels(opener)
    burst = [await channels.borrow() for _ in range(MOST_IDLE + 3)]
    for channel in burst:
        channels.give_back(channel, reuse=True)
    assert [channel.broken for channel in burst] == [False] * MOST_IDLE + [True] * 3


async def test_close_breaks_what_is_idle_and_what_is_lent() -> None:
    channels = Channels(Opener())
    idle, lent = await channels.borrow(), await channels.borrow()
    channels.give_back(idle, reuse=True)
    channels.close()
    channels.close()
    assert idle.broken
    assert lent.broken
    channels.give_back(lent, reuse=True)
    with pytest.raises(LinkClosed, match="closed"):
        await channels.borrow()


async def test_one_that_opens_while_the_connection_closes_is_broken() -> None:
    opener = Opener()
    channels = Channels(opener)
    opener.free.clear()
    borrowing = asyncio.create_task(channels.borrow())
    await asyncio.sleep(0)
    channels.close()
    opener.free.set()
    with pytest.raises(LinkClosed):
        await borrowing
    assert opener.opened[0].broken
