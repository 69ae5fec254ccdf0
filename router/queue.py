"""The router's queue: the one place where a request waits.

Bounded by requests and by prompt tokens, strictly first in, first out. What comes back from a failed attempt
keeps its number and so stands at the head, before all that were never started. It starts requests from the
head while they fit, whenever pumped: on arrival, frames, ends of attempts and changes of the fleet. It never
looks past the head, and it has no timer.
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
    """`start` places and dispatches a request and returns what runs, or None while nothing has room;
    `undo` ends what was started for a request that has left in the same moment."""

    def __init__(
        self,
        max_requests: int,
        max_tokens: int,
        start: Callable[[RequestT], StartedT | None],
        undo: Callable[[StartedT], None],
    ) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._start = start
        self._undo = undo
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
        Cancelling the wait takes it out. Raises what `reject` gave it."""
        loop = asyncio.get_running_loop()
        waiter: _Waiter[RequestT, StartedT] = _Waiter(request, order, tokens, loop.time(), loop.create_future())
        index = len(self._waiters)
        while index and self._waiters[index - 1].order > order:
            index -= 1
        self._waiters.insert(index, waiter)
        self._tokens += tokens
        self.pump()
        try:
            return await waiter.started
        except asyncio.CancelledError:
            # The wait can be cancelled between the start and its news: then the start is undone here.
            if not waiter.started.cancelled() and waiter.started.exception() is None:
                self._undo(waiter.started.result())
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                self._tokens -= tokens
                self.pump_soon()  # the next one may be smaller

    def pump(self) -> None:
        """Start requests from the head while they fit."""
        self._pump_scheduled = False
        while self._waiters:
            waiter = self._waiters[0]
            if not waiter.started.done():
                started = self._start(waiter.request)
                if started is None:
                    return
                waiter.started.set_result(started)
                self._departures.append(asyncio.get_running_loop().time())
            self._waiters.popleft()
            self._tokens -= waiter.tokens

    def pump_soon(self) -> None:
        """Pump once, two turns of the loop on: requests that were refused in this turn wake in the next one and
        are back at the head before others are started. Many calls make one pump."""
        if not self._pump_scheduled:
            self._pump_scheduled = True
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self.pump)

    def reject(self, judge: Callable[[RequestT], PdserveError | None]) -> None:
        """End the wait of every request for which `judge` has an error."""
        for waiter in self._waiters:
            error = judge(waiter.request)
            if error is not None and not waiter.started.done():
                waiter.started.set_exception(error)

    def check(self) -> None:
        """Assert the sum of tokens against a recount."""
        assert self._tokens == sum(waiter.tokens for waiter in self._waiters), "queued tokens drifted"
