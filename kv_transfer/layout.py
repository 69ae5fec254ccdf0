"""KV between workers whose engines are split over different numbers of shards: slicing blocks by heads.

With S shards, shard s holds the heads [s*H/S, (s+1)*H/S) of a model's H KV heads, and its pool's layout names only
those. `slices` decides who sends which heads to whom, `difference` is what the handshake demands, and a HeadView
shows a range of a pool's heads to a transport as if they were all there is. It must never split a head or a block's
tokens, and converts nothing but the number of shards.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from contracts.errors import Incompatible
from contracts.kv import BlockStore, KvLayout

_COUNTS = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class Shard:
    """Which share of the KV heads an engine holds: `index` of `count`, from 0."""

    index: int
    count: int

    def heads(self, total: int) -> range:
        """Its share of the model's KV heads. Raises Incompatible when they cannot be shared out like that."""
        if self.count not in _COUNTS or not 0 <= self.index < self.count:
            raise Incompatible(f"shards: {', '.join(map(str, _COUNTS))} can be, {self.index} of {self.count} is asked")
        if total % self.count:
            raise Incompatible(f"kv_heads: {total} cannot be shared out evenly among {self.count} shards")
        share = total // self.count
        return range(self.index * share, (self.index + 1) * share)


@dataclass(frozen=True, slots=True)
class Slice:
    """What one source shard contributes to a target shard. The ranges have one length; each counts from the first
    head that its own pool holds."""

    source: Shard
    source_heads: range
    target_heads: range


def slices(kv_heads: int, sources: int, target: Shard) -> tuple[Slice, ...]:
    """What `target` pulls from which of `sources` shards, in order of heads; together they are all its heads.
    `kv_heads` are the model's. Raises Incompatible naming both values when they do not go with the counts."""
    wanted = target.heads(kv_heads)
    found = []
    for source in (Shard(index, sources) for index in range(max(sources, 1))):
        held = source.heads(kv_heads)
        common = _common(held, wanted)
        if common:
            found.append(Slice(source, _counted_from(held, common), _counted_from(wanted, common)))
    return tuple(found)


def difference(mine: KvLayout, my_shard: Shard, theirs: KvLayout, their_shard: Shard) -> str | None:
    """None when the two shards can exchange the heads that both hold, else one line that names the first
    difference and both values. All else than the shards must be equal."""
    ours, other = _whole(mine, my_shard), _whole(theirs, their_shard)
    try:
        held, offered = my_shard.heads(ours.kv_heads), their_shard.heads(other.kv_heads)
    except Incompatible as refused:
        return refused.message
    found = ours.difference(other)
    if found is None and not _common(held, offered):
        return f"heads, of which none is in both: {_name(held)} here, {_name(offered)} there"
    return found


class HeadView:
    """A BlockStore of the heads [heads.start, heads.stop) of another one, for one end of one hand-over.

    The heads of one block lie in layers * 2 pieces, so neither way is without a copy. `read` packs the pieces.
    `writable` gives memory beside the pool; the `read` of that block, with which a transport verifies what it has
    written, first puts it in its place. What is never read never reaches the pool: a receive that is cut off leaves
    no trace.
    """

    descriptor = None

    def __init__(self, store: BlockStore, heads: range) -> None:
        whole = store.layout
        assert 0 <= heads.start < heads.stop <= whole.kv_heads, f"{heads} of {whole.kv_heads} heads"
        self.layout = replace(whole, kv_heads=len(heads))
        self.blocks = store.blocks
        self._store = store
        self._pieces = whole.layers * 2
        head_bytes = whole.block_bytes // (self._pieces * whole.kv_heads)
        self._columns = slice(heads.start * head_bytes, heads.stop * head_bytes)
        self._staged: dict[int, NDArray[np.uint8]] = {}
        self._spare: list[NDArray[np.uint8]] = []  # memory that is fresh from the system costs more than the copy

    def read(self, block: int) -> memoryview:
        """The heads' bytes of one block as the pool holds them, packed: layout.block_bytes, read-only."""
        staged = self._staged.pop(block, None)
        if staged is not None:
            self._heads_of(self._store.writable(block))[:] = staged.reshape(self._pieces, -1)
            self._spare.append(staged)
        packed = np.ascontiguousarray(self._heads_of(self._store.read(block)))
        return packed.reshape(-1).data.toreadonly()

    def writable(self, block: int) -> memoryview:
        """Memory for all of layout.block_bytes, which the next `read` of this block brings into the pool: to be
        written as a whole, only for the one who owns the block."""
        if block not in self._staged:
            self._staged[block] = self._spare.pop() if self._spare else np.empty(self.layout.block_bytes, np.uint8)
        return self._staged[block].data

    def _heads_of(self, block: memoryview) -> NDArray[np.uint8]:
        """[layer and K or V, bytes of the heads]: a view into a block of the pool."""
        return np.frombuffer(block, np.uint8).reshape(self._pieces, -1)[:, self._columns]


def _whole(layout: KvLayout, shard: Shard) -> KvLayout:
    """The layout that one engine without shards would have."""
    return replace(layout, kv_heads=layout.kv_heads * shard.count)


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _counted_from(origin: range, heads: range) -> range:
    return range(heads.start - origin.start, heads.stop - origin.start)


def _name(heads: range) -> str:
    return f"{heads.start} to {heads.stop - 1}"
