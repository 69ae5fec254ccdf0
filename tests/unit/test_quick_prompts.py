"""Short prompts slip in between the chunks of a long one; nobody else is overtaken, and the long one advances."""

import asyncio

from simulator.virtual_time import run
from tests.helpers.simulated_engine import SimulatedEngine, key

STEP = 16


def prompt(length: int, first: int = 0) -> tuple[int, ...]:
    return tuple(range(first, first + length))


async def order_of_first_tokens(engine: SimulatedEngine, *names: str) -> list[str]:
    """Which of these prompts has its token first, second, ..."""
    seen: list[str] = []
    deliver = engine.delivered

    def watch(advances: list) -> None:  # type: ignore[type-arg]  # as StepSink's
        deliver(advances)
        seen.extend(name for name in names if key(name) in engine.tokens and name not in seen)

    engine.delivered = watch  # type: ignore[method-assign]  # watched
    await engine.run_until_idle()
    return seen


def test_a_short_prompt_waits_for_one_chunk_of_a_long_one() -> None:
    async def main() -> None:
        engine = SimulatedEngine(step_tokens=STEP, blocks=200)
        engine.loop.add(engine.sequence("long", prompt(320), one_token=True))
        engine.loop.add(engine.sequence("short", prompt(7, 500), one_token=True))
        assert await order_of_first_tokens(engine, "long", "short") == ["short", "long"]
        assert all(report.tokens == STEP for report in engine.reports[:-1])  # no step is smaller for it
        assert len(engine.reports) == -(-(320 + 7) // STEP)

    run(main())


def test_a_long_prompt_gets_half_of_each_step_whatever_comes() -> None:
    async def main() -> None:
        engine = SimulatedEngine(step_tokens=STEP, blocks=400)
        engine.loop.add(engine.sequence("long", prompt(160), one_token=True))
        for number in range(60):
            engine.loop.add(engine.sequence(f"s{number}", prompt(8, 500 + number), one_token=True))
        steps: list[int] = []
        deliver = engine.delivered

        def watch(advances: list) -> None:  # type: ignore[type-arg]  # as StepSink's
            deliver(advances)
            steps.extend(advance.computed for advance in advances if advance.sequence.key == key("long"))

        engine.delivered = watch  # type: ignore[method-assign]  # watched
        await engine.run_until_idle()
        assert min(steps[:-1]) >= STEP // 2
        assert len(steps) <= 160 // (STEP // 2)

    run(main())


def test_prompts_that_do_not_fit_into_half_a_step_keep_their_order() -> None:
    async def main() -> None:
        engine = SimulatedEngine(step_tokens=STEP, blocks=400)
        for name in ("a", "b", "c"):
            engine.loop.add(engine.sequence(name, prompt(100, 100 * ord(name)), one_token=True))
        assert await order_of_first_tokens(engine, "a", "b", "c") == ["a", "b", "c"]

    run(main())


def test_nobody_slips_in_front_of_one_that_waits_for_blocks() -> None:
    async def main() -> None:
        engine = SimulatedEngine(step_tokens=STEP, blocks=60)
        engine.loop.add(engine.sequence("a", prompt(160), one_token=True))  # 40 blocks
        engine.loop.add(engine.sequence("b", prompt(160, 300), one_token=True))  # waits for a's
        engine.loop.add(engine.sequence("c", prompt(4, 700), one_token=True))
        assert (await order_of_first_tokens(engine, "a", "b", "c"))[0] == "a"
        await asyncio.sleep(0)

    run(main())
