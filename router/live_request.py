"""A request between its arrival and its end: what went out so far, and whether it may go on.

Made and driven by RouterService.generate. It counts what is relayed, decides whether a failed attempt is
followed by another, and tells the observer and the request's span. It sends nothing and waits for nothing.
"""

import asyncio

from contracts.config import LimitsConfig
from contracts.errors import AttemptFailed, DeadlineExceeded, NotReady, PdserveError, Refused, WorkerLost
from contracts.requests import AttemptKey, FinishReason, GenerateRequest, Output, Token
from router.attempt import Attempt
from router.observer import RouterObserver
from router.sessions import WorkerSession
from telemetry.milestones import Milestone
from telemetry.tracing import Span


class LiveRequest:
    """`number` is the order of arrival. Times are loop times in seconds."""

    def __init__(
        self, request: GenerateRequest, request_id: str, number: int, span: Span, observer: RouterObserver
    ) -> None:
        self.request = request
        self.request_id = request_id
        self.number = number
        self.span = span
        self.arrived = asyncio.get_running_loop().time()
        self.deadline = self.arrived + request.timeout
        self.max_tokens = request.sampling.max_tokens  # admission cuts it to the context
        self.relayed: list[int] = []
        self.attempts = 0
        self.attempt: Attempt | None = None  # the last one
        self.holders: list[WorkerSession] = []  # where an earlier attempt left the prompt's KV
        self.finish: FinishReason | None = None
        self.error: Exception | None = None
        self.admitted = False
        self.patience: asyncio.Timeout | None = None  # of its wait for a place
        self._observer = observer
        self._losses = 0
        self._lost: tuple[AttemptFailed, float] | None = None  # and until when another place is waited for
        self._stranded_until: float | None = None
        self._cached_tokens = 0
        self._first_token = self._last_token = self.arrived

    @property
    def tokens_to_compute(self) -> int:
        """The prompt and what was relayed: what the next attempt starts from."""
        return len(self.request.prompt_ids) + len(self.relayed)

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.max_tokens - len(self.relayed)

    @property
    def place_by(self) -> float:
        """When its wait for a place ends."""
        lost_until = self.deadline if self._lost is None else self._lost[1]
        stranded_until = self.deadline if self._stranded_until is None else self._stranded_until
        return min(self.deadline, lost_until, stranded_until)

    @property
    def stranded(self) -> bool:
        """Whether no worker that is there could ever hold it."""
        return self._stranded_until is not None

    def judge(self, *, placeable: bool, patience: float) -> None:
        """Whether some worker that is there could hold it: if none, it waits `patience` seconds for one to come,
        counted from when it became so."""
        if self.patience is not None and self.patience.expired():
            return  # too late: its wait is over
        if placeable:
            self._stranded_until = None
        elif self._stranded_until is None:
            self._stranded_until = asyncio.get_running_loop().time() + patience
        if self.patience is not None:
            self.patience.reschedule(self.place_by)

    def next_key(self) -> AttemptKey:
        """The name of the next attempt."""
        return AttemptKey(self.request_id, self.attempts + 1)

    def placed(self, attempt: Attempt) -> None:
        """It has a place: this is its next attempt."""
        if not self.attempts:
            self._observer.queue_wait("placed", asyncio.get_running_loop().time() - self.arrived)
        self.attempts += 1
        self.attempt = attempt

    def relay(self, tokens: tuple[Token, ...]) -> Output:
        """Count tokens of the running attempt as sent, and make the output of them."""
        now = asyncio.get_running_loop().time()
        attempt = self.attempt
        assert attempt is not None
        if not self.relayed:
            self._first_token = now
            self._observer.ttft(now - self.arrived)
            self.span.event(Milestone.FIRST_TOKEN.value)
        else:
            self._observer.inter_token(now - self._last_token)
        self._last_token = now
        self._lost = None
        if attempt.first_position == 1:  # a later one finds in the cache what this request itself put there
            self._cached_tokens = attempt.cached_tokens
        self.relayed.extend(token.token_id for token in tokens)
        self.finish = tokens[-1].finish
        if self.finish is not None and len(self.relayed) > 1:
            self._observer.tpot((now - self._first_token) / (len(self.relayed) - 1))
        return Output(self.request_id, tokens, self._cached_tokens)

    def failed(self, error: AttemptFailed, limits: LimitsConfig) -> None:
        """An attempt has failed: return if another may follow, else raise the error. A refusal costs nothing;
        after a loss another place must be found in time, and only so often."""
        assert self.attempt is not None
        self.holders = self.attempt.holders or self.holders
        self._observer.attempt_failed(error.code)
        self.span.event("attempt_failed", code=error.code, **{"pdserve.attempt": self.attempts})
        if isinstance(error, Refused):
            return
        self._losses += 1
        if self._losses > limits.attempts:
            raise error
        self._lost = (error, asyncio.get_running_loop().time() + limits.lost_seconds)

    def not_placed(self) -> PdserveError:
        """The error of a request that waited until `place_by`."""
        if self.place_by == self.deadline:
            return self.deadline_error()
        if self._lost is not None:
            return WorkerLost(f"{self._lost[0].message}; no other worker took the request in time")
        return NotReady("no worker that could serve the request is left")

    def deadline_error(self) -> DeadlineExceeded:
        """The error at the deadline."""
        return DeadlineExceeded("the request did not finish in time")

    def end(self) -> None:
        """Report how it ended: finished, with an error, or left by the caller."""
        if self.finish is not None:
            outcome, error = self.finish.value, ""
        elif self.error is None:
            outcome = error = "cancelled"
        else:
            outcome = self.error.code if isinstance(self.error, PdserveError) else PdserveError.code
            error = str(self.error) or outcome
        seconds = asyncio.get_running_loop().time() - self.arrived
        self._observer.request_finished(outcome, seconds)
        if self.admitted and not self.attempts:
            self._observer.queue_wait("gave_up", seconds)
        if self.finish is not None:
            self.span.event(Milestone.FINISHED.value)
        self.span.set(outcome=outcome, completion_tokens=len(self.relayed), attempts=self.attempts)
        self.span.end(error)
