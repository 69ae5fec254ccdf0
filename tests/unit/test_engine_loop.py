"""The engine loop over the simulated runner: tokens depend on the prompt and on nothing else."""

import asyncio

import pytest

from contracts.errors import EngineFailed
from contracts.requests import FinishReason
from engine.block_manager import AuditFailed
from engine.runners.base import StepPlan
from simulator.virtual_time import run
from tests.helpers.simulated_engine import SimulatedEngine, key

PROMPTS = [tuple(range(n, n + length)) for n, length in ((1, 1), (40, 3), (80, 4), (120, 5), (160, 17), (3, 40))]


async def alone(prompt: tuple[int, ...], max_tokens: int = 8) -> list[int]:
    """The tokens of a prompt that has an engine for itself, all in one chunk."""
    engine = SimulatedEngine(step_tokens=512)
    engine.loop.add(engine.sequence("a", prompt, max_tokens=max_tokens))
    await engine.run_until_idle()
    return engine.ids("a")


@pytest.mark.parametrize("step_tokens", [1, 7, 16, 512])
def test_tokens_do_not_depend_on_neighbours_or_chunks(step_tokens: int) -> None:
    async def main() -> None:
        engine = SimulatedEngine(step_tokens=step_tokens)
        for number, prompt in enumerate(PROMPTS):
            engine.loop.add(engine.sequence(number, prompt))
        await engine.run_until_idle()
        for number, prompt in enumerate(PROMPTS):
            assert engine.ids(number) == await alone(prompt)
            assert engine.tokens[key(number)][-1].finish is FinishReason.LENGTH

    run(main())


def test_preemption_changes_no_token_and_ends() -> None:
    async def main() -> None:
        engine = SimulatedEngine(blocks=14)
        for number in range(4):
            engine.loop.add(engine.sequence(number, PROMPTS[number], max_tokens=40))
        await engine.run_until_idle()
        assert sum(report.preempted for report in engine.reports) >= 2
        for number in range(4):
            assert engine.ids(number) == await alone(PROMPTS[number], 40)
            assert [token.position for token in engine.tokens[key(number)]] == list(range(1, 41))
        assert engine.blocks.available == 14

    run(main())


def test_a_cached_prefix_gives_the_same_tokens_and_is_counted() -> None:
    async def main() -> None:
        engine = SimulatedEngine()
        prompt = tuple(range(16))
        cached = []
        for number in range(3):
            sequence = engine.sequence(number, prompt)
            engine.loop.add(sequence)
            await engine.run_until_idle()
            cached.append(sequence.cached_tokens)
            assert engine.ids(number) == await alone(prompt)
        assert cached == [0, 12, 12]  # the last token is always computed
        other = engine.sequence("salted", prompt, salt="tenant")
        engine.loop.add(other)
        await engine.run_until_idle()
        assert other.cached_tokens == 0

    run(main())


def test_a_lost_block_changes_the_tokens() -> None:
    """The simulated runner is only worth something if it notices."""

    async def main() -> None:
        engine = SimulatedEngine()
        sequence = engine.sequence("a", PROMPTS[5])
        engine.loop.add(sequence)
        stepping = asyncio.create_task(engine.loop.run())
        await asyncio.sleep(0.045)  # after the prompt, between two decode steps
        block = int(sequence.block_table[2])
        engine.runner.store.writable(block)[:] = bytes(engine.layout.block_bytes)
        await asyncio.sleep(1)
        stepping.cancel()
        assert len(engine.ids("a")) == 8
        assert engine.ids("a") != await alone(PROMPTS[5])

    run(main())


def test_cancel_in_a_step_releases_when_the_step_ends() -> None:
    async def main() -> None:
        engine = SimulatedEngine(cost=lambda plan: 1.0)
        engine.loop.add(engine.sequence("a", PROMPTS[4], max_tokens=1000))
        engine.loop.add(engine.sequence("b", PROMPTS[5], max_tokens=3))
        gone: list[float] = []
        clock = asyncio.get_running_loop().time
        stepping = asyncio.create_task(engine.loop.run())
        await asyncio.sleep(0.5)
        free = engine.blocks.available
        assert engine.loop.cancel(key("a"), lambda steps: gone.append(clock()))
        assert not engine.loop.cancel(key("a"), lambda steps: gone.append(clock()))
        assert not engine.loop.cancel(key("nobody"), lambda steps: gone.append(clock()))
        assert engine.blocks.available == free
        await asyncio.sleep(0.6)
        assert gone == [1.0]
        assert key("a") not in engine.tokens
        await asyncio.sleep(10)
        assert len(engine.ids("b")) == 3
        assert engine.blocks.available == 64
        stepping.cancel()

    run(main())


def test_cancel_while_waiting_is_immediate() -> None:
    async def main() -> None:
        engine = SimulatedEngine()
        engine.loop.add(engine.sequence("a", PROMPTS[0]))
        gone: list[int] = []
        assert engine.loop.cancel(key("a"), gone.append)
        assert gone == [0]
        assert not engine.loop.busy

    run(main())


def test_a_failing_step_fails_its_requests_and_not_the_engine() -> None:
    def cost(plan: StepPlan) -> float:
        if any(row.tokens[0] == 13 for row in plan.rows):
            raise RuntimeError("no such kernel")
        return 0.01

    async def main() -> None:
        engine = SimulatedEngine(cost=cost)
        engine.loop.add(engine.sequence("bad", (13, 1, 2)))
        await engine.run_until_idle()
        assert isinstance(engine.errors[key("bad")], EngineFailed)
        engine.loop.add(engine.sequence("good", PROMPTS[1]))
        await engine.run_until_idle()
        assert engine.ids("good") == await alone(PROMPTS[1])
        assert engine.blocks.available == 64

    run(main())


def test_the_audit_sees_a_leaked_reference() -> None:
    async def main() -> None:
        engine = SimulatedEngine()
        sequence = engine.sequence("a", PROMPTS[1])
        table = engine.blocks.allocate(sequence.holder, [], 2)
        engine.blocks.check()
        engine.blocks._references[table[0]] += 1
        with pytest.raises(AuditFailed, match="references counted"):
            engine.blocks.check()

    run(main())
