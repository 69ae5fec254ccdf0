"""What the router tells its metrics. telemetry's RouterMetrics fits this.

Called by the service and the sessions, synchronously; an implementation must never raise or block.
"""

from collections.abc import Callable
from typing import Protocol


class RouterObserver(Protocol):
    """Times are in seconds. `outcome`: a finish reason, or the code of the error that ended the request."""

    def bind(
        self,
        waiting: Callable[[], int],
        running: Callable[[], int],
        workers: Callable[[], dict[str, int]],
        queued_tokens: Callable[[], int],
    ) -> None:
        """Gauges are read through these: requests queued, requests placed on workers, live workers by role, prompt
        tokens queued."""

    def request_finished(self, outcome: str, seconds: float) -> None: ...

    def ttft(self, seconds: float) -> None: ...

    def tpot(self, seconds: float) -> None: ...

    def inter_token(self, seconds: float) -> None: ...

    def queue_wait(self, outcome: str, seconds: float) -> None:
        """Once per admitted request: how long it waited from its arrival until it was "placed" or "gave_up"."""

    def refused(self, reason: str) -> None: ...

    def attempt_failed(self, code: str) -> None: ...

    def dropped_message(self) -> None: ...
