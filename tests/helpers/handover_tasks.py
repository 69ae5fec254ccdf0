"""A machine over both ends of hand-overs as they are: the real Exporter and Receiver over memory links, in virtual
time, with a transport and streams that can be disturbed at any moment.

handover_model.py explores more orders of events; this one runs the code that serves.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from contracts.errors import PdserveError, Refused
from contracts.handover import ExporterMessage, Pull, PullerMessage
from contracts.kv import BlockStore
from contracts.requests import AttemptKey
from contracts.session import Source
from kv_transfer.channels.inline import InlineEnd, InlineTransport
from kv_transfer.exporter import Exporter
from kv_transfer.offer import Offer
from kv_transfer.orders import ReceiveOrder
from kv_transfer.peer import OpenInlet, Puller
from kv_transfer.receiver import Receiver
from kv_transfer.subscription import Subscription
from kv_transfer.transports.base import Packed
from protos.links import memory
from protos.links.base import Duplex, LinkClosed
from protos.memory_network import MemoryNetwork
from simulator.virtual_time import VirtualTimeLoop
from telemetry.tracing import NoTracing
from tests.helpers.bent_transport import bent
from tests.helpers.handover import LAYOUT, SECRET, PullHandler, settle
from tests.helpers.handover_router import ATTEMPTS, BACK, FATES, Router
from tests.helpers.handover_workers import LIMITS, Attempt, Life, Room

DISTURBANCES = ("corrupt", "slow pack", "slow write", "lost", "twice", "late", "unheard")
KINDS = st.sampled_from([*DISTURBANCES, *["slow write"] * 3, *[""] * 8])
SLOW_TURNS = 40
STEPS = st.integers(0, 6)
TURNS = st.integers(0, 12)
"""Turns of the loop that pass before anything else happens: everything stands in the middle of something then."""


class HandoverTasks(RuleBasedStateMachine):
    """A router, the lives of a prefill worker at "p", a decode worker. `armed`: disturbances that wait for the next
    occasion."""

    def __init__(self, reached: Counter[str] | None = None) -> None:
        super().__init__()
        self.loop = VirtualTimeLoop()
        self.loop.set_exception_handler(
            lambda _, context: self.faults.append(context.get("exception") or RuntimeError(context["message"]))
        )
        self.reached = Counter[str]() if reached is None else reached
        self.armed: Counter[str] = Counter()
        self.faults: list[BaseException] = []  # raised where nobody awaits
        self.network = MemoryNetwork()
        self.lives: list[Life] = []
        self.room = Room(self.reached)
        self.router = Router(self, self.loop)
        self.tasks: dict[AttemptKey, asyncio.Task[None]] = {}
        transport = self.transport(self.room.store)
        puller = Puller(
            link=memory.create(self.network),
            store=self.room.store,
            transports={"memory": transport},
            config=LIMITS,
            worker_id="d",
            secret=SECRET,
            measured=lambda _, rate: None,
        )

        async def inlet(source: Source) -> OpenInlet:
            end = await (await transport.connect("")).inlet()
            return OpenInlet("memory", end, 0.0, lambda: None)

        self.receiver = Receiver(puller, inlet)
        self.begin_life()

    @property
    def life(self) -> Life:
        return self.lives[-1]

    # The router

    @rule(attempt=ATTEMPTS, kind=KINDS, steps=STEPS, turns=TURNS)
    def start(self, attempt: dict[str, Any], kind: str, steps: int, turns: int) -> None:
        self.router.start(**attempt)
        self.armed[kind] += 1
        self.go_on(steps, turns)

    @precondition(lambda self: self.router.posts)
    @rule(data=st.data(), fate=FATES, turns=TURNS)
    def post(self, data: st.DataObject, fate: str, turns: int) -> None:
        self.router.deliver(data.draw(st.integers(0, len(self.router.posts) - 1)), fate)
        self.pass_turns(turns)

    @precondition(lambda self: self.router.attempts)
    @rule(back=BACK, prefill=st.booleans(), decode=st.booleans(), at_once=st.booleans(), turns=TURNS)
    def cancel(self, back: int, prefill: bool, decode: bool, at_once: bool, turns: int) -> None:
        self.router.cancel(back, prefill=prefill, decode=decode, at_once=at_once)
        self.pass_turns(turns)

    @precondition(lambda self: self.router.attempts)
    @rule(back=BACK)
    def place_prefill_again(self, back: int) -> None:
        self.router.place_prefill_again(back)

    # The workers

    @rule(what=st.sampled_from(["stop", "go on", "go on", "restart"]))
    def upset(self, what: str) -> None:
        """The prefill worker stands still, or goes on, or begins a new life."""
        if what == "stop":
            self.network.freeze("p")
        elif what == "go on":
            self.network.thaw("p")
        else:
            self.network.kill("p")
            self.begin_life()

    # Time, and what goes well

    @rule(seconds=st.sampled_from([0.1, 0.5, 2.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    @rule(steps=STEPS, turns=TURNS)
    def proceed(self, steps: int, turns: int) -> None:
        self.go_on(steps, turns)

    # What must hold

    @invariant()
    def both_workers_are_sound(self) -> None:
        self.room.check()
        self.life.check()
        if self.faults:
            raise self.faults[0]

    def teardown(self) -> None:
        """Whatever was lost, everything ends by itself, and no task stays."""
        self.router.posts.clear()
        try:
            if sys.exc_info()[1] is not None:
                return  # it has failed already
            self.network.thaw("p")
            self.loop.run_until_complete(asyncio.sleep(3600))
            for key in list(self.room.running):
                self.room.end(key)
            self.both_workers_are_sound()
            for life in self.lives:
                life.check_idle()
            self.room.check_idle()
            assert not asyncio.all_tasks(self.loop), "a task never ends"
        finally:
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.pass_turns(20)
            self.loop.close()

    # The prefill worker

    def begin_life(self) -> None:
        life = Life(len(self.lives) + 1, self.loop, self.reached)
        self.lives.append(life)
        subscribe = life.exports.subscribe

        def watched(pull: Pull) -> Subscription:
            subscription = subscribe(pull)
            life.subscribed(subscription)
            return subscription

        life.exports.subscribe = watched  # type: ignore[method-assign]  # the machine looks on
        offer = Offer(life.handshake, life.store, {"memory": self.transport(life.store)})
        exporter = Exporter(life.exports, life.handshake, life.store, offer, config=LIMITS, tracing=NoTracing())

        async def serve(stream: Duplex[ExporterMessage, PullerMessage]) -> None:
            try:
                await exporter.serve(_Disturbed(stream, self))
            except LinkClosed:
                raise
            except Exception as fault:
                self.faults.append(fault)
                raise

        self.loop.run_until_complete(memory.create(self.network).serve("p", PullHandler(serve)))

    def go_on(self, steps: int, turns: int) -> None:
        for _ in range(steps):
            if self.router.posts:
                self.router.deliver(0)
            self.life.admit()
            for key in list(self.life.computed):
                if key in self.life.computed:
                    self.life.step(key)
            self.pass_turns(turns)

    def pass_turns(self, turns: int) -> None:
        self.loop.run_until_complete(settle(turns))

    # The decode worker

    def reserve(self, attempt: Attempt) -> None:
        key = attempt.key
        if key in self.tasks or key in self.room.running or attempt.deadline <= self.loop.time():
            return
        try:
            blocks = self.room.reserve(attempt)
        except Refused:
            self.router.refused(key)
            return
        order = ReceiveOrder(
            key=key,
            ticket=attempt.shown,
            source=Source("prefill-0", "p", attempt.incarnation),
            blocks=blocks,
            first_block=0,
            kv_tokens=attempt.tokens,
            traceparent="",
            deadline=attempt.deadline,
        )
        task = self.tasks[key] = self.loop.create_task(self.receive(attempt, order))
        task.add_done_callback(lambda done: self.received(key, done))

    async def receive(self, attempt: Attempt, order: ReceiveOrder) -> None:
        try:
            await self.receiver.receive(order, lambda _: self.room.commit(attempt))
        except PdserveError as error:
            self.reached[error.code] += 1

    def received(self, key: AttemptKey, done: asyncio.Task[None]) -> None:
        del self.tasks[key]
        self.room.received(key)
        fault = None if done.cancelled() else done.exception()
        if fault is not None:
            self.faults.append(fault)

    def cancel_decode(self, key: AttemptKey) -> None:
        if key in self.tasks:
            self.room.leave(key)
            self.tasks[key].cancel()
        if key in self.room.running:
            self.room.end(key)

    # Disturbances

    def due(self, kind: str) -> bool:
        """Whether this disturbance shall happen; it happens once."""
        if not self.armed[kind]:
            return False
        self.armed[kind] -= 1
        self.reached[kind] += 1
        return True

    def transport(self, store: BlockStore) -> InlineTransport:
        return bent(lambda store: _DisturbedEnd(store, self))(store)


class _DisturbedEnd(InlineEnd):
    """A transport that takes its time and damages bytes."""

    def __init__(self, store: BlockStore, machine: HandoverTasks) -> None:
        super().__init__(store)
        self._machine = machine

    async def pack(self, blocks: Sequence[int]) -> Packed:
        if self._machine.due("slow pack"):
            await settle(SLOW_TURNS)
        packed = await super().pack(blocks)
        if not self._machine.due("corrupt"):
            return packed
        return Packed(bytes([packed.payload[0] ^ 1]) + packed.payload[1:], packed.checksums)

    async def accept(self, payload: bytes | memoryview, blocks: Sequence[int]) -> tuple[int, ...]:
        if self._machine.due("slow write"):
            half = LAYOUT.block_bytes // 2
            self._store.writable(blocks[0])[:half] = payload[:half]
            await settle(SLOW_TURNS)
        return await super().accept(payload, blocks)


class _Disturbed:
    """An exporter's stream on which messages are lost, come twice or too late."""

    def __init__(self, stream: Duplex[ExporterMessage, PullerMessage], machine: HandoverTasks) -> None:
        self._stream = stream
        self._machine = machine
        self._held: list[ExporterMessage] = []

    async def send(self, message: ExporterMessage) -> None:
        if self._machine.due("lost"):
            return
        if self._machine.due("late"):
            self._held.append(message)
            return
        await self._stream.send(message)
        if self._machine.due("twice"):
            await self._stream.send(message)
        while self._held:
            await self._stream.send(self._held.pop())

    async def receive(self) -> PullerMessage | None:
        message = await self._stream.receive()
        if message is not None and self._machine.due("unheard"):
            message = await self._stream.receive()
        return message

    async def close(self) -> None:
        await self._stream.close()
