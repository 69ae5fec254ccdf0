"""The router under a storm: refusals, cancels, broken hand-overs and killed workers of unequal size, from
printed seeds."""

import asyncio
import random

import pytest

from contracts.errors import PdserveError, PeerSilent, Refused, WorkerLost
from contracts.requests import FinishReason
from contracts.session import Reserved, Submit, Tokens
from contracts.workers import Role
from protos.links.base import LinkClosed
from tests.helpers.router_rig import FakeWorker, idle, request, rig, token, virtual

WORKERS = (
    ("p0", Role.PREFILL, {"blocks": 4}),
    ("p1", Role.PREFILL, {"blocks": 8}),
    ("d0", Role.DECODE, {"blocks": 4}),
    ("d1", Role.DECODE, {"blocks": 8}),
)


class Storm:
    """Answers for all workers at random: each leg is a task that takes its time and may go wrong."""

    def __init__(self, seed: int, tasks: asyncio.TaskGroup) -> None:
        self.random = random.Random(seed)
        self._tasks = tasks

    def serve(self, worker: FakeWorker) -> asyncio.Task[None]:
        return self._tasks.create_task(self._serve(worker))

    async def _serve(self, worker: FakeWorker) -> None:
        while True:
            submit = await worker.submits.get()
            tokens = len(submit.prompt_ids) + len(submit.relayed)
            if worker.info.role is Role.DECODE:
                tokens = len(submit.prompt_ids) + submit.sampling.max_tokens
            assert tokens <= 16 * worker.capacity.blocks, "it can never hold that"
            self._tasks.create_task(self._leg(worker, submit))

    async def _leg(self, worker: FakeWorker, submit: Submit) -> None:
        try:
            if worker.info.role is Role.PREFILL:
                await self._prefill(worker, submit)
            else:
                await self._decode(worker, submit)
        except LinkClosed:
            return  # the worker was killed

    async def _prefill(self, worker: FakeWorker, submit: Submit) -> None:
        await asyncio.sleep(self.random.random() * 0.2)
        if self.random.random() < 0.1:
            await worker.failed(submit.key, Refused("backlog"))
            return
        position = len(submit.relayed) + 1
        last = position == submit.sampling.max_tokens
        await worker.tokens(submit.key, token(position, FinishReason.LENGTH if last else None))

    async def _decode(self, worker: FakeWorker, submit: Submit) -> None:
        await asyncio.sleep(self.random.random() * 0.05)
        if self.random.random() < 0.2:
            await worker.failed(submit.key, Refused("no blocks"))
            return
        await worker.say(Reserved(submit.key))
        for position in range(len(submit.relayed) + 1, submit.sampling.max_tokens + 1):
            await asyncio.sleep(self.random.random() * 0.1)
            if self.random.random() < 0.02:
                await worker.failed(submit.key, PeerSilent("prefill said nothing"))
                return
            last = position == submit.sampling.max_tokens
            await worker.say(Tokens(submit.key, (token(position, FinishReason.LENGTH if last else None),)))


@pytest.mark.parametrize("seed", range(12))
@virtual
async def test_every_request_ends_whole_or_with_an_error_and_the_books_are_empty(seed: int) -> None:
    spec = [(name, role, {"slots": 3, "backlog_tokens": 60} | pool) for name, role, pool in WORKERS]
    async with rig(*spec) as (router, workers), asyncio.TaskGroup() as tasks:
        storm = Storm(seed, tasks)
        serving = {name: storm.serve(worker) for name, worker in workers.items()}
        calls = []
        for number in range(80):
            calls.append(
                router.ask(request(prompt=storm.random.randint(1, 90), max_tokens=storm.random.randint(1, 12)))
            )
            await asyncio.sleep(storm.random.random() * 0.1)
            router.service.check()
            if storm.random.random() < 0.2:
                storm.random.choice(calls).task.cancel()
            if number % 20 == 19:
                victim = workers[storm.random.choice(sorted(workers))]
                victim.kill()
                await asyncio.sleep(storm.random.random())
                await victim.come_back()
                router.registry.put(victim.info)
                await idle()  # its session is open
        await asyncio.wait([call.task for call in calls], timeout=60)
        for call in calls:
            assert call.task.done()
            assert call.positions == list(range(1, len(call.positions) + 1)), "a token is lost or repeated"
            if call.task.cancelled():
                continue
            error = call.task.exception()
            if error is None:
                assert call.outputs[-1].tokens[-1].finish is FinishReason.LENGTH
            else:  # what a killed worker or a broken hand-over leaves, when no other place was found in time
                assert isinstance(error, PdserveError)
                assert error.code in (WorkerLost.code, PeerSilent.code)
        finished = sum(not call.task.cancelled() and call.task.exception() is None for call in calls)
        assert finished >= 30
        for task in serving.values():
            task.cancel()
