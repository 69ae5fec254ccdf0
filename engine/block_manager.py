"""Who holds which block of the pool, and which blocks hold known content.

The scheduler, the exports and the reservations of a worker share one BlockManager. It decides only: it
never touches the memory, imports no torch and has no clock. Every block is in exactly one place: held (by
one or more holders), cached (no holder, content hash known, may be evicted), or free.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from contracts.kv import BlockHash
from contracts.requests import AttemptKey
from contracts.workers import BlockCounts


class HolderKind(Enum):
    """What holds a block. A block with several holders counts in the first kind, in this order."""

    SEQUENCE = "used"
    EXPORT = "pinned"
    RESERVATION = "reserved"


@dataclass(frozen=True, slots=True)
class Holder:
    """One reference to each block of one table."""

    kind: HolderKind
    key: AttemptKey


class NoFreeBlocks(Exception):
    """More blocks were asked for than `available`; nothing was allocated."""


class AuditFailed(Exception):
    """The book-keeping contradicts itself; the message lists every contradiction."""


class BlockManager:
    """Allocation, prefix cache and reference counts of `blocks` blocks.

    Cached blocks are evicted least recently used first, the end of a prefix before its beginning (a prefix
    is only useful from its start).
    """

    def __init__(self, blocks: int) -> None:
        self.total = blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * blocks
        self._tables: dict[Holder, list[int]] = {}
        self._hash_of: dict[int, BlockHash] = {}
        self._block_of: dict[BlockHash, int] = {}

    @property
    def available(self) -> int:
        """Blocks that an allocation can take: free ones and cached ones without a holder."""
        return len(self._free) + len(self._cached)

    def match(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Blocks that hold the longest known prefix of `hashes`, in order."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def can_allocate(self, matched: Sequence[int], fresh: int) -> bool:
        """Whether `allocate` with the same arguments would succeed."""
        return fresh <= self.available - sum(self._references[block] == 0 for block in matched)

    def allocate(self, holder: Holder, matched: Sequence[int], fresh: int) -> list[int]:
        """A new table for `holder`: the matched blocks, then `fresh` new ones. Raises NoFreeBlocks."""
        if holder in self._tables:
            raise ValueError(f"{holder} has a table already")
        if not self.can_allocate(matched, fresh):
            raise NoFreeBlocks
        for block in matched:
            self._take(block)
        self._tables[holder] = [*matched, *(self._take_fresh() for _ in range(fresh))]
        return self._tables[holder]

    def extend(self, holder: Holder, fresh: int) -> list[int]:
        """Append `fresh` new blocks to the holder's table and return them. Raises NoFreeBlocks."""
        if fresh > self.available:
            raise NoFreeBlocks
        added = [self._take_fresh() for _ in range(fresh)]
        self._tables[holder].extend(added)
        return added

    def share(self, holder: Holder, blocks: Sequence[int]) -> None:
        """A further holder for blocks that are held already."""
        if holder in self._tables:
            raise ValueError(f"{holder} has a table already")
        if not all(self._references[block] for block in blocks):
            raise ValueError("only held blocks can be shared")
        for block in blocks:
            self._references[block] += 1
        self._tables[holder] = list(blocks)

    def transfer(self, old: Holder, new: Holder) -> list[int]:
        """The table of `old` becomes the table of `new`."""
        if new in self._tables:
            raise ValueError(f"{new} has a table already")
        self._tables[new] = self._tables.pop(old)
        return self._tables[new]

    def release(self, holder: Holder) -> None:
        """Drop the holder's references. Blocks without a holder become cached (hash known) or free."""
        for block in reversed(self._tables.pop(holder)):
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._hash_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    def seal(self, block: int, block_hash: BlockHash) -> None:
        """The held block is full and its content has this hash: from here on others may match it. When
        another block already stands for the hash, that one stays and this one remains private."""
        if not self._references[block]:
            raise ValueError(f"block {block} has no holder")
        if block_hash not in self._block_of and block not in self._hash_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def forget(self, holder: Holder) -> None:
        """The content of the holder's blocks is not to be trusted: nobody may match it any more."""
        for block in self._tables[holder]:
            block_hash = self._hash_of.pop(block, None)
            if block_hash is not None:
                del self._block_of[block_hash]

    def holders(self) -> dict[Holder, tuple[int, ...]]:
        """All tables, for the auditor."""
        return {holder: tuple(table) for holder, table in self._tables.items()}

    def counts(self) -> BlockCounts:
        """Each block once, in the first state that fits."""
        seen: set[int] = set()
        held: dict[HolderKind, int] = {}
        for kind in HolderKind:
            blocks = {b for holder, table in self._tables.items() if holder.kind is kind for b in table} - seen
            held[kind] = len(blocks)
            seen |= blocks
        return BlockCounts(
            used=held[HolderKind.SEQUENCE],
            pinned=held[HolderKind.EXPORT],
            reserved=held[HolderKind.RESERVATION],
            cached=len(self._cached),
            free=len(self._free),
        )

    def check(self) -> None:
        """Recount everything. Raises AuditFailed."""
        faults: list[str] = []
        recount = [0] * self.total
        for table in self._tables.values():
            for block in table:
                recount[block] += 1
        faults += [
            f"block {block}: {self._references[block]} references counted, {count} found"
            for block, count in enumerate(recount)
            if count != self._references[block]
        ]
        idle = [*self._free, *self._cached]
        if len(idle) != len(set(idle)):
            faults.append("a block is free or cached twice")
        faults += [f"block {block} is held and free or cached" for block in idle if recount[block]]
        faults += [f"block {block} is free but hashed" for block in self._free if block in self._hash_of]
        faults += [f"block {block} is cached without a hash" for block in self._cached if block not in self._hash_of]
        if self.counts().total != self.total:
            faults.append(f"{self.counts().total} blocks counted in a pool of {self.total}")
        if {block: h for h, block in self._block_of.items()} != self._hash_of:
            faults.append("the hash index does not mirror the blocks' hashes")
        if faults:
            raise AuditFailed("; ".join(faults))

    def _take(self, block: int) -> None:
        if not self._references[block]:
            del self._cached[block]
        self._references[block] += 1

    def _take_fresh(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            del self._block_of[self._hash_of.pop(block)]
        self._references[block] += 1
        return block
