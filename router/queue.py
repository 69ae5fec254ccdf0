"""The router's queue: the one place where a request waits.

Bounded by requests and by prompt tokens, first in, first out. What comes back from a failed attempt keeps its
number and so stands at the head, before all that were never started. It starts requests from the head while
they fit, whenever pumped: on arrival, frames, ends of attempts and changes of the fleet. It looks past a request
only while no worker that is there could ever hold it, and it has no timer.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from contracts.errors import Overloaded, PdserveError

RequestT = TypeVar("RequestT")
StartedT = TypeVar("StartedT")

_RATE_WINDOW = 64  # departures that the drain rate is measured over
_MAX_RETRY_AFTER = 60


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter(Generic[RequestT, StartedT]):
    """One waiting request; `started` resolves when it leaves."""

    request: RequestT
    order: int
    tokens: int
    since: float
    started: asyncio.Future[StartedT]


class RequestQueue(Generic[RequestT, StartedT]):
    """`start` places and dispatches a request and returns what runs, or None while nothing has room; what it
    raises ends that request's wait and nobody else's. `undo` ends what was started for a request that has left
    in the same moment; `stranded` says whom to pass over."""

    def __init__(
        self,
        max_requests: int,
        max_tokens: int,
        start: Callable[[RequestT], StartedT | None],
        undo: Callable[[StartedT], None],
        stranded: Callable[[RequestT], bool],
    ) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._start = start
        self._undo = undo
        self._stranded = stranded
        self._waiters: deque[_Waiter[RequestT, StartedT]] = deque()
        self._tokens = 0
        self._departures: deque[float] = deque(maxlen=_RATE_WINDOW)
        self._pump_scheduled = False

    def __len__(self) -> int:
        return len(self._waiters)

    @property
    def tokens(self) -> int:
        """Prompt tokens that wait."""
        return self._tokens

    def admit(self, tokens: int) -> None:
        """Raises Overloaded if a new request of so many prompt tokens may not wait. A request above the bound
        by itself is let in when nobody waits."""
        if len(self._waiters) >= self._max_requests:
            reason = "requests"
        elif self._waiters and self._tokens + tokens > self._max_tokens:
            reason = "prompt tokens"
        else:
            return
        retry_after = self.retry_after()
        raise Overloaded(
            f"the queue is full ({reason}): {len(self._waiters)} of {self._max_requests} requests and "
            f"{self._tokens} of {self._max_tokens} prompt tokens wait; retry after {retry_after} s",
            retry_after=retry_after,
        )

    def retry_after(self) -> int:
        """Seconds in which what waits would leave at the rate of the last departures; 1 to 60. A stall counts,
        as the rate is taken up to this moment; with no departure yet it is the age of the head."""
        now = asyncio.get_running_loop().time()
        if self._departures:
            seconds = len(self._waiters) * (now - self._departures[0]) / len(self._departures)
        else:
            seconds = now - self._waiters[0].since if self._waiters else 0.0
        return min(max(1, math.ceil(seconds)), _MAX_RETRY_AFTER)

    async def wait(self, request: RequestT, order: int, tokens: int) -> StartedT:
        """What `start` made of the request, which waits before all of a higher `order` (its number of arrival).
        Cancelling the wait takes it out. Raises what `start` raised, or `end` gave it."""
        loop = asyncio.get_running_loop()
        waiter: _Waiter[RequestT, StartedT] = _Waiter(request, order, tokens, loop.time(), loop.create_future())
        try:
            self._put_in(waiter)
            self.pump()
            return await waiter.started
        except asyncio.CancelledError:
            # The wait can be cancelled between the start and its news: then the start is undone here.
            if not waiter.started.cancelled() and waiter.started.exception() is None:
                self._undo(waiter.started.result())
            raise
        finally:
            if waiter in self._waiters:
                self._take_out(waiter)
                self.pump_soon()  # the next one may be smaller

    def pump(self) -> None:
        """Start requests from the head while they fit."""
        self._pump_scheduled = False
        for waiter in tuple(self._waiters):
            if waiter.started.done() or self._stranded(waiter.request):
                continue
            try:
                started = self._start(waiter.request)
            except Exception as error:  # noqa: BLE001 - it goes to the one whose start it was
                waiter.started.set_exception(error)
            else:
                if started is None:
                    return
                waiter.started.set_result(started)
                self._departures.append(asyncio.get_running_loop().time())
            self._take_out(waiter)

    def pump_soon(self) -> None:
        """Pump once, two turns of the loop on: requests that were refused in this turn wake in the next one and
        are back at the head before others are started. Many calls make one pump."""
        if not self._pump_scheduled:
            self._pump_scheduled = True
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self.pump)

    def end(self, error: Callable[[], PdserveError]) -> None:
        """End the wait of every request, each with an error of its own."""
        for waiter in self._waiters:
            if not waiter.started.done():
                waiter.started.set_exception(error())

    def check(self) -> None:
        """Assert the sum of tokens against a recount."""
        assert self._tokens == sum(waiter.tokens for waiter in self._waiters), "queued tokens drifted"

    def _put_in(self, waiter: _Waiter[RequestT, StartedT]) -> None:
        index = len(self._waiters)
        while index and self._waiters[index - 1].order > waiter.order:
            index -= 1
        self._waiters.insert(index, waiter)
        self._tokens += waiter.tokens

    def _take_out(self, waiter: _Waiter[RequestT, StartedT]) -> None:
        self._waiters.remove(waiter)
        self._tokens -= waiter.tokens
