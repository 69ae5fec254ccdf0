"""Which points there are, how messages are recognised, and how plans are drawn."""

from collections import Counter
from dataclasses import replace
from typing import get_args

import pytest

from contracts.errors import EngineFailed, Refused
from contracts.handover import (
    Abandon,
    Ack,
    Alive,
    Chunk,
    Ended,
    Fetch,
    Introduce,
    Introduced,
    Last,
    Probe,
    Progress,
    Pull,
    PullFailed,
)
from contracts.kv import KvLayout
from contracts.requests import AttemptKey, FinishReason, SamplingParams, Token
from contracts.session import Cancel, Failed, Hello, Reserved, Source, Submit, Tokens, Welcome, WorkerEvent, WorkerFrame
from contracts.workers import Role, WorkerCapacity, WorkerInfo, WorkerLoad
from simulator.fault_plan import Fault, FaultPlan, drawn
from simulator.fault_points import Action, Moment, Place, Point, legal_faults
from simulator.recogniser import Message, Recogniser, Sight

KEY = AttemptKey("7-1", 1)
LAYOUT = KvLayout("sim", "numbers", "sim", "uint64", 1, 1, 1, 4, "none")
LOAD = WorkerLoad(1, 1, 0, 0, 0)
CHUNK = Chunk(0, 1, (1,), b"12345678")
PULL = Pull(KEY, b"t", 1, "d", "", LAYOUT, "memory", 0)
FETCH = Fetch(AttemptKey("7-1/prefix", 1), (), 1000, 1, "d", "", LAYOUT, "memory")
SUBMIT = Submit(KEY, 1, b"t", (1,), (), SamplingParams(4, 0), "", 1000, "")


def frame(*events: WorkerEvent) -> WorkerFrame:
    return WorkerFrame(LOAD, events)


def tokens(position: int, finish: FinishReason | None = None) -> Tokens:
    return Tokens(KEY, (Token(position, 5, "5 ", finish=finish),))


def named(*messages: Message) -> list[str]:
    recogniser = Recogniser()
    return [str(recogniser.see(message).point) for message in messages]


def test_messages_of_a_session() -> None:
    welcome = Welcome(WorkerInfo("d", Role.DECODE, "d:1", 1, 1), WorkerCapacity(1, 1, 1, 1, LAYOUT), LOAD)
    assert named(Hello("r", 1, ""), welcome, SUBMIT, Cancel(KEY, "")) == ["hello", "welcome", "prefill", "cancel"]
    assert named(replace(SUBMIT, source=Source("p", "p:1", 1))) == ["reserve"]
    assert named(
        frame(),
        frame(Reserved(KEY)),
        frame(tokens(1)),
        frame(tokens(2), Failed(AttemptKey("7-2", 1), EngineFailed("").info())),
        frame(tokens(3, FinishReason.LENGTH)),
        frame(Failed(KEY, Refused("").info())),
    ) == ["heartbeat", "reserved", "first_token", "failed", "tokens", "refused"]


def test_messages_of_a_hand_over() -> None:
    assert named(PULL, Progress(0, 0), CHUNK, Alive(), CHUNK, Last(None, 8, 2, 0), Ack()) == [
        *("pull", "progress", "first_frame", "alive", "between_chunks", "last", "ack")
    ]
    assert named(FETCH, PullFailed(Refused("").info())) == ["fetch", "pull_failed"]
    assert named(PULL, Ended(), Abandon("")) == ["pull", "ended", "abandon"]


def test_messages_of_the_set_up_of_a_link() -> None:
    introduce = Introduce("d", "", 1, LAYOUT)
    assert named(introduce, Introduced(()), Probe("memory"), CHUNK, CHUNK) == [
        *("introduce", "introduced", "probe", "probe_block", "probe_block")
    ]


def test_what_passes_on_a_pull_belongs_to_its_request() -> None:
    for first in (PULL, FETCH):
        recogniser = Recogniser()
        assert recogniser.see(first).request_id == "7-1"
        assert recogniser.see(CHUNK) == Sight(Point.FIRST_FRAME, "7-1")
        assert recogniser.see(Ack()) == Sight(Point.ACK, "7-1")


def test_every_message_has_a_point() -> None:
    """A new kind of message must be given one."""
    samples: list[Message] = [
        *(Hello("r", 1, ""), SUBMIT, Cancel(KEY, ""), frame(), PULL, FETCH, Alive(), Ack(), Abandon(""), Ended()),
        *(Introduce("d", "", 1, LAYOUT), Introduced(()), Probe(""), CHUNK, Progress(0, 0), Last(None, 0, 0, 0)),
        *(PullFailed(Refused("").info()), Welcome(*(None,) * 3)),  # type: ignore[arg-type]  # its type is enough
    ]
    assert {type(sample) for sample in samples} == set(get_args(Message))
    for sample in samples:
        assert isinstance(Recogniser().see(sample).point, Point)


def test_what_is_legal() -> None:
    legal = set(legal_faults())
    assert (Place(Point.LAST, Moment.BEFORE), Action.CORRUPT) in legal
    assert (Place(Point.TOKENS, Moment.BEFORE), Action.DUPLICATE) in legal
    for place, action in legal:
        changes = action in (Action.DROP, Action.DELAY, Action.DUPLICATE, Action.REORDER, Action.CORRUPT)
        assert place.moment is Moment.BEFORE or not changes, "what has arrived cannot be changed"
    sessions = {Point.RESERVE, Point.PREFILL, Point.RESERVED, Point.TOKENS, Point.FAILED, Point.CANCEL, Point.HEARTBEAT}
    lost = {place.point for place, action in legal if action in (Action.DROP, Action.REORDER, Action.CORRUPT)}
    assert not sessions & lost, "a session is reliable and ordered"
    assert {place for place, _ in legal} == {Place(point, moment) for point in Point for moment in Moment}


def test_a_plan_counts_what_passes_at_each_place() -> None:
    due = Fault(Place(Point.ACK, Moment.BEFORE), 2, Action.KILL, 0.5)
    plan = FaultPlan([due])
    plan.armed = False
    assert plan.strike(Point.ACK, Moment.BEFORE) is None
    plan.armed = True
    passed = [(Point.ACK, Moment.BEFORE), (Point.ACK, Moment.AFTER), (Point.PULL, Moment.BEFORE)]
    assert [plan.strike(*each) for each in passed] == [None, None, None]
    assert plan.strike(Point.ACK, Moment.BEFORE) is due
    assert plan.strike(Point.ACK, Moment.BEFORE) is None
    assert plan.fired == [due]
    assert str(due) == "2. before_ack: kill, 0.5 s"


def test_a_seed_draws_one_plan() -> None:
    assert drawn(3, requests=40, faults=20).faults == drawn(3, requests=40, faults=20).faults
    assert drawn(3, requests=40, faults=20).faults != drawn(4, requests=40, faults=20).faults


def test_consecutive_seeds_draw_every_legal_fault_equally_often() -> None:
    legal = legal_faults()
    seeds = range(len(legal))
    count = Counter((f.place, f.action) for seed in seeds for f in drawn(seed, requests=40, faults=20).faults)
    assert count == dict.fromkeys(legal, 20)


@pytest.mark.parametrize("requests", [1, 40])
def test_occurrences_count_from_one(requests: int) -> None:
    assert min(fault.occurrence for fault in drawn(1, requests=requests, faults=200).faults) == 1
