"""The router: owns a request from its admission to its last token.

The frontends call `generate`; the process that hosts the router starts, drains and stops it. This is the
only place that retries or places again. It never touches a tensor, a socket or Redis.
"""

import asyncio
import itertools
import logging
import secrets
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

from contracts.config import LimitsConfig, RouterConfig
from contracts.errors import AttemptFailed, NotReady, PdserveError, Refused
from contracts.requests import GenerateRequest, Output
from contracts.session import Source, Submit
from contracts.workers import Role
from router.admission import Bounds, bounds_of, clamp_max_tokens
from router.attempt import Attempt
from router.fleet import Fleet, WorkerView
from router.ledger import Ledger, Need
from router.live_request import LiveRequest
from router.observer import RouterObserver
from router.pairs import FailingPairs
from router.queue import RequestQueue
from router.sessions import WorkerSession
from telemetry.merge import merge_expositions
from telemetry.milestones import Milestone
from telemetry.tracing import Attribute, Tracing


class RouterService:
    """One router. `incarnation` names its life in request ids; `growth_tokens` is what a decode reservation
    holds for generated tokens; `exposition` gives the router's own metrics."""

    def __init__(
        self,
        *,
        router_id: str,
        incarnation: int,
        config: RouterConfig,
        limits: LimitsConfig,
        growth_tokens: int,
        fleet: Fleet,
        ledger: Ledger,
        tracing: Tracing,
        observer: RouterObserver,
        exposition: Callable[[], str],
    ) -> None:
        self._id = router_id
        self._incarnation = incarnation
        self._policy = config.policy
        self._limits = limits
        self._growth_tokens = growth_tokens
        self._fleet = fleet
        self._ledger = ledger
        self._tracing = tracing
        self._observer = observer
        self._exposition = exposition
        self._queue: RequestQueue[LiveRequest, Attempt] = RequestQueue(
            config.queue_requests,
            config.queue_prompt_tokens,
            self._start,
            lambda attempt: attempt.close("cancelled"),
            lambda live: live.stranded,
        )
        self._numbers = itertools.count(1)
        self._live: dict[LiveRequest, None] = {}  # in order, so that a run can be repeated
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = ""  # why no new request is let in
        self._stopped = False
        self._fleet_task: asyncio.Task[None] | None = None
        self._log = logging.getLogger("pdserve.router.service")
        self._pairs = FailingPairs(ledger, self._queue.pump_soon)
        fleet.listen(self._queue.pump_soon, self._judge_all)
        observer.bind(
            waiting=lambda: len(self._queue),
            running=lambda: sum(live.attempt is not None and live.attempt.running for live in self._live),
            workers=fleet.count,
            queued_tokens=lambda: self._queue.tokens,
        )

    # --- one request, top to bottom ---

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Output, None]:
        """The tokens of a request in order of position, each once; the last one carries the finish reason.

        Closing the generator cancels the request, in whatever state it is. Raises PdserveError: before the
        first output when the request is not let in (InvalidRequest and its kinds, Overloaded, NotReady),
        later when it cannot be finished (DeadlineExceeded, WorkerLost, EngineFailed, ...).
        """
        live = self._arrive(request)
        try:
            self._admit(live)
            while live.finish is None:
                attempt = await self._place(live)  # both legs are on their way when it returns
                try:
                    while live.finish is None:
                        yield live.relay(await attempt.receive())
                except AttemptFailed as error:
                    if not isinstance(error, Refused):
                        self._pairs.failed(attempt)
                    live.failed(error, self._limits)
                finally:
                    self._pairs.ended(attempt)
                    attempt.close("cancelled")
        except Exception as error:
            live.error = error
            raise
        finally:
            self._leave(live)

    def _arrive(self, request: GenerateRequest) -> LiveRequest:
        number = next(self._numbers)
        request_id = f"{self._incarnation}-{number}"
        span = self._tracing.start("pdserve.request", request.traceparent, **{"pdserve.request": request_id})
        span.event(Milestone.RECEIVED.value)
        live = LiveRequest(request, request_id, number, span, self._observer)
        self._live[live] = None
        self._idle.clear()
        return live

    def _admit(self, live: LiveRequest) -> None:
        """Refuse what can never be served, and what cannot wait here."""
        prompt_tokens = len(live.request.prompt_ids)
        try:
            if self._closing:
                raise NotReady(self._closing)
            bounds = self._bounds()
            live.max_tokens = clamp_max_tokens(prompt_tokens, live.max_tokens, bounds.context)
            if not self._ledger.can_ever_hold(self._need(live)):
                raise bounds.too_large(prompt_tokens, live.max_tokens)
            self._queue.admit(prompt_tokens)
        except PdserveError as error:
            self._observer.refused(error.code)
            raise
        live.admitted = True
        live.span.event(Milestone.ADMITTED.value)

    async def _place(self, live: LiveRequest) -> Attempt:
        """Wait in the queue until an attempt could be dispatched. Raises DeadlineExceeded, WorkerLost, NotReady."""
        if self._stopped:
            raise NotReady(self._closing)
        self._judge(live)
        span = self._tracing.start("pdserve.queue", live.span.traceparent, ahead=len(self._queue))
        try:
            async with asyncio.timeout_at(live.place_by) as live.patience:
                return await self._queue.wait(live, live.number, live.tokens_to_compute)
        except TimeoutError:
            raise live.not_placed() from None
        finally:
            live.patience = None
            span.end()

    def _start(self, live: LiveRequest) -> Attempt | None:
        """Place an attempt and dispatch its legs; None while they do not fit. Called by the queue."""
        key = live.next_key()
        sessions = self._fleet.place(key, self._need(live))
        if sessions is None:
            return None
        attempt = Attempt(key, len(live.relayed) + 1, sessions, live.span, self._queue.pump_soon)
        try:
            live.placed(attempt)
            names: dict[str, Attribute] = {"pdserve.request": key.request_id, "pdserve.attempt": key.attempt}
            names |= {f"{role.value}_worker": session.worker.id for role, session in sessions.items()}
            self._tracing.start("pdserve.placement", live.span.traceparent, policy=self._policy, **names).end()
            live.span.event(Milestone.PLACED.value, **names)
            attempt.expire_at(live.deadline, live.deadline_error())
            self._dispatch(live, attempt, sessions)
        except BaseException:
            attempt.close("internal_error")  # it gives back what the placement has claimed
            raise
        return attempt

    def _dispatch(self, live: LiveRequest, attempt: Attempt, sessions: dict[Role, WorkerSession]) -> None:
        """Send both legs at once, with one ticket."""
        ticket = secrets.token_bytes(16)
        source = _source(sessions.get(Role.PREFILL))
        # who computed the prompt for an earlier attempt can save this one's prefill worker the work
        holder = _source(next((holder for holder in live.holders if holder.open), None))
        for role, session in sessions.items():
            submit = Submit(
                key=attempt.key,
                incarnation=session.worker.incarnation,
                ticket=ticket,
                prompt_ids=live.request.prompt_ids,
                relayed=tuple(live.relayed),
                sampling=replace(live.request.sampling, max_tokens=live.max_tokens),
                cache_salt=live.request.cache_salt,
                deadline_ms=max(1, int(1000 * (live.deadline - asyncio.get_running_loop().time()))),
                traceparent=live.span.traceparent or live.request.traceparent,
                source=source if role is Role.DECODE else None,
                prefix=holder if role is Role.PREFILL and holder != source else None,
            )
            attempt.submit(role, submit)

    def _leave(self, live: LiveRequest) -> None:
        live.end()
        self._live.pop(live, None)
        if not self._live:
            self._idle.set()

    # --- the router as a whole ---

    def start(self) -> None:
        """Begin to follow the registry. Call once, in the running loop."""
        self._fleet_task = asyncio.get_running_loop().create_task(self._fleet.run(), name="fleet")
        self._fleet_task.add_done_callback(self._fleet_ended)

    async def drain(self, seconds: float) -> bool:
        """Let nobody in, and wait for the running requests, at most so long; whether all have ended."""
        self._closing = "the router is draining"
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """End every request with NotReady and every session. Idempotent. Raises what broke the fleet, if
        anything did."""
        self._closing = "the router has stopped"
        self._stopped = True
        self._queue.end(lambda: NotReady(self._closing))
        for live in self._live:
            if live.attempt is not None:
                live.attempt.fail(NotReady(self._closing))
        if self._fleet_task is not None:
            task, self._fleet_task = self._fleet_task, None
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()

    async def ended(self) -> None:
        """Returns once the started router has been stopped. Raises what broke its fleet: from then on it could
        only refuse, so whoever runs it must end its process."""
        task = self._fleet_task
        assert task is not None
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()

    def ready(self) -> bool:
        """Whether new requests are let in and every required role answers and makes progress."""
        return not self._closing and self._fleet.ready()

    async def wait_ready(self) -> None:
        """Returns once the fleet is ready."""
        await self._fleet.wait_ready()

    def token_limit(self) -> int:
        """Most tokens, prompt and generated together, that one request can have. Raises NotReady."""
        return self._bounds().most_tokens

    def workers(self) -> list[WorkerView]:
        """The live workers, by id."""
        return self._fleet.views()

    async def scrape(self) -> str:
        """Metrics of the router and of every live worker that answers in time, as one Prometheus text."""
        parts = [({"role": Role.ROUTER.value, "worker": self._id}, self._exposition())]
        parts += [
            ({"role": scrape.worker.role.value, "worker": scrape.worker.id}, scrape.text)
            for scrape in await self._fleet.scrape_all()
        ]
        return merge_expositions(parts)

    def check(self) -> None:
        """Assert the books of queue and ledger."""
        self._queue.check()
        self._ledger.check()

    def _bounds(self) -> Bounds:
        missing = self._fleet.missing_role()
        if missing is not None:
            raise NotReady(f"no {missing.value} worker is ready")
        capacities = {role: [account.capacity for account in self._ledger.accounts(role)] for role in self._fleet.roles}
        return bounds_of(capacities[Role.DECODE], capacities.get(Role.PREFILL))

    def _need(self, live: LiveRequest) -> Need:
        roles = self._fleet.roles
        if live.remaining == 1 and Role.PREFILL in roles:
            roles = frozenset({Role.PREFILL})  # its first token is the last: there is nothing to decode
        whole = len(live.request.prompt_ids) + live.max_tokens
        return Need(live.tokens_to_compute, min(live.remaining, self._growth_tokens), whole, roles)

    def _judge_all(self) -> None:
        """Other workers than before take requests: those that wait may have lost the last one that could hold
        them, or have found one."""
        for live in self._live:
            if live.patience is not None:
                self._judge(live)

    def _judge(self, live: LiveRequest) -> None:
        live.judge(placeable=self._ledger.can_ever_hold(self._need(live)), patience=self._limits.lost_seconds)

    def _fleet_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._log.critical("the router lost its fleet", exc_info=task.exception())


def _source(session: WorkerSession | None) -> Source | None:
    """The worker of a session as one to pull from."""
    if session is None:
        return None
    worker = session.worker
    return Source(worker.id, worker.address, worker.incarnation)
