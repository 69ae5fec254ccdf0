"""What a worker counts: from the engine's and the hand-over's reports to the metrics.

The roles call it; telemetry/metrics.py knows the names.
"""

from collections.abc import Callable

from contracts.errors import Cancelled, PdserveError
from contracts.requests import FinishReason
from contracts.workers import BlockCounts, WorkerLoad
from engine.loop import Advance, StepReport
from engine.sequence import Sequence
from kv_transfer.orders import TransferStats
from telemetry.metrics import WorkerMetrics


class Figures:
    """The figures of one worker."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics

    def bind(
        self, blocks: Callable[[], BlockCounts], load: Callable[[], WorkerLoad], leases: Callable[[], int]
    ) -> None:
        """Gauges read the state itself at each scrape."""
        self._metrics.bind(blocks, lambda: load().running, lambda: load().waiting, leases)

    def exposition(self) -> str:
        """Everything as Prometheus text."""
        return self._metrics.exposition()

    def stepped(self, report: StepReport) -> None:
        """A step has ended."""
        for part in ("schedule", "tensors", "forward", "sampling", "commit", "deliver"):
            self._metrics.step(part, getattr(report, part))
        for _ in range(report.preempted):
            self._metrics.preempted()

    def admitted(self, sequence: Sequence) -> None:
        """A sequence starts with what the prefix cache had."""
        self._metrics.cached(sequence.cached_tokens)

    def advanced(self, advance: Advance) -> None:
        """One sequence's part of a step."""
        sequence, start = advance.sequence, advance.start
        end = start + advance.computed
        self._metrics.prefilled(max(0, min(end, sequence.context_tokens) - start))
        self._metrics.recomputed(max(0, min(end, sequence.handed_over) - start))
        if advance.token is not None:
            self._metrics.generated(1)
            if end == sequence.context_tokens:
                self._metrics.first_token()

    def transferred(self, stats: TransferStats) -> None:
        """A hand-over to this worker has ended well."""
        self._metrics.kv_moved(stats.transport, stats.blocks, stats.bytes, stats.seconds - stats.waited)
        self._metrics.kv_transferred(stats.seconds)

    def link_measured(self, transport: str, rate: float | None) -> None:
        """A link was verified at so many bytes a second."""
        if rate is not None:
            self._metrics.link_measured(transport, rate)

    def transfer_failed(self, error: PdserveError) -> None:
        """A hand-over to this worker has failed."""
        self._metrics.transfer_failed(error.code)

    def cancelled(self, steps: int) -> None:
        """A cancelled sequence gave its blocks back after so many steps."""
        self._metrics.cancel_stopped(steps)

    def finished(self, reason: FinishReason) -> None:
        """An attempt ended well."""
        self._metrics.request_finished(reason.value)

    def handed_over(self) -> None:
        """A prompt is computed and its receiver has it, or wants it no more."""
        self._metrics.request_finished("handed_over")

    def ended(self, error: PdserveError) -> None:
        """An attempt was cancelled or ended with an error."""
        self._metrics.request_finished("cancelled" if isinstance(error, Cancelled) else "error")

    def audit_failed(self) -> None:
        """The audit found a contradiction."""
        self._metrics.audit_failed()
