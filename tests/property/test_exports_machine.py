"""Exports under any order of events: pins balance, leases end, tombstones stay bounded."""

import asyncio
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from contracts.errors import EngineFailed
from contracts.handover import Pull
from contracts.requests import AttemptKey, FinishReason
from kv_transfer.exports import Exports
from kv_transfer.subscription import Subscription
from simulator.virtual_time import VirtualTimeLoop
from tests.helpers.handover import BLOCK_SIZE, CONFIG, TICKET, Book, fetch, pull, token

PROMPT_BLOCKS = 3
TOMBSTONES = 2
BACK = st.integers(-1, 2)
"""Which attempt: -1 is the next one, whose Submit has not come, 0 the newest, and so on."""
MOMENTS = st.sampled_from([0.0, 0.5, 1.0, 2.5])


class ExportsMachine(RuleBasedStateMachine):
    """One router, one engine and several pullers, each of which may do anything that is allowed to it."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualTimeLoop()
        self.book = Book()
        config = replace(CONFIG, lease_seconds=2.0, park_seconds=1.5)
        self.exports = Exports(self.book, self.loop, block_size=BLOCK_SIZE, config=config, tombstones=TOMBSTONES)
        self.lease = config.lease_seconds
        self.opened = 0
        self.lent = 0
        self.deadlines: dict[AttemptKey, float] = {}  # of what was opened, ended or not
        self.computed: dict[AttemptKey, int] = {}  # of what was attached
        self.finished: set[AttemptKey] = set()
        self.ended: set[AttemptKey] = set()  # by something that was said, not by time
        self.touched: dict[AttemptKey, float] = {}  # when the lease was last renewed
        self.subscriptions: list[Subscription] = []

    def key(self, back: int) -> AttemptKey:
        return AttemptKey(str(self.opened - 1 - back), 1)

    def current(self, key: AttemptKey) -> Subscription | None:
        """The Pull that is being served."""
        serving = [s for s in self.subscriptions if s.pull.key == key and s.export is not None and not s.over.is_set()]
        assert len(serving) <= 1
        return serving[0] if serving else None

    def touch(self, key: AttemptKey) -> None:
        if key in self.book.pinned:
            self.touched[key] = self.loop.time()

    # The worker

    @rule(seconds=st.sampled_from([60.0, 5.0, 1.0]), attach=st.booleans())
    def open(self, seconds: float, attach: bool) -> None:
        key = self.key(-1)
        self.opened += 1
        if self.exports.open(key, TICKET, self.loop.time() + seconds):
            self.deadlines[key] = self.loop.time() + seconds
            self.ended.discard(key)  # it was cancelled before, but its tombstone was pushed out
            if attach:
                self.attach(0)

    @rule(back=BACK)
    def attach(self, back: int) -> None:
        key = self.key(back)
        if key not in self.deadlines:
            return
        self.exports.attach(key, range(PROMPT_BLOCKS))
        if key in self.book.pinned and key not in self.computed:
            self.computed[key] = 0
            if self.current(key) is not None:
                self.touch(key)

    @precondition(lambda self: self.computed)
    @rule(back=BACK, tokens=st.integers(1, PROMPT_BLOCKS * BLOCK_SIZE), twice=st.booleans())
    def publish(self, back: int, tokens: int, twice: bool) -> None:
        key = self.key(back)
        if key in self.computed:
            self.computed[key] = min(self.computed[key] + tokens, PROMPT_BLOCKS * BLOCK_SIZE)
            for _ in range(1 + twice):
                self.exports.publish(key, self.computed[key])

    @precondition(lambda self: self.computed)
    @rule(back=BACK, finish=st.sampled_from([None, None, FinishReason.STOP]))
    def finish(self, back: int, finish: FinishReason | None) -> None:
        key = self.key(back)
        if key not in self.computed or key in self.finished:
            return
        if finish is not None:
            self.ended.add(key)
        elif self.current(key) is None:
            self.touch(key)
        self.finished.add(key)
        self.exports.finish(key, token(finish), PROMPT_BLOCKS * BLOCK_SIZE)
        self.exports.finish(key, token(finish), PROMPT_BLOCKS * BLOCK_SIZE)

    @rule(back=BACK, cancel=st.booleans())
    def fail(self, back: int, cancel: bool) -> None:
        key = self.key(back)
        self.ended.add(key)
        if cancel:
            self.exports.cancel(key, "test")
        else:
            self.exports.fail(key, EngineFailed("test"))
        assert key not in self.book.pinned
        assert self.current(key) is None

    # The pullers

    @rule(back=BACK, right=st.booleans(), first_block=st.sampled_from([0, 2, PROMPT_BLOCKS]))
    def subscribe(self, back: int, right: bool, first_block: int) -> None:
        key = self.key(back)
        ticket = TICKET if right else b"wrong"
        subscription = self.exports.subscribe(pull(key, ticket=ticket, first_block=first_block))
        self.subscriptions.append(subscription)
        if subscription.export is not None:
            self.touch(key)

    @rule(cached=st.integers(0, PROMPT_BLOCKS), seconds=st.sampled_from([60.0, 1.0]))
    def lend(self, cached: int, seconds: float) -> None:
        self.lent += 1
        key = AttemptKey(f"{self.lent}/prefix", 1)
        hashes = [bytes([number]) for number in range(PROMPT_BLOCKS)]
        self.book.cached = {hashes[number]: number for number in range(cached)}
        subscription = self.exports.lend(fetch(key, hashes, deadline_ms=int(1000 * seconds)))
        self.subscriptions.append(subscription)
        assert subscription.over.is_set() == (cached == 0)
        if cached:
            self.deadlines[key] = self.loop.time() + seconds
            self.computed[key] = cached * BLOCK_SIZE
            self.finished.add(key)
            self.touch(key)

    @precondition(lambda self: self.subscriptions)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        subscription = data.draw(st.sampled_from(self.subscriptions))
        if self.current(subscription.pull.key) is subscription:
            self.touch(subscription.pull.key)
        self.exports.renew(subscription)

    @precondition(lambda self: self.subscriptions)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        subscription = data.draw(st.sampled_from(self.subscriptions))
        key = subscription.pull.key
        if self.current(key) is subscription and key in self.computed:
            self.ended.add(key)
        self.exports.leave(subscription)
        assert subscription.over.is_set()

    @rule(seconds=MOMENTS)
    def wait(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    # What must hold

    @invariant()
    def book_keeping_is_consistent(self) -> None:
        self.exports.check()
        assert self.exports.owners() == self.book.pinned
        assert self.exports.leases() == len(self.book.pinned)

    @invariant()
    def pins_last_exactly_as_long_as_they_must(self) -> None:
        now = self.loop.time()
        for key in self.computed:
            ends = self.deadlines[key]
            if key in self.touched:
                ends = min(ends, self.touched[key] + self.lease)
            if key in self.ended or now > ends:
                assert key not in self.book.pinned
                assert self.book.unpinned.count(key) == 1
            elif now < ends:
                assert key in self.book.pinned, f"{key} was let go before {ends}"

    @invariant()
    def a_wrong_ticket_is_never_served(self) -> None:
        assert all(s.export is None for s in self.subscriptions if isinstance(s.pull, Pull) and s.pull.ticket != TICKET)

    def teardown(self) -> None:
        self.loop.run_until_complete(asyncio.sleep(3600))
        assert self.book.pinned == {}
        assert all(subscription.over.is_set() for subscription in self.subscriptions)
        assert sorted(self.book.unpinned, key=str) == sorted(self.computed, key=str)
        self.exports.check()
        self.loop.close()


TestExports = ExportsMachine.TestCase
TestExports.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
