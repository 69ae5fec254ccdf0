"""Virtual time: the clock jumps, order is kept, and what cannot end says so."""

import asyncio
import socket

import pytest

from simulator.virtual_time import VirtualTimeError, run


def test_time_starts_at_zero_and_jumps_to_the_next_timer() -> None:
    async def main() -> list[tuple[str, float]]:
        loop = asyncio.get_running_loop()
        seen = [("start", loop.time())]

        async def sleeper(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append((name, loop.time()))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(sleeper("a year", 31_536_000.0))
            tasks.create_task(sleeper("a third", 1 / 3))
            tasks.create_task(sleeper("an hour", 3600.0))
        return seen

    assert run(main()) == [("start", 0.0), ("a third", 1 / 3), ("an hour", 3600.0), ("a year", 31_536_000.0)]


def test_time_stands_still_while_anything_is_ready() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        loop.call_later(5.0, lambda: None)
        for _ in range(1000):
            await asyncio.sleep(0)
        return loop.time()

    assert run(main()) == 0.0


def test_timeouts_fire_in_virtual_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(600.0):
                await asyncio.get_running_loop().create_future()
        return asyncio.get_running_loop().time()

    assert run(main()) == 600.0


def test_deadlock_is_an_error_and_tasks_are_cleaned_up() -> None:
    cleaned = []

    async def main() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            cleaned.append(True)

    with pytest.raises(VirtualTimeError, match="deadlock"):
        run(main())
    assert cleaned == [True]


def test_threads_are_refused() -> None:
    with pytest.raises(VirtualTimeError, match="no executor"):
        run(asyncio.to_thread(len, "abc"))


def test_sockets_are_refused() -> None:
    async def main() -> None:
        one, other = socket.socketpair()
        with one, other:
            one.setblocking(False)
            with pytest.raises(VirtualTimeError, match="no sockets"):
                asyncio.get_running_loop().add_reader(one, lambda: None)

    run(main())


def test_a_callback_from_another_thread_of_the_program_is_still_seen() -> None:
    async def main() -> str:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[str] = loop.create_future()
        loop.call_soon_threadsafe(future.set_result, "woken")
        return await future

    assert run(main()) == "woken"


def test_exceptions_and_results_pass_through() -> None:
    async def fails() -> None:
        raise KeyError("boom")

    with pytest.raises(KeyError, match="boom"):
        run(fails())
