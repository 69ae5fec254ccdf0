"""An engine over the simulated runner, and what its sink saw: for tests in virtual time."""

import asyncio
from collections.abc import Callable
from typing import cast

from contracts.errors import PdserveError
from contracts.kv import BlockHasher, KvLayout
from contracts.requests import AttemptKey, SamplingParams, Token
from engine.block_manager import BlockManager
from engine.loop import Advance, EngineLoop, StepReport
from engine.output import OutputProcessor
from engine.runners.base import StepPlan
from engine.runners.simulated import SimulatedRunner
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from text.tokenizer import Tokenizer

VOCABULARY = 1000


class NumberTokens:
    """Token 7 is the text "7 "."""

    def token_bytes(self, token_id: int) -> bytes:
        return b"%d " % token_id


NUMBER_TOKENS = cast(Tokenizer, NumberTokens())


def simulated_layout(block_size: int = 4) -> KvLayout:
    """One layer of one head of one 64-bit number."""
    return KvLayout("sim", "numbers", "sim", "uint64", 1, 1, 1, block_size, "none")


def key(name: str | int) -> AttemptKey:
    return AttemptKey(str(name), 1)


class SimulatedEngine:
    """The engine's parts with a recording sink."""

    def __init__(
        self,
        *,
        blocks: int = 64,
        block_size: int = 4,
        step_tokens: int = 16,
        max_running: int = 8,
        cost: Callable[[StepPlan], float] = lambda plan: 0.01,
    ) -> None:
        self.layout = simulated_layout(block_size)
        self.blocks = BlockManager(blocks)
        self.runner = SimulatedRunner(self.layout, blocks, VOCABULARY, cost)
        self.scheduler = Scheduler(self.blocks, block_size=block_size, step_tokens=step_tokens, max_running=max_running)
        self.loop = EngineLoop(self.runner, self.scheduler, self.blocks, self)
        self.hasher = BlockHasher(b"key", block_size, "sim")
        self.tokens: dict[AttemptKey, list[Token]] = {}
        self.errors: dict[AttemptKey, PdserveError] = {}
        self.reports: list[StepReport] = []
        self._idle = asyncio.Event()

    def sequence(
        self, name: str | int, prompt: tuple[int, ...], *, max_tokens: int = 8, one_token: bool = False, salt: str = ""
    ) -> Sequence:
        """A greedy sequence without stop rules."""
        sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0)
        output = OutputProcessor(NUMBER_TOKENS, frozenset(), sampling)
        return Sequence(
            key(name),
            prompt,
            sampling,
            output,
            hasher=self.hasher,
            salt=salt,
            block_size=self.layout.block_size,
            one_token=one_token,
        )

    async def run_until_idle(self) -> None:
        """Step until every sequence has left, then audit."""
        async with asyncio.TaskGroup() as tasks:
            stepping = tasks.create_task(self.loop.run())
            while self.loop.busy:
                self._idle.clear()
                await self._idle.wait()
            stepping.cancel()
        self.blocks.check()

    def ids(self, name: str | int) -> list[int]:
        return [token.token_id for token in self.tokens[key(name)]]

    # StepSink

    def admitted(self, sequence: Sequence) -> None:
        """Nothing to do."""

    def delivered(self, advances: list[Advance]) -> None:
        for advance in advances:
            if advance.token is not None:
                self.tokens.setdefault(advance.sequence.key, []).append(advance.token)

    def failed(self, sequence: Sequence, error: PdserveError) -> None:
        self.errors[sequence.key] = error
        self._idle.set()

    def stepped(self, report: StepReport) -> None:
        self.reports.append(report)
        self._idle.set()
