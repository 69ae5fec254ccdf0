"""The exports of a prefill worker: which blocks must stay for whom, and until when.

The worker calls it as its engine goes on (open, attach, publish, finish, fail, cancel); the exporter calls it
for what pullers say (subscribe, renew, leave). It is plain synchronous code on one event loop, whose clock
and timers it uses. It must never touch a block's bytes, and never wait.

    state     holds                     until (timer)                   next state
    parked    a Pull without an export  park_seconds: PullNotFound      open -> subscribed, if the ticket fits
    OPEN      nothing                   the request's deadline          attach -> FILLING
    FILLING   a pin on all its blocks   its lease, if one runs; else    publish -> FILLING; finish -> READY, or
                                        the deadline                    ended when the token ends the request
    READY     the same pin              its lease                       leave (Ack) -> ended
    ended     a tombstone               newer tombstones push it out    none: what comes is counted and dropped,
                                                                        a Pull is answered Ended or PullGone

    fail, cancel, deadline    every state -> ended, told in band in the same turn
    lease                     FILLING, READY -> ended
    lend                      a Fetch of cached blocks -> READY at once
    leave                     Ack, Abandon or the end of the puller's stream. FILLING, READY -> ended: nobody ever
                              pulls the same attempt again, so nothing is left to wait for. OPEN stays OPEN.
    a further Pull            replaces the one before it, which is told PullGone

The pin is set once, at attach, and unset once, at the end. The puller owns the lease: it starts when there are
blocks and a puller, and only its messages (Pull, Alive) renew it, never beyond the request's deadline. Without a
puller it starts at finish. An open connection proves nothing.
"""

import asyncio
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from contracts.config import TransferConfig
from contracts.errors import Cancelled, DeadlineExceeded, HandoverFailed, PdserveError, PullGone, PullNotFound
from contracts.handover import Ended, Fetch, Pull, PullFailed
from contracts.kv import BlockHash, blocks_for
from contracts.requests import AttemptKey, Token
from kv_transfer.subscription import Export, Subscription


class Pins(Protocol):
    """How an export holds blocks. The worker implements it over the engine's block manager."""

    def pin(self, key: AttemptKey, blocks: Sequence[int]) -> None:
        """The blocks must keep their content until `unpin`."""

    def lend(self, key: AttemptKey, hashes: Sequence[BlockHash]) -> Sequence[int]:
        """Pin the longest run of cached blocks with these content hashes; none, and no pin, when the first one is
        not there."""

    def unpin(self, key: AttemptKey, error: PdserveError | None) -> None:
        """The export has ended, perhaps while its prompt is still being computed: well or by its puller (None), or
        with an error. Called once for each pin."""


@dataclass(frozen=True, slots=True)
class _Tombstone:
    """An attempt that has ended. `ticket` None: it ended before its Submit came."""

    ticket: bytes | None
    answer: Ended | PullFailed


class Exports:
    """All exports of one incarnation by attempt. Every call is idempotent."""

    def __init__(
        self,
        pins: Pins,
        loop: asyncio.AbstractEventLoop,
        *,
        block_size: int,
        config: TransferConfig,
        tombstones: int = 4096,
    ) -> None:
        self._pins = pins
        self._loop = loop
        self._block_size = block_size
        self._config = config
        self._most_tombstones = tombstones
        self._exports: dict[AttemptKey, Export] = {}
        self._parked: dict[AttemptKey, list[Subscription]] = {}
        self._tombstones: OrderedDict[AttemptKey, _Tombstone] = OrderedDict()
        self.dropped = 0  # messages for attempts that had ended

    # What the worker says

    def open(self, key: AttemptKey, ticket: bytes, deadline: float) -> bool:
        """The attempt's Submit has come. `deadline` is in the loop's time. False when the attempt has already
        ended (its cancel came first), or its name is another's: it must not be computed."""
        if key in self._tombstones:
            self.dropped += 1
            return False
        if key not in self._exports:
            timer = self._loop.call_at(deadline, self._expire, key)
            export = self._exports[key] = Export(key, ticket, deadline, timer)
            for subscription in self._parked.pop(key, ()):
                self._join(subscription, export)
        return hmac.compare_digest(self._exports[key].ticket, ticket)

    def attach(self, key: AttemptKey, blocks: Sequence[int]) -> None:
        """All blocks of the prompt are allocated: pin them."""
        export = self._find(key)
        if export is None or export.blocks is not None:
            return
        export.blocks = tuple(blocks)
        self._pins.pin(key, export.blocks)
        if export.subscription is not None:
            self._start_serving(export)

    def publish(self, key: AttemptKey, computed_tokens: int) -> None:
        """The first `computed_tokens` tokens of the prompt are in the blocks; the full ones may be sent."""
        export = self._find(key)
        if export is None:
            return
        self._set_ready(export, computed_tokens, computed_tokens // self._block_size)

    def finish(self, key: AttemptKey, token: Token, kv_tokens: int) -> None:
        """The whole prompt is in the blocks and its first token is drawn: everything may be sent, or nothing is
        left to do when that token ends the request."""
        export = self._find(key)
        if export is None or export.complete:
            return
        if token.finish is not None:
            self._end(export, Ended())
            return
        export.complete, export.token, export.kv_tokens = True, token, kv_tokens
        self._set_ready(export, kv_tokens, blocks_for(kv_tokens, self._block_size))
        if export.subscription is None:
            self._renew(export)

    def fail(self, key: AttemptKey, error: PdserveError) -> None:
        """The attempt ends here, in whatever state it is, even before its Submit."""
        export = self._exports.get(key)
        if export is not None:
            self._end(export, PullFailed(error.info()))
        elif key in self._tombstones:
            self.dropped += 1
        else:
            self._bury(key, None, _gone())
            for subscription in self._parked.pop(key, ()):
                subscription.end(PullFailed(error.info()))

    def cancel(self, key: AttemptKey, reason: str) -> None:
        """The router stops the attempt."""
        self.fail(key, Cancelled(reason))

    # What pullers say, through the exporter

    def subscribe(self, pull: Pull) -> Subscription:
        """A Pull that has passed the handshake. It is served, parked or already over."""
        subscription = Subscription(pull)
        export, tombstone = self._exports.get(pull.key), self._tombstones.get(pull.key)
        if export is not None:
            self._join(subscription, export)
        elif tombstone is None:
            self._parked.setdefault(pull.key, []).append(subscription)
            due = self._loop.time() + self._config.park_seconds
            subscription.timer = self._loop.call_at(due, self._unpark, subscription, _not_found())
        elif tombstone.ticket is not None and not hmac.compare_digest(tombstone.ticket, pull.ticket):
            subscription.end(_not_found())
        else:
            self.dropped += 1
            subscription.end(tombstone.answer)
        return subscription

    def lend(self, fetch: Fetch) -> Subscription:
        """A Fetch that has passed the handshake: an export of what the cache has, or it is over at once."""
        subscription = Subscription(fetch)
        if fetch.key in self._exports or fetch.key in self._tombstones:
            self.dropped += 1
            subscription.end(_gone())
            return subscription
        blocks = self._pins.lend(fetch.key, fetch.hashes)
        if not blocks:
            subscription.end(PullFailed(PullNotFound("no such block is cached here").info()))
            return subscription
        deadline = self._loop.time() + fetch.deadline_ms / 1000
        timer = self._loop.call_at(deadline, self._expire, fetch.key)
        ticket = secrets.token_bytes(16)  # that nobody is told: no Pull may take it over
        export = self._exports[fetch.key] = Export(fetch.key, ticket, deadline, timer, tuple(blocks), complete=True)
        export.subscription, subscription.export = subscription, export
        export.kv_tokens = len(blocks) * self._block_size
        self._renew(export)
        self._set_ready(export, export.kv_tokens, len(blocks))
        return subscription

    def renew(self, subscription: Subscription) -> None:
        """Alive came."""
        export = subscription.export
        if subscription.over.is_set():
            self.dropped += 1
        elif export is not None and export.blocks is not None:
            self._renew(export)

    def leave(self, subscription: Subscription) -> None:
        """The puller acknowledged, abandoned, or its stream ended."""
        if subscription.over.is_set():
            return
        export = subscription.export
        if export is None:
            self._unpark(subscription, None)
            return
        subscription.end(None)
        export.subscription = None
        if export.blocks is not None:
            self._end(export, None)

    def queued_before(self, key: AttemptKey) -> int:
        """Exports that were opened earlier and have no blocks yet."""
        ahead = 0
        for other, export in self._exports.items():
            if other == key:
                break
            ahead += export.blocks is None
        return ahead

    # What observers ask

    def leases(self) -> int:
        """Exports that pin blocks."""
        return sum(export.blocks is not None for export in self._exports.values())

    def pinned_tokens(self) -> int:
        """Tokens of prompts that are computed and wait only for their receiver."""
        return sum(export.kv_tokens for export in self._exports.values())

    def owners(self) -> Mapping[AttemptKey, Sequence[int]]:
        """The pinned blocks by attempt, for the auditor."""
        return {key: export.blocks for key, export in self._exports.items() if export.blocks is not None}

    def check(self) -> None:
        """Raises AssertionError when the book-keeping contradicts itself."""
        assert len(self._tombstones) <= self._most_tombstones
        assert not self._tombstones.keys() & self._exports.keys(), "an attempt has ended and goes on"
        assert not self._parked.keys() & (self._exports.keys() | self._tombstones.keys()), "parked for nothing"
        assert all(self._parked.values())
        for key, export in self._exports.items():
            assert not export.timer.cancelled(), f"{key} has no timer"
            assert export.ready <= len(export.blocks or ()), f"{key} offers blocks that it does not pin"
            assert export.blocks is not None or export.lease_ends is None, f"{key} leases nothing"
            subscription = export.subscription
            assert subscription is None or (subscription.export is export and not subscription.over.is_set())
            assert subscription is not None or not export.complete or export.lease_ends is not None

    # Transitions

    def _find(self, key: AttemptKey) -> Export | None:
        export = self._exports.get(key)
        if export is None:
            self.dropped += 1
        return export

    def _join(self, subscription: Subscription, export: Export) -> None:
        if subscription.timer is not None:
            subscription.timer.cancel()
        assert isinstance(subscription.pull, Pull)
        if not hmac.compare_digest(export.ticket, subscription.pull.ticket):
            subscription.end(_not_found())
            return
        if export.subscription is not None:
            export.subscription.end(PullFailed(PullGone("a newer Pull of the attempt came").info()))
        export.subscription = subscription
        subscription.export = export
        if export.blocks is not None:
            self._start_serving(export)

    def _start_serving(self, export: Export) -> None:
        """There are blocks and a puller: its lease begins."""
        assert export.subscription is not None
        assert export.blocks is not None
        first = export.subscription.first_block
        if not 0 <= first <= len(export.blocks):
            error = HandoverFailed(f"the prompt has {len(export.blocks)} blocks, the Pull starts at block {first}")
            self._end(export, PullFailed(error.info()))
            return
        self._renew(export)
        export.subscription.changed.set()

    def _set_ready(self, export: Export, computed: int, ready: int) -> None:
        if export.blocks is None or ready > len(export.blocks):
            raise ValueError(f"{export.key}: {computed} tokens computed, but its blocks are {export.blocks}")
        export.computed, export.ready = max(export.computed, computed), max(export.ready, ready)
        if export.subscription is not None:
            export.subscription.changed.set()

    def _renew(self, export: Export) -> None:
        export.lease_ends = min(self._loop.time() + self._config.lease_seconds, export.deadline)
        export.timer.cancel()
        export.timer = self._loop.call_at(export.lease_ends, self._expire, export.key)

    def _expire(self, key: AttemptKey) -> None:
        export = self._exports[key]
        error: PdserveError = PullGone("the lease of the export ended")
        if export.lease_ends in (None, export.deadline):
            error = DeadlineExceeded("the request's deadline passed during the hand-over")
        self._end(export, PullFailed(error.info()))

    def _unpark(self, subscription: Subscription, final: PullFailed | None) -> None:
        key = subscription.pull.key
        self._parked[key].remove(subscription)
        if not self._parked[key]:
            del self._parked[key]
        subscription.end(final)

    def _end(self, export: Export, final: Ended | PullFailed | None) -> None:
        del self._exports[export.key]
        export.timer.cancel()
        self._bury(export.key, export.ticket, final if isinstance(final, Ended) else _gone())
        if export.subscription is not None:
            export.subscription.end(final)
        if export.blocks is not None:
            self._pins.unpin(export.key, final.error.to_error() if isinstance(final, PullFailed) else None)

    def _bury(self, key: AttemptKey, ticket: bytes | None, answer: Ended | PullFailed) -> None:
        self._tombstones[key] = _Tombstone(ticket, answer)
        while len(self._tombstones) > self._most_tombstones:
            self._tombstones.popitem(last=False)


def _not_found() -> PullFailed:
    """The same words for every refusal, so that a stranger learns nothing."""
    return PullFailed(PullNotFound("no such attempt").info())


def _gone() -> PullFailed:
    return PullFailed(PullGone("the attempt has ended").info())
