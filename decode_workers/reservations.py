"""Room that a decode worker holds for requests whose KV is on its way.

A reservation is all or nothing: blocks for the prompt, for what was relayed before and for some growth, and a
running slot. It is plain synchronous code without a clock: the attempt's leg has the deadline, the receiver has its
own bounds. It must never give a block back while somebody may still write into it.

    state      blocks belong to              may write      until                       next state
    ARRIVING   Holder(RESERVATION, attempt)  its receiver   Last is verified            commit -> none: they are the
                                                                                        sequence's
                                                            cancel, the request's       leave -> LEAVING
                                                            deadline, silence, damage
                                                            the receiver has ended      release -> none: the pool's
    LEAVING    Holder(RESERVATION, attempt)  its receiver   the receiver has ended      release -> none: the pool's

The receiver is cancelled with `leave`, and its end is a local fact: no peer is waited for.
Every other transition is a fault and asserted: above all, what is LEAVING is never committed.
"""

from dataclasses import dataclass
from enum import Enum

from contracts.errors import Refused
from contracts.kv import BlockHash, blocks_for
from contracts.requests import AttemptKey
from engine.block_manager import BlockManager, Holder, HolderKind


class ReservationState(Enum):
    """See the table."""

    ARRIVING = "arriving"
    LEAVING = "leaving"


@dataclass(slots=True)
class Reservation:
    """`blocks` in order of position; the first `matched` of them hold known content already."""

    key: AttemptKey
    blocks: tuple[int, ...]
    matched: int
    state: ReservationState = ReservationState.ARRIVING


class Reservations:
    """All reservations of one decode worker."""

    def __init__(self, blocks: BlockManager, *, block_size: int, slots: int) -> None:
        self._blocks = blocks
        self._block_size = block_size
        self._slots = slots
        self._held: dict[AttemptKey, Reservation] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._held

    def free_slots(self, sequences: int) -> int:
        """Slots left when the engine has this many sequences."""
        return max(0, self._slots - sequences - len(self._held))

    def reserve(self, key: AttemptKey, tokens: int, hashes: list[BlockHash], *, sequences: int) -> Reservation:
        """Hold a slot and blocks for `tokens` tokens; `hashes` are those of the leading full blocks that may
        be found in the cache. Raises Refused with what is free; nothing is held then."""
        if not self.free_slots(sequences):
            raise Refused(f"all {self._slots} running slots are taken")
        matched = self._blocks.match(hashes)
        fresh = blocks_for(tokens, self._block_size) - len(matched)
        if not self._blocks.can_allocate(matched, fresh):
            raise Refused(f"{fresh} blocks are needed, {self._blocks.available} are free")
        table = self._blocks.allocate(Holder(HolderKind.RESERVATION, key), matched, fresh)
        reservation = self._held[key] = Reservation(key, tuple(table), len(matched))
        return reservation

    def commit(self, key: AttemptKey) -> list[int]:
        """The KV has arrived: the blocks become the sequence's table."""
        assert self._held[key].state is ReservationState.ARRIVING, f"{key} has ended and cannot be committed"
        del self._held[key]
        return self._blocks.transfer(Holder(HolderKind.RESERVATION, key), Holder(HolderKind.SEQUENCE, key))

    def leave(self, key: AttemptKey) -> None:
        """The attempt has ended; its blocks stay until `release`. Idempotent."""
        self._held[key].state = ReservationState.LEAVING

    def release(self, key: AttemptKey) -> None:
        """Give everything back. Only when nothing writes into the blocks any more."""
        del self._held[key]
        self._blocks.release(Holder(HolderKind.RESERVATION, key))

    def keys(self) -> set[AttemptKey]:
        """Attempts that hold a reservation, for the auditor."""
        return set(self._held)
