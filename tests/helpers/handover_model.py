"""A machine over both ends of hand-overs, in which exporter, receiver and network are models: every message can be
late, lost or come twice, and every end can come between any two of them.

The models do what kv_transfer/exporter.py and receiver.py do, one step at a time; the decisions under them are the
product's. handover_tasks.py has the real ones.
"""

import asyncio
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from contracts.errors import HandoverFailed, Refused
from contracts.handover import Abandon, Ack, Alive, Chunk, ExporterMessage, Last, Pull, PullerMessage, PullFailed
from contracts.requests import AttemptKey
from kv_transfer.frames import checksum, digest
from kv_transfer.subscription import Subscription
from simulator.virtual_time import VirtualTimeLoop
from tests.helpers.handover import pull
from tests.helpers.handover_router import ATTEMPTS, BACK, FATES, Router
from tests.helpers.handover_workers import Attempt, Life, Room

MessageT = TypeVar("MessageT")

EVENTS = st.integers(0, 40)
"""Events after which something else happens: everything stands in the middle of something then."""


@dataclass(slots=True, eq=False)
class Stream:
    """One Pull's two queues; None is their end. `shared`: a Chunk names the exporter's block, which the puller reads
    when it takes the Chunk, instead of carrying its bytes."""

    shared: bool
    to_exporter: deque[PullerMessage | None] = field(default_factory=deque)
    to_puller: deque[ExporterMessage | None] = field(default_factory=deque)
    life: Life | None = None  # the one that answers
    subscription: Subscription | None = None
    sums: list[int] = field(default_factory=list)
    sent_all: bool = False
    over: bool = False  # the exporter has ended it, or it broke


@dataclass(slots=True, eq=False)
class Receive:
    """A receiver. `write`: what it is about to write, where, and the checksum that it must have; only then it looks
    at the next message. `ending`: it does not go on."""

    attempt: Attempt
    blocks: tuple[int, ...]
    stream: Stream
    sums: list[int] = field(default_factory=list)
    write: tuple[int, bytes, int] | None = None
    ending: bool = False


class HandoverModel(RuleBasedStateMachine):
    """A router, the lives of a prefill worker, a decode worker."""

    def __init__(self, reached: Counter[str] | None = None) -> None:
        super().__init__()
        self.loop = VirtualTimeLoop()
        self.reached = Counter[str]() if reached is None else reached
        self.lives = [Life(1, self.loop, self.reached)]
        self.room = Room(self.reached)
        self.router = Router(self, self.loop)
        self.streams: list[Stream] = []  # those that the exporter has not ended
        self.receives: dict[AttemptKey, Receive] = {}
        self.stopped = False
        self.course = self.natural_course()

    @property
    def life(self) -> Life:
        return self.lives[-1]

    # The router

    @rule(attempt=ATTEMPTS, events=EVENTS)
    def start(self, attempt: dict[str, Any], events: int) -> None:
        self.router.start(**attempt)
        self.go_on(events)

    @precondition(lambda self: self.router.attempts)
    @rule(back=BACK, prefill=st.booleans(), decode=st.booleans(), at_once=st.booleans(), events=EVENTS)
    def cancel(self, back: int, prefill: bool, decode: bool, at_once: bool, events: int) -> None:
        self.router.cancel(back, prefill=prefill, decode=decode, at_once=at_once)
        self.go_on(events)

    @precondition(lambda self: self.router.attempts)
    @rule(back=BACK)
    def place_prefill_again(self, back: int) -> None:
        self.router.place_prefill_again(back)

    @rule(what=st.sampled_from(["stop", "stop", "go on", "restart"]))
    def upset(self, what: str) -> None:
        """The decode worker takes nothing by itself, or goes on; or the prefill worker's life ends: all that is under
        way between the two is lost then, except a Pull that was not sent yet."""
        self.stopped = what == "stop"
        if what == "restart":
            for stream in list(self.streams):
                if stream.life is not None:
                    self.break_off(stream)
            self.lives.append(Life(self.life.incarnation + 1, self.loop, self.reached))

    @precondition(lambda self: self.receives)
    @rule(data=st.data(), alive=st.booleans())
    def speak(self, data: st.DataObject, alive: bool) -> None:
        receive = data.draw(st.sampled_from(list(self.receives.values())))
        if alive and not receive.ending:
            receive.stream.to_exporter.append(Alive())
        else:
            self.leave(receive, Abandon("silence"))

    # Time, and what goes well

    @rule(seconds=st.sampled_from([0.4, 1.0, 2.0]))
    def wait(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    @rule(events=EVENTS)
    def proceed(self, events: int) -> None:
        self.go_on(events)

    def go_on(self, events: int) -> None:
        """Everybody in turn does what comes next, and every message arrives: so many of these."""
        for _ in range(events):
            next(self.course)()

    @rule(data=st.data(), fate=FATES)
    def out_of_turn(self, data: st.DataObject, fate: str) -> None:
        events = self.events(fate)
        events[data.draw(st.integers(0, len(events) - 1))]()

    def natural_course(self) -> Iterator[Callable[[], None]]:
        while True:
            yield from self.events("arrives")

    def events(self, fate: str) -> list[Callable[[], None]]:
        """What can happen next anywhere; `fate` is that of the message, if it is one that arrives."""
        events: list[Callable[[], None]] = [self.life.admit]
        if self.router.posts:
            events.append(partial(self.router.deliver, 0, fate))
        events += [partial(self.step, key) for key in self.life.computed]
        for stream in self.streams:
            events.append(partial(self.say_next, stream))
            if stream.to_exporter and not stream.over:
                events.append(partial(self.deliver_to_exporter, stream, fate))
        if not self.stopped:
            for receive in self.receives.values():
                events.append(partial(self.land, receive))
                if receive.stream.to_puller:
                    events.append(partial(self.deliver_to_puller, receive, fate))
        return events

    # What must hold

    @invariant()
    def both_workers_are_sound(self) -> None:
        self.life.check()
        self.room.check()

    def teardown(self) -> None:
        """Whatever was lost, everything ends by itself."""
        self.router.posts.clear()
        try:
            if sys.exc_info()[1] is not None:
                return  # it has failed already
            self.loop.run_until_complete(asyncio.sleep(3600))
            for receive in list(self.receives.values()):
                self.land(receive)
            for key in list(self.room.running):
                self.room.end(key)
            for life in self.lives:
                life.check_idle()
            self.room.check_idle()
        finally:
            self.loop.close()

    # The exporter

    def step(self, key: AttemptKey) -> None:
        if key in self.life.computed:
            self.life.step(key)

    def hear(self, stream: Stream, message: PullerMessage | None) -> None:
        if stream.life is None and isinstance(message, Pull):
            stream.life = life = self.life
            try:
                life.handshake.check(message)
            except HandoverFailed as refused:
                self.reached[refused.code] += 1
                stream.to_puller.append(PullFailed(refused.info()))
                self.hang_up(stream)
                return
            stream.subscription = life.exports.subscribe(message)
            life.subscribed(stream.subscription)
        elif stream.subscription is None:
            self.hang_up(stream)
        elif isinstance(message, Alive):
            self.life_of(stream).exports.renew(stream.subscription)
        else:
            self.life_of(stream).exports.leave(stream.subscription)

    def say_next(self, stream: Stream) -> None:
        subscription = stream.subscription
        if subscription is None or stream.over:
            return
        if subscription.over.is_set():
            if subscription.final is not None:
                stream.to_puller.append(subscription.final)
            self.hang_up(stream)
            return
        export = subscription.export
        if export is None or export.blocks is None:
            return
        following = len(stream.sums)
        if following < export.ready:
            block = export.blocks[following]
            data = bytes(self.life_of(stream).store.read(block))
            stream.sums.append(checksum(data))
            payload = bytes([block]) if stream.shared else data
            stream.to_puller.append(Chunk(following, 1, (stream.sums[-1],), payload))
        elif export.complete and not stream.sent_all:
            stream.sent_all = True
            stream.to_puller.append(Last(export.token, export.kv_tokens, export.ready, digest(stream.sums)))

    def hang_up(self, stream: Stream) -> None:
        stream.over = True
        self.streams.remove(stream)
        stream.to_puller.append(None)

    def life_of(self, stream: Stream) -> Life:
        assert stream.life is not None
        return stream.life

    # The streams

    def deliver_to_exporter(self, stream: Stream, fate: str) -> None:
        if stream.to_exporter and not stream.over:
            message = _next(stream.to_exporter, fate)
            if fate != "lost":
                self.hear(stream, message)

    def deliver_to_puller(self, receive: Receive, fate: str) -> None:
        if receive.stream.to_puller and receive.write is None and not receive.ending:
            message = _next(receive.stream.to_puller, fate)
            if fate != "lost":
                self.take(receive, message)

    def break_off(self, stream: Stream) -> None:
        stream.to_exporter.clear()
        stream.to_puller.clear()
        self.hang_up(stream)
        if stream.subscription is not None:
            self.life_of(stream).exports.leave(stream.subscription)

    # The receiver

    def reserve(self, attempt: Attempt) -> None:
        key = attempt.key
        if key in self.receives or key in self.room.running or attempt.deadline <= self.loop.time():
            return
        try:
            blocks = self.room.reserve(attempt)
        except Refused:
            self.router.refused(key)
            return
        stream = Stream(shared=attempt.tokens % 2 == 0)
        stream.to_exporter.append(pull(key, ticket=attempt.shown, incarnation=attempt.incarnation))
        self.streams.append(stream)
        receive = self.receives[key] = Receive(attempt, blocks, stream)
        self.loop.call_at(attempt.deadline, self.leave, receive, Abandon("deadline"))

    def cancel_decode(self, key: AttemptKey) -> None:
        if key in self.receives:
            self.leave(self.receives[key], Abandon("cancelled"))
        elif key in self.room.running:
            self.room.end(key)

    def take(self, receive: Receive, message: ExporterMessage | None) -> None:
        following = len(receive.sums)
        match message:
            case Chunk() if message.first_block == following < len(receive.blocks):
                data = bytes(message.payload)
                if receive.stream.shared:
                    data = bytes(self.life_of(receive.stream).store.read(data[0]))
                receive.write = (receive.blocks[following], data, message.checksums[0])
            case Last() if following == len(receive.blocks) and message.digest == digest(receive.sums):
                self.room.commit(receive.attempt)
                self.leave(receive, Ack())
            case PullFailed(error):
                self.reached[error.code] += 1
                self.leave(receive, Abandon("refused"))
            case _:
                self.leave(receive, Abandon("corrupt, or ended"))

    def land(self, receive: Receive) -> None:
        """The write that it is at ends; only a receive that writes no more has ended."""
        if receive.write is None:
            return
        block, data, expected = receive.write
        receive.write = None
        self.room.store.writable(block)[:] = data
        if receive.ending:
            self.reached["cancelled while it wrote"] += 1
            self.ended(receive)
        elif checksum(self.room.store.read(block)) == expected:
            receive.sums.append(expected)
        else:
            self.reached["read what another wrote"] += 1
            self.leave(receive, Abandon("corrupt"))

    def leave(self, receive: Receive, message: Ack | Abandon) -> None:
        if receive.ending or self.receives.get(receive.attempt.key) is not receive:
            return
        receive.stream.to_exporter += (message, None)
        self.room.leave(receive.attempt.key)
        receive.ending = True
        if receive.write is None:
            self.ended(receive)

    def ended(self, receive: Receive) -> None:
        del self.receives[receive.attempt.key]
        self.room.received(receive.attempt.key)


def _next(queue: deque[MessageT], fate: str) -> MessageT:
    """One that comes twice is still the next one afterwards."""
    return queue[0] if fate == "twice" else queue.popleft()
