"""The attempts that a worker is busy with, from Submit to their end, whatever the role."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from contracts.requests import AttemptKey
from contracts.session import Submit
from telemetry.tracing import Span
from worker.session_server import Emit


@dataclass(slots=True)
class Leg:
    """One worker's part of an attempt. `deadline` is in the event loop's time."""

    submit: Submit
    emit: Emit
    span: Span
    deadline: float
    timer: asyncio.TimerHandle

    @property
    def key(self) -> AttemptKey:
        return self.submit.key


class Legs:
    """All legs by attempt; each has a timer that fires at the request's deadline."""

    def __init__(self, expired: Callable[[AttemptKey], None]) -> None:
        self._expired = expired
        self._legs: dict[AttemptKey, Leg] = {}

    def open(self, submit: Submit, emit: Emit, span: Span) -> Leg:
        """A new leg. Its key must not be open."""
        assert submit.key not in self._legs
        loop = asyncio.get_running_loop()
        deadline = loop.time() + submit.deadline_ms / 1000
        timer = loop.call_at(deadline, self._expired, submit.key)
        leg = self._legs[submit.key] = Leg(submit, emit, span, deadline, timer)
        return leg

    def get(self, key: AttemptKey) -> Leg | None:
        """The leg, or None when it has ended or never was."""
        return self._legs.get(key)

    def close(self, key: AttemptKey, error: str = "") -> None:
        """The leg has ended. Unknown keys are fine."""
        leg = self._legs.pop(key, None)
        if leg is not None:
            leg.timer.cancel()
            leg.span.end(error)

    def __len__(self) -> int:
        return len(self._legs)

    def __iter__(self) -> Iterator[Leg]:
        return iter(self._legs.values())

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._legs
