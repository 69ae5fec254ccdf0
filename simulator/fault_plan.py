"""What goes wrong in one run, and when: a list of faults, each at one occurrence of one point of the protocol.

All links of a run share a plan (in real processes: each its own); faulty_link.py asks it for each message that passes.
The same seed draws the same plan. It does nothing itself.
"""

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from simulator.fault_points import Action, Moment, Place, Point, legal_faults


@dataclass(frozen=True, slots=True)
class Fault:
    """`occurrence` counts the messages at `place` from 1. `seconds`: of a delay or freeze, or until a killed process
    starts again. `draw` says which bit a corruption flips. Prints as "2. before_ack: kill, 0.5 s"."""

    place: Place
    occurrence: int
    action: Action
    seconds: float = 0.0
    draw: int = 0

    def __str__(self) -> str:
        return f"{self.occurrence}. {self.place}: {self.action}, {self.seconds:g} s"


LONGEST_DELAY = 4.0
"""Seconds: longer than every silence that the defaults suffer."""

_SECONDS = {
    Action.DELAY: (0.0005, 0.002, 0.01, 0.05, 0.3, 1.2, 2.4, LONGEST_DELAY),
    Action.FREEZE: (0.002, 0.05, 0.5, 2.0, 4.0),
    Action.KILL: (0.001, 0.1, 0.5, 2.0),
}

_USUAL: dict[Point, float] = {
    Point.HEARTBEAT: 2.0,
    Point.TOKENS: 4.0,
    Point.BETWEEN_CHUNKS: 1.0,
    Point.PROBE_BLOCK: 0.5,
    Point.REFUSED: 0.05,
    Point.FAILED: 0.1,
    Point.CANCEL: 0.2,
    Point.HELLO: 0.05,
    Point.WELCOME: 0.05,
    Point.INTRODUCE: 0.05,
    Point.INTRODUCED: 0.05,
    Point.PROBE: 0.05,
    Point.FETCH: 0.05,
    Point.PROGRESS: 0.05,
    Point.ENDED: 0.02,
    Point.PULL_FAILED: 0.05,
    Point.ALIVE: 0.1,
    Point.ABANDON: 0.1,
}
"""Messages per request, roughly; the others come once. It spreads faults over a run, nothing depends on it."""


class FaultPlan:
    """Counts the messages at each place while it is `armed`, and says which of them a fault is due for."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        self.fired: list[Fault] = []
        self.armed = True
        self._due = {(fault.place, fault.occurrence): fault for fault in self.faults}
        self._passed: Counter[Place] = Counter()

    def strike(self, point: Point, moment: Moment) -> Fault | None:
        """A message passes: its fault, if one is due."""
        if not self.armed:
            return None
        place = Place(point, moment)
        self._passed[place] += 1
        fault = self._due.get((place, self._passed[place]))
        if fault is not None:
            self.fired.append(fault)
        return fault


def drawn(seed: int, *, requests: int, faults: int) -> FaultPlan:
    """A plan for a run of so many requests. Over consecutive seeds every legal pair of place and action comes
    equally often."""
    dice = random.Random(seed)  # noqa: S311 - it must draw the same again
    deck = legal_faults()
    random.Random(0).shuffle(deck)  # noqa: S311 - likewise
    return FaultPlan(_draw(dice, *deck[(seed * faults + n) % len(deck)], requests) for n in range(faults))


def _draw(dice: random.Random, place: Place, action: Action, requests: int) -> Fault:
    most = max(1, int(0.7 * requests * _USUAL.get(place.point, 1.0)))
    seconds = dice.choice(_SECONDS.get(action, (0.0,)))
    return Fault(place, dice.randint(1, most), action, seconds, dice.getrandbits(32))
