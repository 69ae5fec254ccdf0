"""Workers as others see them: who they are, what they can hold, how loaded they are."""

from dataclasses import dataclass
from enum import Enum

from contracts.kv import KvLayout


class Role(Enum):
    """What a process does. An aggregated worker is a decode worker whose requests have no source."""

    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"


class WorkerState(Enum):
    """READY takes new requests; DRAINING finishes what it has."""

    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A process as it registers. `incarnation` is its start time in ns, compared for equality only;
    `address` is what a link can connect to ("host:port", or a name for memory links)."""

    id: str
    role: Role
    address: str
    incarnation: int
    pid: int
    state: WorkerState = WorkerState.READY


@dataclass(frozen=True, slots=True)
class WorkerCapacity:
    """Fixed limits of a worker: usable KV blocks, sequences at once, prompt tokens it may hold queued."""

    blocks: int
    slots: int
    backlog_tokens: int
    max_context: int
    layout: KvLayout


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What a worker has free for new work at this moment; rides on every frame.

    `free_blocks` and `free_slots` are what a new reservation could take (0 while a preempted sequence
    waits for blocks). `backlog_tokens`: prompt tokens not yet computed, plus those pinned by exports
    whose receiver is slow. `stuck`: it holds work and has made no progress for limits.stuck_seconds.
    `draining`: it takes nothing new. `linked` False: no worker's KV can reach it, so nothing can be decoded there.
    """

    free_blocks: int
    free_slots: int
    backlog_tokens: int
    running: int
    waiting: int
    stuck: bool = False
    draining: bool = False
    linked: bool = True


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Each block counted once, in the first state that fits; the sum is the pool."""

    used: int
    pinned: int
    reserved: int
    cached: int
    free: int

    @property
    def total(self) -> int:
        return self.used + self.pinned + self.reserved + self.cached + self.free
