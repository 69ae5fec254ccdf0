"""Stands between an engine and its runner: holds its steps, or makes one fail."""

import asyncio

from cluster.local import LocalCluster
from engine.runners.base import StepPlan, StepResult


class Steps:
    """The steps of one worker from here on. `hold`: so many pass, those that follow wait for `open`. `fail`: this
    one (from 1) raises. `held` is set while one waits."""

    def __init__(
        self, cluster: LocalCluster, worker_id: str, *, hold: int | None = None, fail: int | None = None
    ) -> None:
        runner = cluster.workers[worker_id].core.runner
        self._run = runner.run
        self._hold = hold
        self._fail = fail
        self._open = asyncio.Event()
        self.count = 0
        self.held = asyncio.Event()
        runner.run = self.run  # type: ignore[method-assign]  # the point of it

    def open(self) -> None:
        """Let every step go."""
        self._open.set()
        self.held.clear()

    async def run(self, plan: StepPlan) -> StepResult:
        """Runner.run."""
        if self._hold is not None and self.count >= self._hold and not self._open.is_set():
            self.held.set()
            await self._open.wait()
        self.count += 1
        if self.count == self._fail:
            raise MemoryError("no memory for this step")
        return await self._run(plan)
