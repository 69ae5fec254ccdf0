"""Exports and reservations together, under every order of messages, faults and ends; and mutants of the product, each
of which must be caught by the same machines.

The roles, the router and the network are models (tests/helpers/handover_model.py); in the second machine
(handover_tasks.py) the exporter and the receiver are the real ones.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from contracts.errors import PullNotFound
from contracts.handover import Chunk, Ended, Introduce, Pull, PullFailed
from contracts.requests import AttemptKey, Token
from decode_workers.reservations import Reservations
from engine.block_manager import AuditFailed, BlockManager, Holder
from kv_transfer.exports import Exports
from kv_transfer.handshake import Handshake
from kv_transfer.peer import accept_within
from kv_transfer.subscription import Export, Subscription
from kv_transfer.transports.base import Inlet
from tests.helpers.handover_model import HandoverModel
from tests.helpers.handover_tasks import DISTURBANCES, HandoverTasks

TestModel = HandoverModel.TestCase
TestModel.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestTasks = HandoverTasks.TestCase
TestTasks.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)

SEARCH = settings(
    max_examples=400,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.generate,),
    report_multiple_bugs=False,
)
"""No time is spent on making examples small."""
SEARCH_ELSEWHERE = [settings(SEARCH, derandomize=False) for _ in range(4)]
BOTH = pytest.mark.parametrize("machine", [HandoverModel, HandoverTasks])
Machine = type[RuleBasedStateMachine]


def assert_caught(machine: Machine, promise: str) -> None:
    """The machine finds the mutant, by this promise. What one search sees depends on the process's hash seed too, so a
    search that misses it is followed by others."""
    for search in (SEARCH, *SEARCH_ELSEWHERE):
        try:
            run_state_machine_as_test(machine, settings=search)
        except (AssertionError, AuditFailed) as caught:
            assert re.search(promise, str(caught)), caught  # noqa: PT017 - it need not come in the first search
            return
    pytest.fail(f"no search found it: {promise}")


@pytest.mark.parametrize(
    ("machine", "milestones"),
    [
        (HandoverModel, {"cancelled while it wrote"}),
        (HandoverTasks, {"corrupt", "peer_silent", "worker_lost", "deadline_exceeded", *DISTURBANCES}),
    ],
)
def test_the_machines_reach_what_they_are_made_for(
    machine: type[HandoverModel | HandoverTasks], milestones: set[str]
) -> None:
    reached: Counter[str] = Counter()

    factory = partial(machine, reached)
    expected = milestones | {"committed", "refused", "early Pull served", "stale", "pull_not_found", "pull_gone"}
    for search in (SEARCH, *SEARCH_ELSEWHERE):
        run_state_machine_as_test(factory, settings=search)  # type: ignore[arg-type]  # it takes what makes a machine
        if expected <= reached.keys():
            return
    pytest.fail(f"never reached: {expected - reached.keys()}")


# Mutants


@BOTH
def test_a_mutant_that_frees_a_block_early_is_caught(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = Exports.finish

    def too_early(self: Exports, key: AttemptKey, token: Token, kv_tokens: int) -> None:
        finish(self, key, token, kv_tokens)
        if key in self.owners():
            self._pins.unpin(key, None)

    monkeypatch.setattr(Exports, "finish", too_early)
    assert_caught(machine, "serves blocks that are not held")


@BOTH
def test_a_mutant_that_forgets_other_holders_of_a_block_is_caught(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def release(self: BlockManager, holder: Holder) -> None:
        for block in self._tables.pop(holder):
            self._references[block] = 0
            self._free.append(block)

    monkeypatch.setattr(BlockManager, "release", release)
    assert_caught(machine, "references counted|free or cached")


@BOTH
def test_a_mutant_that_frees_a_reservation_while_its_receive_still_writes_is_caught(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(self: Reservations, key: AttemptKey) -> None:
        if key in self:
            self.release(key)

    monkeypatch.setattr(Reservations, "leave", leave)
    assert_caught(machine, "receive")


def test_a_mutant_that_writes_on_after_its_cancel_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stubborn(inlet: Inlet, chunk: Chunk, blocks: Sequence[int], _: float) -> tuple[int, ...]:
        return await asyncio.shield(inlet.accept(chunk.payload, blocks))

    monkeypatch.setattr("kv_transfer.receiver.accept_within", stubborn)
    assert_caught(HandoverTasks, "for a receive that has ended|committed|was written over")


@BOTH
def test_a_mutant_that_accepts_an_old_incarnation_is_caught(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    check = Handshake.check

    def tolerant(self: Handshake, message: Pull | Introduce) -> None:
        check(self, replace(message, incarnation=self.incarnation))

    monkeypatch.setattr(Handshake, "check", tolerant)
    assert_caught(machine, "another incarnation was let in")


@BOTH
def test_a_mutant_that_accepts_any_ticket_is_caught(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_transfer.exports.hmac.compare_digest", lambda *_: True)
    assert_caught(machine, "a wrong ticket is served")


def test_a_mutant_that_skips_a_checksum_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    async def trusting(inlet: Inlet, chunk: Chunk, blocks: Sequence[int], seconds: float) -> tuple[int, ...]:
        await accept_within(inlet, chunk, blocks, seconds)
        return chunk.checksums

    monkeypatch.setattr("kv_transfer.receiver.accept_within", trusting)
    assert_caught(HandoverTasks, "committed")


def test_a_mutant_that_believes_any_last_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_transfer.receiver._verify", lambda *_: None)
    assert_caught(HandoverTasks, "committed")


@BOTH
def test_a_mutant_that_drops_an_early_pull_is_caught(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Exports.open

    def deaf(self: Exports, key: AttemptKey, ticket: bytes, deadline: float) -> bool:
        for subscription in self._parked.pop(key, ()):
            subscription.end(PullFailed(PullNotFound("test").info()))
        return opened(self, key, ticket, deadline)

    monkeypatch.setattr(Exports, "open", deaf)
    assert_caught(machine, "an early Pull was dropped")


@BOTH
def test_a_mutant_that_parks_a_pull_for_ever_is_caught(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    subscribe = Exports.subscribe

    def patient(self: Exports, pull: Pull) -> Subscription:
        subscription = subscribe(self, pull)
        if subscription.timer is not None:
            subscription.timer.cancel()
        return subscription

    monkeypatch.setattr(Exports, "subscribe", patient)
    assert_caught(machine, "a parked Pull was forgotten|a puller was told nothing|parked Pulls leak")


@BOTH
def test_a_mutant_that_leaks_a_tombstone_is_caught(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    bury = Exports._bury

    def hoarding(self: Exports, key: AttemptKey, ticket: bytes | None, answer: Ended | PullFailed) -> None:
        self._most_tombstones += 1
        bury(self, key, ticket, answer)

    monkeypatch.setattr(Exports, "_bury", hoarding)
    assert_caught(machine, "tombstones leak")


@BOTH
def test_a_mutant_that_forgets_who_has_ended_is_caught(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Exports, "_bury", lambda *_: None)
    assert_caught(machine, "an attempt that had ended was opened")


@BOTH
def test_a_mutant_whose_leases_never_end_is_caught(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def renew(self: Exports, export: Export) -> None:
        export.lease_ends = min(self._loop.time() + self._config.lease_seconds, export.deadline)

    monkeypatch.setattr(Exports, "_renew", renew)
    assert_caught(machine, "an export outlives its lease")
