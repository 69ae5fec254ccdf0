"""An event loop in virtual time: when nothing is ready, the clock jumps to the next timer.

The simulator and the tests run the product on it; hours pass in milliseconds, and the same program takes the
same turns every time. It must never wait for anything outside the loop: threads and sockets are refused,
because how long they take is not known here.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from concurrent.futures import Executor
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


class VirtualTimeError(RuntimeError):
    """The program waits for something that cannot happen in virtual time; says for what."""


class _Clock(selectors.DefaultSelector):
    """The loop's selector: where a real one would sleep, this one moves `now`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0  # seconds since the loop was made

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """The loop registers its own wake-up pipe first; nothing else is allowed."""
        if self.get_map():
            raise VirtualTimeError("no sockets or pipes in virtual time; use the memory plugs")
        return super().register(fileobj, events, data)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """asyncio passes 0 when something is ready, the time to the next timer, or None without timers."""
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise VirtualTimeError("deadlock: no task is ready and no timer is set")
        self.now += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop whose `time()` starts at 0 and only moves when every task waits."""

    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)
        # asyncio runs timers due within this many seconds of now. Its default (1 ns) is lost in the rounding of
        # a double after some weeks, and a timer that is due exactly at now would never run.
        self._clock_resolution = 1e-6

    def time(self) -> float:
        """Virtual seconds."""
        return self._clock.now

    def run_in_executor(self, executor: Executor | None, func: Any, *args: Any) -> NoReturn:  # type: ignore[override]  # refuses
        """Raises VirtualTimeError: a thread's time is real."""
        raise VirtualTimeError(f"no executor in virtual time (called for {func!r})")


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time. Raises VirtualTimeError when all tasks wait and no timer is set; the
    tasks are cancelled first."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
