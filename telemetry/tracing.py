"""Spans without OpenTelemetry's types: what the rest of the code starts and ends.

telemetry/exporters.py makes the real one. With tracing off NO_TRACING is used and no span object is made:
one shared span passes the caller's traceparent on.
"""

from typing import Protocol

Attribute = str | int | float | bool


class Span(Protocol):
    """A running span; `traceparent` is what children name as their parent."""

    @property
    def traceparent(self) -> str: ...

    def event(self, name: str, **attributes: Attribute) -> None: ...

    def set(self, **attributes: Attribute) -> None: ...

    def end(self, error: str = "") -> None:
        """Idempotent. `error` "" is success."""


class Tracing(Protocol):
    """Starts spans. Never raises into a request."""

    def start(self, name: str, parent: str = "", **attributes: Attribute) -> Span:
        """A span under the W3C traceparent `parent` ("": a new trace, or nothing when off)."""


class _NoSpan:
    """Passes a parent on and records nothing."""

    __slots__ = ("traceparent",)

    def __init__(self, traceparent: str) -> None:
        self.traceparent = traceparent

    def event(self, name: str, **attributes: Attribute) -> None:
        """Nothing is recorded."""

    def set(self, **attributes: Attribute) -> None:
        """Nothing is recorded."""

    def end(self, error: str = "") -> None:
        """Nothing is recorded."""


class NoTracing:
    """Tracing that is off."""

    def __init__(self) -> None:
        self._span = _NoSpan("")

    def start(self, name: str, parent: str = "", **attributes: Attribute) -> Span:
        """The one shared span."""
        return self._span
