"""The ledger's reckoning of one worker, case by case."""

from contracts.errors import Refused
from contracts.kv import KvLayout
from contracts.requests import AttemptKey
from contracts.session import Failed, Reserved, WorkerFrame
from contracts.workers import Role, WorkerCapacity, WorkerLoad
from router.ledger import Ledger, Need, WorkerAccount
from router.policies import least_loaded, round_robin
from tests.helpers.router_rig import account_of

LAYOUT = KvLayout("m", "t", "n", "float32", 1, 1, 4, 16, "r")
DECODE, PREFILL = frozenset({Role.DECODE}), frozenset({Role.PREFILL})


def account(role: Role = Role.DECODE, blocks: int = 10, slots: int = 4, backlog: int = 100) -> WorkerAccount:
    return account_of("w", role, WorkerCapacity(blocks, slots, backlog, 1024, LAYOUT))


def key(number: int) -> AttemptKey:
    return AttemptKey(f"7-{number}", 1)


def test_a_dispatch_counts_until_the_worker_reports_it() -> None:
    worker = account()
    need = Need(tokens=33, growth=16, whole=49, roles=DECODE)  # 49 tokens: 4 blocks
    worker.claim(key(1), need)
    assert (worker.free_blocks, worker.free_slots) == (6, 3)
    worker.frame(WorkerFrame(WorkerLoad(10, 4, 0, 0, 0)))  # sent before the Submit arrived
    assert (worker.free_blocks, worker.free_slots) == (6, 3)
    worker.frame(WorkerFrame(WorkerLoad(6, 3, 0, 0, 0), (Reserved(key(1)),)))
    assert (worker.free_blocks, worker.free_slots) == (6, 3)
    worker.release(key(1))
    assert (worker.free_blocks, worker.free_slots) == (6, 3)  # free again when the worker says so
    worker.frame(WorkerFrame(WorkerLoad(10, 4, 0, 0, 0)))
    assert (worker.free_blocks, worker.free_slots) == (10, 4)
    worker.check()


def test_an_unanswered_dispatch_that_is_released_is_free_at_once() -> None:
    worker = account()
    worker.claim(key(1), Need(33, 16, 49, DECODE))
    worker.release(key(1))
    assert (worker.free_blocks, worker.free_slots) == (10, 4)


def test_less_reported_than_dispatched_is_never_negative() -> None:
    worker = account()
    worker.claim(key(1), Need(100, 0, 100, DECODE))
    worker.frame(WorkerFrame(WorkerLoad(2, 0, 0, 4, 0)))  # another router took the rest
    assert (worker.free_blocks, worker.free_slots) == (0, 0)


def test_blocks_and_slots_each_bound_a_reservation() -> None:
    worker = account()
    assert worker.has_room(Need(160, 0, 160, DECODE))
    assert not worker.has_room(Need(160, 1, 161, DECODE))
    worker.frame(WorkerFrame(WorkerLoad(10, 0, 0, 4, 0)))
    assert not worker.has_room(Need(1, 1, 2, DECODE))


def test_an_idle_prefill_worker_takes_any_prompt_and_a_busy_one_up_to_its_backlog() -> None:
    worker = account(Role.PREFILL, blocks=64, backlog=100)
    worker.claim(key(1), Need(60, 16, 76, PREFILL))
    worker.claim(key(2), Need(60, 16, 76, PREFILL))
    assert not worker.has_room(Need(1, 16, 17, PREFILL))
    worker.release(key(1))
    assert worker.has_room(Need(900, 16, 916, PREFILL))
    worker.frame(WorkerFrame(WorkerLoad(64, 8, 100, 0, 0)))  # others' prompts, or exports that nobody fetches
    assert not worker.has_room(Need(1, 16, 17, PREFILL))


def test_a_refusal_blocks_the_worker_until_its_next_frame() -> None:
    worker = account()
    worker.claim(key(1), Need(1, 1, 2, DECODE))
    worker.frame(WorkerFrame(WorkerLoad(10, 4, 0, 0, 0), (Failed(key(1), Refused("full").info()),)))
    worker.release(key(1))
    assert not worker.has_room(Need(1, 1, 2, DECODE))
    worker.frame(WorkerFrame(WorkerLoad(10, 4, 0, 0, 0)))
    assert worker.has_room(Need(1, 1, 2, DECODE))


def test_half_a_place_claims_nothing_and_uses_up_no_turn() -> None:
    ledger = Ledger({Role.PREFILL: round_robin.create(), Role.DECODE: least_loaded.create()})
    for name in ("p0", "p1"):
        ledger.open(account_of(name, Role.PREFILL, WorkerCapacity(10, 4, 100, 1024, LAYOUT)))
    full = account_of("d0", Role.DECODE, WorkerCapacity(10, 4, 0, 1024, LAYOUT))
    ledger.open(full)
    full.frame(WorkerFrame(WorkerLoad(0, 0, 0, 4, 0)))
    need = Need(16, 1, 17, PREFILL | DECODE)
    assert ledger.place(key(1), need) is None
    assert all(worker.placed == 0 for worker in ledger.accounts(Role.PREFILL))
    full.frame(WorkerFrame(WorkerLoad(10, 4, 0, 0, 0)))
    assert ledger.place(key(1), need) == {Role.PREFILL: "p0", Role.DECODE: "d0"}
    ledger.check()
