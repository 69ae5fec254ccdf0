"""The named points of the protocol at which something can go wrong, and what can go wrong at each.

A point is a kind of message on a link, so the product needs no hooks. Each message passes twice: BEFORE, in the process
that sends it, as it leaves; and AFTER, in the process that gets it, as it arrives. "before_last" is a prefill worker
that has sent everything but Last; "after_ack" is one that has just been told that it may let go.

recogniser.py names the messages that pass, fault_plan.py draws from the table. Nothing here does anything.
"""

from dataclasses import dataclass
from enum import StrEnum


class Point(StrEnum):
    """The kinds of messages. A delay before PREFILL lets the Pull park."""

    HELLO = "hello"
    WELCOME = "welcome"
    HEARTBEAT = "heartbeat"  # a frame without events
    RESERVE = "reserve"  # a Submit with a source
    PREFILL = "prefill"  # a Submit without one
    RESERVED = "reserved"
    REFUSED = "refused"
    FIRST_TOKEN = "first_token"  # of a leg
    TOKENS = "tokens"
    FAILED = "failed"
    CANCEL = "cancel"
    INTRODUCE = "introduce"
    INTRODUCED = "introduced"
    PROBE = "probe"
    PROBE_BLOCK = "probe_block"
    PULL = "pull"
    FETCH = "fetch"
    FIRST_FRAME = "first_frame"
    BETWEEN_CHUNKS = "between_chunks"
    PROGRESS = "progress"
    LAST = "last"
    ENDED = "ended"
    PULL_FAILED = "pull_failed"
    ALIVE = "alive"
    ACK = "ack"
    ABANDON = "abandon"


class Moment(StrEnum):
    """See the module."""

    BEFORE = "before"
    AFTER = "after"


class Action(StrEnum):
    """What happens to the message, to its stream, to the process that sends or gets it, or to the request's client."""

    DROP = "drop"
    DELAY = "delay"  # it and all behind it
    DUPLICATE = "duplicate"
    REORDER = "reorder"  # the next message of the same direction passes it
    CORRUPT = "corrupt"  # one bit of a payload, a checksum or a digest
    CUT = "cut"
    KILL = "kill"  # like kill -9; a new incarnation starts later
    FREEZE = "freeze"  # like SIGSTOP, and SIGCONT later
    LEAVE = "leave"  # the client goes away


@dataclass(frozen=True, slots=True)
class Place:
    """Where a fault can be: prints as "before_ack"."""

    point: Point
    moment: Moment

    def __str__(self) -> str:
        return f"{self.moment}_{self.point}"


_OF_SESSIONS = frozenset(
    {
        *(Point.HELLO, Point.WELCOME, Point.HEARTBEAT, Point.RESERVE, Point.PREFILL, Point.RESERVED, Point.REFUSED),
        *(Point.FIRST_TOKEN, Point.TOKENS, Point.FAILED, Point.CANCEL),
    }
)
_OF_NO_REQUEST = frozenset(
    {Point.HELLO, Point.WELCOME, Point.HEARTBEAT, Point.INTRODUCE, Point.INTRODUCED, Point.PROBE, Point.PROBE_BLOCK}
)
_OF_ENDED_REQUESTS = frozenset({Point.CANCEL, Point.ABANDON, Point.PULL_FAILED})
_FOLLOWED = frozenset(
    {Point.PROBE_BLOCK, Point.PULL, Point.FIRST_FRAME, Point.BETWEEN_CHUNKS, Point.PROGRESS, Point.ALIVE}
)
_CHECKED = frozenset({Point.PROBE_BLOCK, Point.FIRST_FRAME, Point.BETWEEN_CHUNKS, Point.LAST})


def _actions(place: Place) -> set[Action]:
    """A session is an ordered, reliable stream: its messages can be late, they can be lost only together with the
    stream, and those that are idempotent may come twice. A pull's messages are checked by what they say, so anything
    may happen to them, as far as it differs from a drop."""
    point = place.point
    actions = {Action.CUT, Action.KILL, Action.FREEZE}
    if point not in _OF_NO_REQUEST | _OF_ENDED_REQUESTS:
        actions.add(Action.LEAVE)
    if place.moment is Moment.AFTER:
        return actions
    actions.add(Action.DELAY)
    if point not in (Point.HELLO, Point.WELCOME):
        actions.add(Action.DUPLICATE)
    if point not in _OF_SESSIONS:
        actions.add(Action.DROP)
    if point in _FOLLOWED:
        actions.add(Action.REORDER)
    if point in _CHECKED:
        actions.add(Action.CORRUPT)
    return actions


def legal_faults() -> list[tuple[Place, Action]]:
    """Everything that can go wrong, in a fixed order."""
    places = [Place(point, moment) for point in Point for moment in Moment]
    return [(place, action) for place in places for action in sorted(_actions(place))]
