"""The metrics of a worker and of a router: their names, labels and buckets, all in one place.

Each worker and router makes one object and hands it to its parts. Samples carry no role and worker:
telemetry/merge.py adds these where the texts of all processes come together. Recording never raises and
label values are bounded, whatever callers or clients send. Nothing here reads a clock.
"""

from collections.abc import Callable, Mapping

from contracts.errors import error_codes
from contracts.seams import plugs
from contracts.workers import BlockCounts
from telemetry.series import Counter, Histogram, Series

_PARTS = ("schedule", "tensors", "forward", "sampling", "commit", "deliver")
_WAITS = ("placed", "gave_up")
_ENDS = ("stop", "length", "handed_over", "cancelled", "error")

_REQUEST_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
_PART_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.004, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_STEPS = (0.0, 1.0, 2.0, 3.0, 5.0, 10.0)


class WorkerMetrics:
    """What a prefill or decode worker counts."""

    def __init__(self) -> None:
        s = self._series = Series()
        codes = error_codes()
        self._kv_bytes = Counter(
            s, "pdserve_kv_transfer_bytes", "KV bytes moved.", label="transport", known=plugs("transport")
        )
        self._kv_blocks = Counter(s, "pdserve_kv_transfer_blocks", "KV blocks moved.")
        self._kv_busy = Counter(
            s,
            "pdserve_kv_transfer_busy_seconds",
            "Seconds that receivers took for the bytes that had come.",
            label="transport",
            known=plugs("transport"),
        )
        self._links: dict[str, float] = {}
        s.gauges(
            "pdserve_kv_link_bytes_per_second",
            "What the last verification of a link over this transport measured.",
            "transport",
            lambda: self._links,
        )
        self._kv_seconds = Histogram(
            s, "pdserve_kv_transfer_seconds", "From the first to the last message of a hand-over.", _REQUEST_SECONDS
        )
        self._kv_failures = Counter(
            s, "pdserve_transfer_failures", "Hand-overs that failed.", label="code", known=codes
        )
        self._audit = Counter(s, "pdserve_audit_failures", "Audits of the blocks that found a contradiction.")
        self._prefill = Counter(s, "pdserve_prefill_tokens", "Prompt tokens computed.")
        self._recomputed = Counter(
            s, "pdserve_prompt_tokens_recomputed", "Prompt tokens computed again after they had been handed over."
        )
        self._cached = Counter(s, "pdserve_cached_tokens", "Prompt tokens found in the prefix cache.")
        self._generated = Counter(s, "pdserve_generated_tokens", "Tokens generated.")
        self._first = Counter(s, "pdserve_first_tokens", "First tokens generated.")
        self._preemptions = Counter(s, "pdserve_preemptions", "Sequences preempted for want of blocks.")
        self._step = Histogram(
            s, "pdserve_step_seconds", "Seconds of a step by part.", _PART_SECONDS, label="part", known=_PARTS
        )
        self._cancel = Histogram(
            s, "pdserve_cancel_to_stop_steps", "Steps begun between a cancel and the release of its blocks.", _STEPS
        )
        self._finished = Counter(
            s, "pdserve_requests_finished", "Attempts that ended here.", label="outcome", known=_ENDS
        )
        self._dropped = Counter(s, "pdserve_dropped_messages", "One-way messages of another life, dropped.")

    def bind(
        self,
        blocks: Callable[[], BlockCounts],
        running: Callable[[], int],
        waiting: Callable[[], int],
        leases: Callable[[], int],
    ) -> None:
        """Name what the gauges read at each scrape: the pool, sequences running and waiting, exports
        under lease. Once per object; before it there are no gauges."""

        def states() -> dict[str, float]:
            counts = blocks()
            return {
                "free": counts.free,
                "used": counts.used,
                "cached": counts.cached,
                "pinned": counts.pinned,
                "reserved": counts.reserved,
            }

        self._series.gauges("pdserve_kv_blocks", "KV blocks by state; the sum is the pool.", "state", states)
        self._series.gauge("pdserve_requests_running", "Sequences in the running batch.", running)
        self._series.gauge("pdserve_requests_waiting", "Sequences that wait for a slot or blocks.", waiting)
        self._series.gauge("pdserve_leases", "Exports pinned for a receiver.", leases)

    def kv_moved(self, transport: str, blocks: int, size: int, busy: float) -> None:
        """`blocks` whole blocks of together `size` bytes came in, which kept the receiver busy for `busy` seconds."""
        self._kv_bytes.add(size, transport)
        self._kv_blocks.add(blocks)
        self._kv_busy.add(busy, transport)

    def link_measured(self, transport: str, rate: float) -> None:
        """A link was verified at `rate` bytes a second."""
        self._links[transport] = rate

    def kv_transferred(self, seconds: float) -> None:
        """A hand-over ended well after `seconds`."""
        self._kv_seconds.observe(seconds)

    def transfer_failed(self, code: str) -> None:
        """A hand-over ended with the error of this code."""
        self._kv_failures.add(1, code)

    def audit_failed(self) -> None:
        self._audit.add()

    def prefilled(self, tokens: int) -> None:
        """Prompt tokens were computed."""
        self._prefill.add(tokens)

    def recomputed(self, tokens: int) -> None:
        """Prompt tokens were computed by a decode worker although they had been handed over before."""
        self._recomputed.add(tokens)

    def cached(self, tokens: int) -> None:
        """Prompt tokens were found in the prefix cache."""
        self._cached.add(tokens)

    def generated(self, tokens: int) -> None:
        self._generated.add(tokens)

    def first_token(self) -> None:
        self._first.add()

    def preempted(self) -> None:
        self._preemptions.add()

    def step(self, part: str, seconds: float) -> None:
        """Seconds that one part of a step took."""
        self._step.observe(seconds, part)

    def cancel_stopped(self, steps: int) -> None:
        """A cancelled sequence gave its blocks back `steps` steps after the cancel."""
        self._cancel.observe(steps)

    def request_finished(self, outcome: str) -> None:
        """`outcome`: stop, length, handed_over (a prompt that another worker goes on with), cancelled or error."""
        self._finished.add(1, outcome)

    def dropped_message(self) -> None:
        self._dropped.add()

    def exposition(self) -> str:
        """Everything as Prometheus text."""
        return self._series.exposition()


class RouterMetrics:
    """What a router counts. Fits router/observer.py."""

    def __init__(self) -> None:
        s = self._series = Series()
        codes = error_codes()
        self._requests = Counter(
            s, "pdserve_router_requests", "Requests that ended.", label="outcome", known=codes.union(_ENDS)
        )
        self._seconds = Histogram(s, "pdserve_request_seconds", "From arrival to the end.", _REQUEST_SECONDS)
        self._ttft = Histogram(
            s, "pdserve_time_to_first_token_seconds", "From arrival to the first token.", _REQUEST_SECONDS
        )
        self._tpot = Histogram(
            s,
            "pdserve_time_per_output_token_seconds",
            "Mean gap of a request's tokens after the first.",
            _TOKEN_SECONDS,
        )
        self._gaps = Histogram(s, "pdserve_inter_token_seconds", "Gaps between successive tokens.", _TOKEN_SECONDS)
        self._queue = Histogram(
            s,
            "pdserve_queue_seconds",
            "From arrival to the first dispatch, or to the end of a wait without one.",
            _REQUEST_SECONDS,
            label="outcome",
            known=_WAITS,
        )
        self._refused = Counter(s, "pdserve_refused", "Requests refused on arrival.", label="reason", known=codes)
        self._attempts = Counter(s, "pdserve_attempt_failures", "Attempts that failed.", label="code", known=codes)
        self._dropped = Counter(s, "pdserve_dropped_messages", "One-way messages of another life, dropped.")

    def bind(
        self,
        waiting: Callable[[], int],
        running: Callable[[], int],
        workers: Callable[[], Mapping[str, int]],
        queued_tokens: Callable[[], int] | None = None,
    ) -> None:
        """Name what the gauges read at each scrape: requests queued and placed, live workers by role,
        and, where it is known, the prompt tokens queued. Once per object."""
        self._series.gauge("pdserve_queue_requests", "Requests in the queue.", waiting)
        self._series.gauge("pdserve_router_running", "Requests placed on workers.", running)
        self._series.gauges("pdserve_workers", "Live workers by role.", "role", workers)
        if queued_tokens is not None:
            self._series.gauge("pdserve_queue_prompt_tokens", "Prompt tokens in the queue.", queued_tokens)

    def request_finished(self, outcome: str, seconds: float) -> None:
        """`outcome`: a finish reason, or the code of the error that ended the request."""
        self._requests.add(1, outcome)
        self._seconds.observe(seconds)

    def ttft(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def tpot(self, seconds: float) -> None:
        self._tpot.observe(seconds)

    def inter_token(self, seconds: float) -> None:
        self._gaps.observe(seconds)

    def queue_wait(self, outcome: str, seconds: float) -> None:
        """`outcome`: placed or gave_up."""
        self._queue.observe(seconds, outcome)

    def refused(self, reason: str) -> None:
        """`reason`: the code of the error that the caller got."""
        self._refused.add(1, reason)

    def attempt_failed(self, code: str) -> None:
        self._attempts.add(1, code)

    def dropped_message(self) -> None:
        self._dropped.add()

    def exposition(self) -> str:
        """Everything as Prometheus text."""
        return self._series.exposition()
