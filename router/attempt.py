"""One attempt at one request: its legs on the workers, and its tokens in order.

The service starts it, receives from it and closes it; the sessions deliver the workers' events to it. It
ends once: with a finished token, an error, or a close. In that same turn both workers are told and the
ledger has everything back. It never retries.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from contracts.errors import PdserveError
from contracts.requests import AttemptKey, Token
from contracts.session import Failed, Reserved, Submit, Tokens, WorkerEvent
from contracts.workers import Role
from router.sessions import WorkerSession
from telemetry.milestones import Milestone
from telemetry.tracing import Span


@dataclass(slots=True)
class _Leg:
    """What one worker does for the attempt. `claimed`: the ledger counts it. `held`: the worker may hold
    blocks for it, so an end must cancel it. `computed`: the prompt's KV is there."""

    session: WorkerSession
    claimed: bool = True
    held: bool = True
    computed: bool = False


class Attempt:
    """The legs by role: prefill and decode; decode alone (aggregated); prefill alone, when its one token is
    the last. Claims of the ledger were made by the placement. `on_end` is called once."""

    def __init__(
        self,
        key: AttemptKey,
        first_position: int,
        sessions: dict[Role, WorkerSession],
        span: Span,
        on_end: Callable[[], None],
    ) -> None:
        self.key = key
        self.first_position = first_position
        self.cached_tokens = 0
        self._legs = {role: _Leg(session) for role, session in sessions.items()}
        self._span = span
        self._on_end = on_end
        self._next = first_position
        self._early: dict[int, Token] = {}  # came before their predecessor
        self._ready: list[Token] = []
        # Before Reserved nothing goes out: a refusal must leave the request as it was.
        self._reserved = Role.DECODE not in self._legs
        self._error: PdserveError | None = None
        self._closed = False
        self._news: asyncio.Future[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return not self._closed

    @property
    def holders(self) -> list[WorkerSession]:
        """Where the prompt's KV was when it was last heard of; the decode worker, which has more, comes first."""
        legs = (self._legs.get(role) for role in (Role.DECODE, Role.PREFILL))
        return [leg.session for leg in legs if leg is not None and leg.computed]

    @property
    def pair(self) -> tuple[str, str] | None:
        """Ids of its prefill and its decode worker; None unless it has both, and both are there."""
        if len(self._legs) < 2 or not all(leg.session.open for leg in self._legs.values()):
            return None
        return self._legs[Role.PREFILL].session.worker.id, self._legs[Role.DECODE].session.worker.id

    @property
    def arrived(self) -> bool:
        """Whether the prompt's KV has come to the decode worker."""
        return Role.DECODE in self._legs and self._legs[Role.DECODE].computed

    def expire_at(self, deadline: float, error: PdserveError) -> None:
        """Fail with `error` at this loop time, unless ended before."""
        self._deadline = asyncio.get_running_loop().call_at(deadline, self.fail, error)

    def submit(self, role: Role, submit: Submit) -> None:
        """Send one leg to its worker."""
        leg = self._legs[role]
        leg.session.submit(submit, lambda event: self._deliver(role, event))

    async def receive(self) -> tuple[Token, ...]:
        """All tokens that can go out, at least one, in order of position, each once; the last one may carry a
        finish. Raises the error that ended the attempt, after the tokens that came before it."""
        while not (self._reserved and self._ready):
            if self._error is not None:
                raise self._error
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        tokens = tuple(self._ready)
        self._ready.clear()
        return tokens

    def fail(self, error: PdserveError) -> None:
        """End with an error. What already ended stays as it is."""
        if not self._closed:
            self._error = error
            self.close(error.code)
            self._wake()

    def close(self, reason: str) -> None:
        """Cancel what the workers still hold, and free the ledger, in this turn. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._deadline is not None:
            self._deadline.cancel()
        for leg in self._legs.values():
            if leg.held:
                leg.session.cancel(self.key, reason)
            else:
                leg.session.forget(self.key)
            self._release(leg)
        self._on_end()

    def _deliver(self, role: Role, event: WorkerEvent) -> None:
        match event:
            case Reserved():
                self._reserved = True
                self._span.event(Milestone.RESERVED.value)
                self._wake()
            case Tokens():
                self._take(role, event)
            case Failed():
                leg = self._legs[role]
                leg.held = False
                # A prefill leg has done its part with its token. Whether its blocks still arrive is the
                # decode worker's to say.
                if role is Role.DECODE or leg.claimed:
                    self.fail(event.error.to_error())

    def _take(self, role: Role, event: Tokens) -> None:
        self.cached_tokens = max(self.cached_tokens, event.cached_tokens)
        self._legs[role].computed = True
        prefill = self._legs.get(Role.PREFILL)
        if prefill is not None:
            self._release(prefill)  # its prompt is computed, whoever says so
            if role is Role.DECODE:
                prefill.held = False  # decode has all blocks
        for token in event.tokens:
            if token.position >= self._next:
                self._early[token.position] = token
        while self._next in self._early:
            token = self._early.pop(self._next)
            self._next += 1
            self._ready.append(token)
            if token.finish is not None:
                self._legs[role].held = False
                self._reserved = True  # nothing is left that could be refused
                self.close("finished")
                break
        self._wake()

    def _release(self, leg: _Leg) -> None:
        if leg.claimed:
            leg.claimed = False
            leg.session.account.release(self.key)

    def _wake(self) -> None:
        news = self._news
        if news is not None and not news.done() and (self._error is not None or (self._reserved and self._ready)):
            news.set_result(None)
