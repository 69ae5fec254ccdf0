"""Room that a decode worker holds for requests whose KV is on its way.

A reservation is all or nothing: blocks for the prompt, for what was relayed before and for some growth, and
a running slot. The receiver of the hand-over is the only writer of its blocks. Plain synchronous code.

    state      owner of the blocks             ends by
    reserved   Holder(RESERVATION, attempt)    commit  -> the sequence owns them (Holder(SEQUENCE, attempt))
                                               release -> the pool has them back, after the receiver has ended
"""

from dataclasses import dataclass

from contracts.errors import Refused
from contracts.kv import BlockHash, blocks_for
from contracts.requests import AttemptKey
from engine.block_manager import BlockManager, Holder, HolderKind


@dataclass(frozen=True, slots=True)
class Reservation:
    """`blocks` in order of position; the first `matched` of them hold known content already."""

    key: AttemptKey
    blocks: tuple[int, ...]
    matched: int


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
        del self._held[key]
        return self._blocks.transfer(Holder(HolderKind.RESERVATION, key), Holder(HolderKind.SEQUENCE, key))

    def release(self, key: AttemptKey) -> None:
        """Give everything back. Only when nothing writes into the blocks any more."""
        del self._held[key]
        self._blocks.release(Holder(HolderKind.RESERVATION, key))

    def keys(self) -> set[AttemptKey]:
        """Attempts that hold a reservation, for the auditor."""
        return set(self._held)
