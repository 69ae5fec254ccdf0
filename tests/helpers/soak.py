"""The soak in virtual time: batches of requests on clusters on which everything goes wrong that can.

`run_batch(seed)` is one of them; the seed decides the ground, the requests and the faults. Every request must end in
the undisturbed run's tokens or in a prefix of them and a typed error, by its deadline, and nothing may be left.
"""

import asyncio
import logging
import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from contracts.errors import AttemptFailed, DeadlineExceeded, NotReady, PdserveError
from contracts.requests import GenerateRequest, Token
from decode_workers.worker import DecodeRole
from prefill_workers.worker import PrefillRole
from simulator.fault_plan import LONGEST_DELAY, Fault, FaultPlan, drawn
from simulator.fault_points import Action, Place, legal_faults
from simulator.virtual_time import run
from tests.helpers.faulted_cluster import FaultedCluster, faulted_cluster
from tests.helpers.simulated_cluster import SETTLE_SECONDS, collect, request, simulated_cluster, simulated_config
from tests.helpers.soak_grounds import BLOCK, GROUNDS, Ground

REQUESTS = 40
FAULTS = 40
STAYS = 1e6
"""Seconds: longer than any deadline."""
SLACK = 0.2
"""Seconds that a request may end after its deadline: none of its ends waits for a peer."""


@dataclass(slots=True)
class Client:
    """A caller: what it asks for and what it gets. It comes `pause` seconds after the one before it and stays `until`
    seconds at most."""

    wanted: GenerateRequest
    pause: float
    until: float
    expected: list[Token] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    error: PdserveError | None = None
    left: bool = False
    late: float = 0.0  # how long after its deadline it ended

    async def call(self, cluster: FaultedCluster, router: str) -> None:
        """Ask, and read to the end."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        task = asyncio.current_task()
        assert task is not None
        leaving = loop.call_later(self.until, task.cancel)
        try:
            async for output in cluster.generate(router, self.wanted, task.cancel):
                self.tokens.extend(output.tokens)
        except PdserveError as error:
            self.error = error
        except asyncio.CancelledError:
            self.left = True
        leaving.cancel()
        self.late = loop.time() - began - self.wanted.timeout

    def check(self) -> None:
        """Raises AssertionError unless it got what it may get."""
        assert self.late < SLACK, f"{self.late:g} s after its deadline"
        assert self.tokens == self.expected[: len(self.tokens)], f"{self.tokens} instead of {self.expected}"
        # e.g. not Cancelled: it was not the caller who gave up
        assert self.error is None or isinstance(self.error, AttemptFailed | NotReady | DeadlineExceeded), self.error
        if not self.left and self.error is None:
            assert len(self.tokens) == len(self.expected), "it ended early"

    @property
    def fair(self) -> bool:
        """Whether nothing but faults could keep it from its tokens."""
        return not self.left and not isinstance(self.error, DeadlineExceeded)


@dataclass(frozen=True, slots=True)
class Batch:
    """What came of one."""

    fired: list[Fault]
    clients: list[Client]
    spare: bool

    @property
    def fair(self) -> list[Client]:
        return [client for client in self.clients if client.fair]


def soak(requests: int, *, coverage: float) -> None:
    """Batches with so many requests in all. Raises AssertionError with the seed of the first batch that goes wrong, or
    when less than this share of all legal faults has happened, or too many requests have failed.

    PDSERVE_SOAK_SEED names one batch to run alone.
    """
    chosen = os.environ.get("PDSERVE_SOAK_SEED")
    if chosen is not None:
        run_batch(int(chosen))
        return
    happened: set[tuple[Place, Action]] = set()
    fair = served = 0
    for seed in range(requests // REQUESTS):
        batch = run_batch(seed)
        happened.update((fault.place, fault.action) for fault in batch.fired)
        if batch.spare:
            fair += len(batch.fair)
            served += sum(client.error is None for client in batch.fair)
    assert served >= 0.8 * fair, f"of {fair} requests only {served} were served"
    legal = legal_faults()
    absent = [f"{place}: {action}" for place, action in legal if (place, action) not in happened]
    assert len(absent) <= (1 - coverage) * len(legal), f"these faults have never happened: {absent}"


def run_batch(seed: int) -> Batch:
    """Raises AssertionError with the seed, the ground and the faults that fired."""
    dice = random.Random(seed)
    ground = GROUNDS[seed % len(GROUNDS)]
    plan = drawn(seed, requests=REQUESTS, faults=FAULTS)
    prompts = [tuple(dice.choices(range(1000), k=15 * BLOCK + 1)) for _ in range(3)]
    clients = [_client(dice, ground, prompts) for _ in range(REQUESTS)]
    try:
        with _loud():
            run(_undisturbed(clients))
            run(_disturbed(ground, plan, clients, dice))
    except BaseException as error:
        faults = "\n".join(f"  {fault}" for fault in plan.fired)
        error.add_note(f"seed {seed} on {ground}; the faults that happened:\n{faults}")
        raise
    return Batch(plan.fired, clients, ground.spare)


def _client(dice: random.Random, ground: Ground, prompts: list[tuple[int, ...]]) -> Client:
    """Its prompt begins as one of `prompts`, and its length lies at the end of a block."""
    length = max(1, dice.choice((1, 2, 3, 5, 8, 15)) * BLOCK + dice.choice((-1, 0, 1)))
    prompt = dice.choice(prompts)[:length]
    if dice.random() < 0.5:
        at = dice.randrange(length)
        prompt = prompt[:at] + tuple(dice.choices(range(1000), k=length - at))
    wanted = request(
        prompt,
        max_tokens=dice.choice((1, 2, 3, 8, 20, 60)),
        seed=dice.getrandbits(16),
        temperature=dice.choice((0.0, 1.0)),
    )
    if dice.random() < 0.4:  # every other token ends it
        wanted = replace(wanted, sampling=replace(wanted.sampling, stop_token_ids=tuple(range(0, 1000, 2))))
    stay = ground.stay * dice.random() ** 2 if dice.random() < ground.leaving else STAYS
    timeout = ground.slow * dice.choice((0.01, 0.05, 0.2)) if dice.random() < 0.05 else 60.0 * max(1.0, ground.slow / 5)
    return Client(replace(wanted, timeout=timeout), dice.choice((0.0, 0.0, 0.01, 1.0, 4.0)) * ground.pace, stay)


async def _undisturbed(clients: list[Client]) -> None:
    async with simulated_cluster(simulated_config(aggregated=True, blocks=1024, step_tokens=512)) as cluster:
        answers = await asyncio.gather(*(collect(cluster, replace(one.wanted, timeout=1e6)) for one in clients))
    for client, expected in zip(clients, answers, strict=True):
        client.expected = expected


async def _disturbed(ground: Ground, plan: FaultPlan, clients: list[Client], dice: random.Random) -> None:
    before = asyncio.all_tasks()
    async with faulted_cluster(ground.config(), plan, cost=ground.cost, copy_seconds=ground.copy) as cluster:
        await asyncio.sleep(SETTLE_SECONDS)
        baseline = _tasks()
        plan.armed = True
        calls = []
        for client in clients:
            await asyncio.sleep(client.pause)
            calls.append(asyncio.create_task(client.call(cluster, dice.choice(list(cluster.routers)))))
        await asyncio.wait(calls)
        plan.armed = False
        for call, client in zip(calls, clients, strict=True):
            call.result()
            client.check()
        await cluster.restored()
        await asyncio.sleep(LONGEST_DELAY + SETTLE_SECONDS)
        _audit(cluster)
        await asyncio.sleep(ground.lease)  # that long links to workers that are gone are kept
        await _probe(cluster, clients[0])
        await asyncio.sleep(SETTLE_SECONDS)
        _audit(cluster)
        assert _tasks() == baseline, f"tasks are left: {_tasks() - baseline}, {baseline - _tasks()}"
    assert asyncio.all_tasks() == before


async def _probe(cluster: FaultedCluster, like: Client) -> None:
    """Every router still serves."""
    for name, life in cluster.routers.items():
        await life.service.wait_ready()
        client = Client(replace(like.wanted, timeout=60.0), 0.0, STAYS, like.expected)
        await client.call(cluster, name)
        assert client.tokens == like.expected, f"the cluster serves no more: {client.error}"


def _tasks() -> Counter[str]:
    return Counter(getattr(task.get_coro(), "__qualname__", "?") for task in asyncio.all_tasks())


def _audit(cluster: FaultedCluster) -> None:
    """Nothing is held anywhere: blocks, slots, leases, parked Pulls, claims of routers."""
    for worker_id, host in cluster.local.workers.items():
        core, role = host.core, host._role
        core.check_blocks()
        assert core.blocks.available == core.blocks.total, f"{worker_id} leaks {core.blocks.holders()}"
        assert isinstance(role, PrefillRole | DecodeRole)
        assert role.leases() == 0
        assert not role.busy
        assert not role._hand_over.exporting.exports._parked
    for life in cluster.routers.values():
        life.service.check()
        views = life.service.workers()
        assert len(views) == len(cluster.local.workers), f"a worker is not back: {views}"
        for view in views:
            assert view.placed == 0
            assert view.load.running == view.load.waiting == view.load.backlog_tokens == 0
            assert view.load.free_blocks == view.capacity.blocks
            assert view.load.free_slots == view.capacity.slots


@contextmanager
def _loud() -> Iterator[None]:
    """What the product logs as an error is a fault of ours: none may be. What it warns of is what happens here."""
    heard: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: heard.append(handler.format(record))  # type: ignore[method-assign]  # it only listens
    logging.getLogger().addHandler(handler)
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        logging.getLogger().removeHandler(handler)
    assert not heard, "\n".join(heard)
