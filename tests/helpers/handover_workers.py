"""Both workers of a hand-over without an engine, for machines that explore them: real Exports, Reservations and
BlockManagers, and memory in which each block says who wrote it.

What the roles do between those is modelled on them: prefill_workers/worker.py and decode_workers/worker.py. Every
method asserts what must hold; the message says which promise is broken.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence as Blocks
from dataclasses import dataclass, replace

from contracts.errors import Cancelled, DeadlineExceeded, PdserveError, Refused, Stale
from contracts.handover import Pull
from contracts.kv import BlockHash, blocks_for
from contracts.requests import AttemptKey, FinishReason, Token
from decode_workers.reservations import Reservations
from engine.block_manager import BlockManager, Holder, HolderKind
from kv_transfer.exports import Exports
from kv_transfer.handshake import Handshake
from kv_transfer.subscription import Subscription
from tests.helpers.handover import BLOCK_SIZE, CONFIG, LAYOUT, SECRET, ByteStore

LIMITS = replace(CONFIG, lease_seconds=3.0, park_seconds=1.5, frame_bytes=LAYOUT.block_bytes)
TOMBSTONES = 3
PROMPT_BLOCKS = 3  # at most
PREFILL_BLOCKS, DECODE_BLOCKS, SLOTS = 4, 7, 3
MOST_RUNNING = 1
"""Small: what is let go is given out again at once."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """`ticket` is the prefill worker's, `shown` the decode worker's. `ends`: its first token ends the request.
    `deadline` is in the loop's time."""

    key: AttemptKey
    incarnation: int
    ticket: bytes
    shown: bytes
    tokens: int
    ends: bool
    deadline: float

    @property
    def blocks(self) -> int:
        return blocks_for(self.tokens, BLOCK_SIZE)

    def content(self, index: int) -> bytes:
        """What block `index` of its prompt must hold."""
        return f"{self.incarnation} {self.key} {index} ".encode().ljust(LAYOUT.block_bytes, b".")


class Life:
    """A prefill worker between two restarts. Implements Pins."""

    def __init__(self, incarnation: int, loop: asyncio.AbstractEventLoop, reached: Counter[str]) -> None:
        self.incarnation = incarnation
        self.handshake = Handshake(incarnation, LAYOUT, SECRET)
        self.blocks = BlockManager(PREFILL_BLOCKS)
        self.store = ByteStore(PREFILL_BLOCKS)
        self.exports = Exports(self, loop, block_size=BLOCK_SIZE, config=LIMITS, tombstones=TOMBSTONES)
        self.legs: dict[AttemptKey, Attempt] = {}
        self.computed: dict[AttemptKey, int] = {}  # tokens, of the prompts that have blocks and are not done
        self.subscriptions: dict[Subscription, float] = {}  # since when
        self._ended_last: AttemptKey | None = None
        self._loop = loop
        self._reached = reached

    # The router's side

    def submit(self, attempt: Attempt) -> None:
        if attempt.key in self.legs or attempt.deadline <= self._loop.time():
            return
        if attempt.incarnation != self.incarnation:
            self._fail(attempt.key, Stale("test"))
            return
        early = [s for s in self.subscriptions if self._parked(s) and s.pull.key == attempt.key]
        self.legs[attempt.key] = attempt
        opened = self.exports.open(attempt.key, attempt.ticket, attempt.deadline)
        assert not (opened and attempt.key == self._ended_last), "an attempt that had ended was opened"
        if not opened:
            del self.legs[attempt.key]
            return
        self._loop.call_at(attempt.deadline, self.end, attempt.key, DeadlineExceeded("test"))
        entitled = [s for s in early if _ticket(s) == attempt.ticket]
        if entitled:
            self._reached["early Pull served"] += 1
            assert entitled[-1].export is not None, "an early Pull was dropped"

    def cancel(self, key: AttemptKey) -> None:
        if key in self.legs:
            self.end(key, Cancelled("test"))
        else:
            self._fail(key, Cancelled("test"))

    def end(self, key: AttemptKey, error: PdserveError) -> None:
        if self.legs.pop(key, None) is not None:
            self._stop(key)
            self._fail(key, error)

    def _fail(self, key: AttemptKey, error: PdserveError) -> None:
        self._ended_last = key
        self.exports.fail(key, error)

    # The engine

    def admit(self) -> None:
        """Start the oldest prompt that waits, if it fits."""
        waiting = [a for a in self.legs.values() if a.key not in self.computed and a.key not in self.exports.owners()]
        if not waiting or not self.blocks.can_allocate([], waiting[0].blocks):
            return
        attempt, served = waiting[0], {b for blocks in self.exports.owners().values() for b in blocks}
        table = self.blocks.allocate(Holder(HolderKind.SEQUENCE, attempt.key), [], attempt.blocks)
        assert not served & set(table), "a block was given out that an export still serves"
        self.computed[attempt.key] = 0
        self.exports.attach(attempt.key, tuple(table))
        self.check()

    def step(self, key: AttemptKey) -> None:
        """Compute one block's tokens of a prompt."""
        attempt, before = self.legs[key], self.computed[key]
        after = min(before + BLOCK_SIZE, attempt.tokens)
        table = self.blocks.holders()[Holder(HolderKind.SEQUENCE, key)]
        index = before // BLOCK_SIZE
        self.store.data[table[index]][:] = attempt.content(index)
        self.computed[key] = after
        self.exports.publish(key, after)
        if after == attempt.tokens:
            finish = FinishReason.STOP if attempt.ends else None
            self.exports.finish(key, Token(1, 42, "x", None, finish), after)
            self._stop(key)
        self.check()

    def _stop(self, key: AttemptKey) -> None:
        if self.computed.pop(key, None) is not None:
            self.blocks.release(Holder(HolderKind.SEQUENCE, key))

    # Pins

    def pin(self, key: AttemptKey, blocks: Blocks[int]) -> None:
        self.blocks.share(Holder(HolderKind.EXPORT, key), blocks)

    def lend(self, key: AttemptKey, hashes: Blocks[BlockHash]) -> Blocks[int]:
        raise NotImplementedError("these machines know no Fetch")

    def unpin(self, key: AttemptKey, error: PdserveError | None) -> None:
        self.blocks.release(Holder(HolderKind.EXPORT, key))
        self._ended_last = key
        self.legs.pop(key, None)
        self._stop(key)

    # What must hold

    def subscribed(self, subscription: Subscription) -> None:
        assert subscription.pull.incarnation == self.incarnation, "a Pull for another incarnation was let in"
        self.subscriptions[subscription] = self._loop.time()

    def check(self) -> None:
        assert len(self.exports._tombstones) <= TOMBSTONES, "tombstones leak"
        holders = self.blocks.holders()
        for key, blocks in self.exports.owners().items():
            assert holders.get(Holder(HolderKind.EXPORT, key)) == blocks, "an export serves blocks that are not held"
            others = {b for holder, table in holders.items() if holder.key != key for b in table}
            assert not others & set(blocks), "a block was given out that an export still serves"
            export = self.exports._exports[key]
            lease_ends = export.deadline if export.lease_ends is None else export.lease_ends
            assert self._loop.time() <= lease_ends, "an export outlives its lease"
            for index, block in enumerate(blocks[: export.ready]):
                found = self.store.data[block]
                assert found == self.legs[key].content(index), f"an export serves {bytes(found)!r} to {key}"
        pinned = {holder.key for holder in holders if holder.kind is HolderKind.EXPORT}
        assert pinned == self.exports.owners().keys(), "blocks are pinned for nobody"
        for subscription, since in self.subscriptions.items():
            served = subscription.export
            assert served is None or served.ticket == _ticket(subscription), "a wrong ticket is served"
            if self._parked(subscription):
                assert self._loop.time() <= since + LIMITS.park_seconds, "a parked Pull was forgotten"
                assert subscription.pull.key not in self.legs, "a Pull waits for a Submit that has come"
        self.exports.check()
        self.blocks.check()

    def check_idle(self) -> None:
        """When all attempts have ended."""
        self.check()
        assert self.blocks.counts().free == PREFILL_BLOCKS, "the prefill worker leaks blocks"
        assert self.exports.leases() == 0
        assert not self.exports._exports, "exports leak"
        assert not self.exports._parked, "parked Pulls leak"
        assert all(s.over.is_set() for s in self.subscriptions), "a puller was told nothing"

    @staticmethod
    def _parked(subscription: Subscription) -> bool:
        return subscription.export is None and not subscription.over.is_set()


class _OwnedStore(ByteStore):
    """Memory that tells when somebody writes into a block that no receive holds."""

    def __init__(self, room: "Room") -> None:
        super().__init__(DECODE_BLOCKS)
        self._room = room

    def writable(self, block: int) -> memoryview:
        if not any(block in blocks for blocks in self._room.receiving.values()):
            self._room.trespass = AssertionError(f"block {block} was written for a receive that has ended")
            raise self._room.trespass
        return super().writable(block)


class Room:
    """What a decode worker holds: a reservation while a receive lasts, then a sequence."""

    def __init__(self, reached: Counter[str]) -> None:
        self.blocks = BlockManager(DECODE_BLOCKS)
        self.store = _OwnedStore(self)
        self.trespass: AssertionError | None = None
        self.reservations = Reservations(self.blocks, block_size=BLOCK_SIZE, slots=SLOTS)
        self.receiving: dict[AttemptKey, tuple[int, ...]] = {}  # blocks that a receive may write to
        self.running: dict[AttemptKey, Attempt] = {}
        self._reached = reached

    def reserve(self, attempt: Attempt) -> tuple[int, ...]:
        """The blocks of the prompt. Raises Refused."""
        tokens = attempt.tokens + 1
        try:
            reservation = self.reservations.reserve(attempt.key, tokens, [], sequences=len(self.running))
        except Refused:
            self._reached["refused"] += 1
            raise
        written = {block for blocks in self.receiving.values() for block in blocks}
        assert not written & set(reservation.blocks), "a block was given out that a receive still writes to"
        self.receiving[attempt.key] = reservation.blocks
        return reservation.blocks[: attempt.blocks]

    def commit(self, attempt: Attempt) -> None:
        """Last has come and was verified."""
        for index, block in enumerate(self.receiving[attempt.key][: attempt.blocks]):
            found = bytes(self.store.data[block])
            assert found == attempt.content(index), f"{attempt} committed {found!r} as its block {index}"
        assert attempt.shown == attempt.ticket, "a wrong ticket was served"
        self.reservations.commit(attempt.key)
        self.receiving[attempt.key] = ()
        self.running[attempt.key] = attempt
        self._reached["committed"] += 1
        while len(self.running) > MOST_RUNNING:
            self.end(next(iter(self.running)))

    def leave(self, key: AttemptKey) -> None:
        """The attempt has ended, its receive perhaps not yet."""
        if key in self.reservations:
            self.reservations.leave(key)

    def received(self, key: AttemptKey) -> None:
        """The receive has ended and writes no more."""
        del self.receiving[key]
        if key in self.reservations:
            self.reservations.release(key)

    def end(self, key: AttemptKey) -> None:
        """The sequence has ended."""
        del self.running[key]
        self.blocks.release(Holder(HolderKind.SEQUENCE, key))

    def check(self) -> None:
        if self.trespass is not None:
            raise self.trespass
        self.blocks.check()
        writing = {key for key, blocks in self.receiving.items() if blocks}
        assert self.reservations.keys() == writing, "reservations are not those of the receives that may write"
        holders = self.blocks.holders()
        for attempt in self.running.values():
            table = holders[Holder(HolderKind.SEQUENCE, attempt.key)]
            for index, block in enumerate(table[: attempt.blocks]):
                found = bytes(self.store.data[block])
                assert found == attempt.content(index), f"{found!r} was written over block {index} of {attempt}"

    def check_idle(self) -> None:
        """When all attempts have ended."""
        self.check()
        assert self.blocks.counts().free == DECODE_BLOCKS, "the decode worker leaks blocks"
        assert len(self.reservations) == 0, "reservations leak"
        assert not self.receiving, "a receive never ends"


def _ticket(subscription: Subscription) -> bytes:
    assert isinstance(subscription.pull, Pull)
    return subscription.pull.ticket
