"""Queue and ledger under any order of arrivals, starts, answers, refusals, cancels and lost workers."""

import asyncio
from dataclasses import replace
from unittest.mock import ANY

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import Overloaded, Refused
from contracts.kv import KvLayout
from contracts.requests import AttemptKey
from contracts.session import Failed, Reserved, WorkerEvent, WorkerFrame
from contracts.workers import Role, WorkerCapacity, WorkerLoad
from router.ledger import Ledger, Need, WorkerAccount
from router.policies import least_loaded
from router.queue import RequestQueue
from simulator.virtual_time import run
from tests.helpers.router_rig import account_of

CAPACITY = WorkerCapacity(12, 3, 0, 1024, KvLayout("m", "t", "n", "float32", 1, 1, 4, 16, "r"))
MAX_REQUESTS, MAX_TOKENS = 6, 300
ROLES = frozenset({Role.DECODE})

ACTIONS = st.one_of(
    st.tuples(st.just("ask"), st.integers(1, 190)),
    st.tuples(st.sampled_from(["answer", "refuse", "finish", "cancel", "lose", "frame", "strand"]), st.integers(0, 50)),
)


class Worker:
    """The worker's side: it holds what it has answered, and says what is free."""

    def __init__(self, account: WorkerAccount) -> None:
        self.account = account
        self.held: dict[AttemptKey, int] = {}

    def frame(self, *events: WorkerEvent) -> None:
        free = CAPACITY.blocks - sum(self.held.values())
        self.account.frame(WorkerFrame(WorkerLoad(free, CAPACITY.slots - len(self.held), 0, len(self.held), 0), events))


class Cluster:
    """A queue over a ledger of two workers, with a record of all that was started."""

    def __init__(self) -> None:
        self.ledger = Ledger({Role.DECODE: least_loaded.create()})
        self.workers: dict[str, Worker] = {}
        self.needs: dict[int, Need] = {}
        self.attempts: dict[int, int] = {}
        self.running: dict[AttemptKey, str] = {}
        self.stranded: set[int] = set()
        self.waits: dict[int, asyncio.Task[AttemptKey]] = {}
        self.asked = 0
        self.queue: RequestQueue[int, AttemptKey] = RequestQueue(
            MAX_REQUESTS, MAX_TOKENS, self.start, self.over, self.stranded.__contains__
        )
        for name in ("a", "b"):
            self.open(name)

    def open(self, name: str) -> None:
        account = account_of(name, Role.DECODE, CAPACITY)
        self.ledger.open(account)
        self.workers[name] = Worker(account)

    def start(self, number: int) -> AttemptKey | None:
        key = AttemptKey(str(number), self.attempts.get(number, 0) + 1)
        chosen = self.ledger.place(key, self.needs[number])
        if chosen is None:
            return None
        new = {n for n, wait in self.waits.items() if n not in self.attempts and not (wait.done() or wait.cancelling())}
        assert not [n for n in new - self.stranded if n < number], "somebody who could be placed was overtaken"
        self.attempts[number] = key.attempt
        self.running[key] = chosen[Role.DECODE]
        return key

    def over(self, key: AttemptKey) -> None:
        """The attempt has ended: both sides let go."""
        worker = self.workers[self.running.pop(key)]
        worker.held.pop(key, None)
        worker.account.release(key)

    def wait(self, number: int) -> None:
        waiting = self.queue.wait(number, number, self.needs[number].tokens)
        self.waits[number] = asyncio.get_running_loop().create_task(waiting)

    def ask(self, tokens: int) -> None:
        waiting, queued = len(self.queue), self.queue.tokens
        fits = waiting < MAX_REQUESTS and (not waiting or queued + tokens <= MAX_TOKENS)
        if not fits:
            with pytest.raises(Overloaded) as refused:
                self.queue.admit(tokens)
            assert refused.value.retry_after is not None
            assert 1 <= refused.value.retry_after <= 60
            return
        self.queue.admit(tokens)
        self.asked += 1
        self.needs[self.asked] = Need(tokens, min(2, 192 - tokens), tokens + min(2, 192 - tokens), ROLES)
        self.wait(self.asked)

    async def act(self, action: str, pick: int) -> None:
        unanswered = [key for key, name in self.running.items() if key not in self.workers[name].held]
        if action == "ask":
            self.ask(pick)
        elif action == "answer" and unanswered:
            key = unanswered[pick % len(unanswered)]
            worker = self.workers[self.running[key]]
            need = self.needs[int(key.request_id)]
            worker.held[key] = -(-(need.tokens + need.growth) // 16)
            worker.frame(Reserved(key))
        elif action == "refuse" and unanswered:
            key = unanswered[pick % len(unanswered)]
            worker = self.workers[self.running[key]]
            worker.frame(Failed(key, Refused("full").info()))
            self.over(key)
            self.wait(int(key.request_id))
        elif action == "finish" and self.running:
            self.over(list(self.running)[pick % len(self.running)])
        elif action == "cancel" and self.waits:
            self.waits[list(self.waits)[pick % len(self.waits)]].cancel()
        elif action == "lose":
            name = sorted(self.workers)[pick % 2]
            lost = [key for key, on in self.running.items() if on == name]
            self.ledger.close(self.workers[name].account)
            for key in lost:
                self.over(key)
            self.open(name)
            for key in lost:
                self.wait(int(key.request_id))
        elif action == "strand" and self.waits:
            self.stranded ^= {list(self.waits)[pick % len(self.waits)]}
        elif action == "frame":
            for worker in self.workers.values():
                worker.frame()
        self.queue.pump_soon()
        await asyncio.sleep(0.01)  # virtual: everything that can go on has gone on
        self.waits = {number: task for number, task in self.waits.items() if not task.done()}

    def check(self) -> None:
        self.queue.check()
        self.ledger.check()
        assert len(self.queue) == len(self.waits) <= MAX_REQUESTS + 2 * CAPACITY.slots
        for worker in self.workers.values():
            held = sum(worker.held.values())
            assert held <= CAPACITY.blocks, "more was dispatched than the worker has"
            assert 0 <= worker.account.free_blocks <= CAPACITY.blocks
            assert 0 <= worker.account.free_slots <= CAPACITY.slots
            assert worker.account.placed == sum(on == worker.account.worker_id for on in self.running.values())


@settings(max_examples=150, deadline=None)
@given(st.lists(ACTIONS, max_size=50))
def test_fifo_bounded_never_negative_and_all_released(actions: list[tuple[str, int]]) -> None:
    async def scenario() -> None:
        cluster = Cluster()
        for action, pick in actions:
            await cluster.act(action, pick)
            cluster.check()
        cluster.stranded.clear()
        while cluster.running or cluster.waits:  # all that was let in gets through once the others end
            before = (len(cluster.running), len(cluster.waits))
            await cluster.act("finish", 0)
            await cluster.act("frame", 0)
            assert (len(cluster.running), len(cluster.waits)) != before or cluster.running
            cluster.check()
        assert cluster.queue.tokens == 0
        for worker in cluster.workers.values():
            worker.frame()
            assert worker.account.placed == 0
            assert (worker.account.free_blocks, worker.account.free_slots) == (CAPACITY.blocks, CAPACITY.slots)

    run(scenario())


def nobody(_: int) -> bool:
    """Nobody is stranded."""
    return False


def test_a_prompt_above_the_token_bound_waits_when_nobody_else_does() -> None:
    async def scenario() -> None:
        queue: RequestQueue[int, int] = RequestQueue(4, 100, lambda _: None, lambda _: None, nobody)
        queue.admit(500)
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(queue.wait(1, 1, 500))
            await asyncio.sleep(0)
            with pytest.raises(Overloaded, match="prompt tokens"):
                queue.admit(1)
            waiting.cancel()
        assert queue.tokens == 0

    run(scenario())


def test_what_was_started_for_one_who_has_just_left_is_undone() -> None:
    async def scenario() -> None:
        undone: list[int] = []
        room: list[int] = []
        queue: RequestQueue[int, int] = RequestQueue(
            4, 100, lambda _: room.pop() if room else None, undone.append, nobody
        )
        waiting = asyncio.get_running_loop().create_task(queue.wait(1, 1, 10))
        await asyncio.sleep(0)
        room.append(42)
        queue.pump()
        waiting.cancel()  # in the same turn
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        assert undone == [42]
        queue.check()

    run(scenario())


def test_retry_after_follows_the_drain_rate() -> None:
    async def scenario() -> None:
        room = [1] * 5
        queue: RequestQueue[int, int] = RequestQueue(
            2, 100, lambda _: room.pop() if room else None, lambda _: None, nobody
        )
        for number in range(5):
            await queue.wait(number, number, 1)
            await asyncio.sleep(4.0)
        async with asyncio.TaskGroup() as tasks:
            waiting = [tasks.create_task(queue.wait(number, number, 1)) for number in (5, 6)]
            await asyncio.sleep(0)
            assert queue.retry_after() == 8  # two wait, one leaves each 4 s
            await asyncio.sleep(1000.0)
            assert queue.retry_after() == 60
            for task in waiting:
                task.cancel()

    run(scenario())


def test_keys_of_one_request_stay_apart() -> None:
    """A claim of an earlier attempt never frees a later one's."""
    account = account_of("a", Role.DECODE, CAPACITY)
    first = AttemptKey("1", 1)
    account.claim(first, Need(16, 0, 16, ROLES))
    account.claim(replace(first, attempt=2), Need(16, 0, 16, ROLES))
    account.release(first)
    account.frame(WorkerFrame(WorkerLoad(12, 3, 0, 0, 0), (Reserved(first),)))
    assert account.free_blocks == 11


def test_a_start_that_raises_ends_that_wait_only() -> None:
    async def scenario() -> None:
        def start(number: int) -> int | None:
            if number == 2:
                raise ZeroDivisionError
            return number if room else None

        room: list[int] = []
        queue: RequestQueue[int, int] = RequestQueue(4, 100, start, lambda _: None, nobody)
        waits = [asyncio.get_running_loop().create_task(queue.wait(number, number, 10)) for number in (1, 2, 3)]
        await asyncio.sleep(0)
        room.append(1)
        queue.pump()
        assert await asyncio.gather(*waits, return_exceptions=True) == [1, ANY, 3]
        assert isinstance(waits[1].exception(), ZeroDivisionError)
        with pytest.raises(ZeroDivisionError):  # also when it is the only one, at its arrival
            await queue.wait(2, 4, 10)
        assert len(queue) == queue.tokens == 0

    run(scenario())
