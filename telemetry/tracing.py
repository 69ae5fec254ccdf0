"""Spans without OpenTelemetry's types: what the rest of the code starts and ends.

telemetry/exporters.py makes the real ones. With tracing off NoTracing is used, which makes no object at
all. Nothing here imports OpenTelemetry.
"""

from typing import Final, Protocol

Attribute = str | int | float | bool


class Span(Protocol):
    """A running span; `traceparent` (W3C) is what children name as their parent, "" when tracing is off."""

    @property
    def traceparent(self) -> str: ...

    def event(self, name: str, **attributes: Attribute) -> None: ...

    def set(self, **attributes: Attribute) -> None: ...

    def end(self, error: str = "") -> None:
        """Idempotent. `error` "" is success."""


class Tracing(Protocol):
    """Starts spans. Never raises into a request."""

    def start(self, name: str, parent: str = "", **attributes: Attribute) -> Span:
        """A span under the W3C traceparent `parent`; a new trace when that is "" or malformed. An
        unsampled parent makes an unsampled child."""

    async def close(self) -> None:
        """Hand over what has ended, within 2 s. Idempotent."""


class _NoSpan:
    """Records nothing."""

    __slots__ = ()

    @property
    def traceparent(self) -> str:
        return ""

    def event(self, name: str, **attributes: Attribute) -> None:
        """Nothing is recorded."""

    def set(self, **attributes: Attribute) -> None:
        """Nothing is recorded."""

    def end(self, error: str = "") -> None:
        """Nothing is recorded."""


NO_SPAN: Final[Span] = _NoSpan()
"""The only span there is while tracing is off; also what to hold before a span is started."""


class NoTracing:
    """Tracing that is off."""

    def start(self, name: str, parent: str = "", **attributes: Attribute) -> Span:
        """The one shared span."""
        return NO_SPAN

    async def close(self) -> None:
        """Nothing to hand over."""
