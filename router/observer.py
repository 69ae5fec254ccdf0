"""What the router tells its metrics. telemetry's RouterMetrics fits this; NoObserver records nothing.

Called by the service and the sessions, synchronously; an implementation must never raise or block.
"""

from collections.abc import Callable
from typing import Protocol


class RouterObserver(Protocol):
    """Times are in seconds. `outcome`: a finish reason, or the code of the error that ended the request."""

    def bind(
        self, waiting: Callable[[], int], running: Callable[[], int], workers: Callable[[], dict[str, int]]
    ) -> None:
        """Gauges are read through these: requests queued, requests placed, live workers by role."""

    def request_finished(self, outcome: str, seconds: float) -> None: ...

    def ttft(self, seconds: float) -> None: ...

    def tpot(self, seconds: float) -> None: ...

    def inter_token(self, seconds: float) -> None: ...

    def queue_wait(self, seconds: float) -> None: ...

    def refused(self, reason: str) -> None: ...

    def attempt_failed(self, code: str) -> None: ...

    def dropped_message(self) -> None: ...


class NoObserver:
    """Records nothing."""

    def bind(
        self, waiting: Callable[[], int], running: Callable[[], int], workers: Callable[[], dict[str, int]]
    ) -> None:
        """Nothing is recorded."""

    def request_finished(self, outcome: str, seconds: float) -> None:
        """Nothing is recorded."""

    def ttft(self, seconds: float) -> None:
        """Nothing is recorded."""

    def tpot(self, seconds: float) -> None:
        """Nothing is recorded."""

    def inter_token(self, seconds: float) -> None:
        """Nothing is recorded."""

    def queue_wait(self, seconds: float) -> None:
        """Nothing is recorded."""

    def refused(self, reason: str) -> None:
        """Nothing is recorded."""

    def attempt_failed(self, code: str) -> None:
        """Nothing is recorded."""

    def dropped_message(self) -> None:
        """Nothing is recorded."""
