"""How long a pair of workers rests after it has lost hand-overs."""

import asyncio
from typing import cast

from router.attempt import Attempt
from router.ledger import Ledger
from router.pairs import FailingPairs
from tests.helpers.handover import in_virtual_time

PAIR = ("p0", "d0")


class Ended:
    """What FailingPairs asks of an attempt."""

    def __init__(self, *, arrived: bool = False, pair: tuple[str, str] | None = PAIR) -> None:
        self.arrived = arrived
        self.pair = pair


def attempt(*, arrived: bool = False, pair: tuple[str, str] | None = PAIR) -> Attempt:
    return cast(Attempt, Ended(arrived=arrived, pair=pair))


class Room:
    """When a pair may be tried again."""

    def __init__(self) -> None:
        self.ledger = Ledger({})
        self.times: list[float] = []
        self.pairs = FailingPairs(self.ledger, lambda: self.times.append(asyncio.get_running_loop().time()))


@in_virtual_time
async def test_it_rests_longer_each_time_until_a_hand_over_arrives() -> None:
    room, rests = Room(), []
    for _ in range(7):
        began = asyncio.get_running_loop().time()
        room.pairs.failed(attempt())
        assert room.ledger._avoided == {PAIR}
        await asyncio.sleep(3)
        assert not room.ledger._avoided
        rests.append(round(room.times.pop() - began, 3))
    assert rests == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    room.pairs.ended(attempt(arrived=True))
    began = asyncio.get_running_loop().time()
    room.pairs.failed(attempt())
    await asyncio.sleep(3)
    assert round(room.times.pop() - began, 3) == 0.1


@in_virtual_time
async def test_what_was_in_work_together_counts_once() -> None:
    room = Room()
    for _ in range(5):
        room.pairs.failed(attempt())
    await asyncio.sleep(0.11)
    assert len(room.times) == 1
    assert not room.ledger._avoided


@in_virtual_time
async def test_nothing_rests_for_a_loss_after_the_hand_over_or_of_a_worker() -> None:
    room = Room()
    room.pairs.failed(attempt(arrived=True))
    room.pairs.failed(attempt(pair=None))
    assert not room.ledger._avoided
