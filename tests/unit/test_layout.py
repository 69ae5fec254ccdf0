"""Slicing by heads, against slices of whole tensors."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from contracts.errors import Corrupt, Incompatible
from contracts.kv import KvLayout
from kv_transfer.channels.inline import InlineEnd
from kv_transfer.frames import checksum
from kv_transfer.layout import HeadView, Shard, Slice, difference, slices
from tests.helpers.handover import ByteStore

COUNTS = (1, 2, 4)
PAIRS = list(itertools.product(COUNTS, COUNTS))
WHOLE = KvLayout("model", "tokenizer", "numerics", "float32", 3, 8, 2, 5, "rope")
HERE, THERE = [4, 0, 2], [1, 5, 3]
"""Blocks of a prompt in the sources' pools and in the targets'."""
Tensor = NDArray[np.uint8]


def layout(heads: int, dtype: str = "float32") -> KvLayout:
    return replace(WHOLE, kv_heads=heads, dtype=dtype)


def whole_tensor(of: KvLayout, seed: int = 1) -> Tensor:
    """Random bytes of the blocks of a prompt: [block, layer, 2, kv_head, token, bytes of dim]."""
    head_bytes = of.block_bytes // (of.layers * 2 * of.kv_heads * of.block_size)
    shape = (len(HERE), of.layers, 2, of.kv_heads, of.block_size, head_bytes)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def sharded(whole: Tensor, of: KvLayout, count: int, blocks: Sequence[int]) -> list[ByteStore]:
    """One pool per shard, which holds its share of `whole` in `blocks`."""
    share = of.kv_heads // count
    stores = []
    for index in range(count):
        store = ByteStore(6, fill=255, layout=replace(of, kv_heads=share))
        for position, block in enumerate(blocks):
            store.data[block][:] = whole[position, :, :, index * share : (index + 1) * share].tobytes()
        stores.append(store)
    return stores


async def hand_over(
    sources: list[ByteStore], targets: list[ByteStore], heads: int, route: tuple[list[int], list[int]]
) -> None:
    """Every target pulls its heads from whom it must, over the inline transport."""
    for index, target in enumerate(targets):
        for part in slices(heads, len(sources), Shard(index, len(targets))):
            outlet = InlineEnd(HeadView(sources[part.source.index], part.source_heads))
            inlet = InlineEnd(HeadView(target, part.target_heads))
            packed = await outlet.pack(route[0])
            assert await inlet.accept(packed.payload, route[1]) == packed.checksums


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [4, 8, 12])
@pytest.mark.parametrize(("source_count", "target_count"), PAIRS)
async def test_every_target_holds_its_share_of_the_whole(
    source_count: int, target_count: int, heads: int, dtype: str
) -> None:
    of = layout(heads, dtype)
    whole = whole_tensor(of)
    sources = sharded(whole, of, source_count, HERE)
    targets = [ByteStore(6, fill=255, layout=replace(of, kv_heads=heads // target_count)) for _ in range(target_count)]
    await hand_over(sources, targets, heads, (HERE, THERE))
    expected = sharded(whole, of, target_count, THERE)  # and 255 in every block that is none of the prompt's
    assert [target.data for target in targets] == [store.data for store in expected]
    assert [source.data for source in sources] == [store.data for store in sharded(whole, of, source_count, HERE)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_there_and_back_through_every_count_is_the_identity(dtype: str) -> None:
    of = layout(8, dtype)
    first = sharded(whole_tensor(of), of, 1, HERE)
    stores = first
    for count in (4, 2, 1):
        following = [ByteStore(6, fill=255, layout=replace(of, kv_heads=8 // count)) for _ in range(count)]
        await hand_over(stores, following, 8, (HERE, HERE))
        stores = following
    assert stores[0].data == first[0].data


@pytest.mark.parametrize("heads", [4, 8, 12])
@pytest.mark.parametrize(("sources", "count"), PAIRS)
def test_each_head_comes_once_from_the_one_who_holds_it(sources: int, count: int, heads: int) -> None:
    for index in range(count):
        target = Shard(index, count)
        pulled: list[tuple[int, int]] = []  # the model's number of the head: as the source has it, as the target has it
        for part in slices(heads, sources, target):
            held = part.source.heads(heads)
            assert part.source.count == sources
            assert len(part.source_heads) == len(part.target_heads) > 0
            pulled += [
                (held[one], target.heads(heads)[other])
                for one, other in zip(part.source_heads, part.target_heads, strict=True)
            ]
        assert pulled == [(head, head) for head in target.heads(heads)]


def test_slices_of_a_few_shards() -> None:
    assert slices(8, 1, Shard(2, 4)) == (Slice(Shard(0, 1), range(4, 6), range(2)),)
    assert slices(8, 4, Shard(1, 2)) == (
        Slice(Shard(2, 4), range(2), range(2)),
        Slice(Shard(3, 4), range(2), range(2, 4)),
    )


@pytest.mark.parametrize(
    ("heads", "sources", "target", "words"),
    [
        (6, 4, Shard(0, 1), "kv_heads: 6 .* 4 shards"),
        (6, 1, Shard(0, 4), "kv_heads: 6 .* 4 shards"),
        (9, 1, Shard(0, 2), "kv_heads: 9 .* 2 shards"),
        (12, 3, Shard(0, 1), "1, 2, 4 can be, 0 of 3"),
        (8, 1, Shard(0, 8), "1, 2, 4 can be, 0 of 8"),
        (8, 0, Shard(0, 1), "1, 2, 4 can be, 0 of 0"),
        (8, -2, Shard(0, 1), "1, 2, 4 can be, 0 of -2"),
        (8, 1, Shard(2, 2), "1, 2, 4 can be, 2 of 2"),
        (8, 1, Shard(-1, 2), "1, 2, 4 can be, -1 of 2"),
    ],
)
def test_what_cannot_be_shared_out_is_refused_naming_both_values(
    heads: int, sources: int, target: Shard, words: str
) -> None:
    with pytest.raises(Incompatible, match=words):
        slices(heads, sources, target)


@pytest.mark.parametrize(("mine", "theirs"), PAIRS)
def test_the_handshake_admits_shards_with_a_head_in_common(mine: int, theirs: int) -> None:
    for me, other in itertools.product(range(mine), range(theirs)):
        shards = Shard(me, mine), Shard(other, theirs)
        common = set(shards[0].heads(8)) & set(shards[1].heads(8))
        found = difference(layout(8 // mine), shards[0], layout(8 // theirs), shards[1])
        assert (found is None) == bool(common)


@pytest.mark.parametrize(
    ("theirs", "shard", "words"),
    [
        (layout(4), Shard(0, 1), "kv_heads: 8 here, 4 there"),
        (layout(4), Shard(0, 4), "kv_heads: 8 here, 16 there"),
        (layout(2), Shard(1, 4), "heads, of which none is in both: 4 to 7 here, 2 to 3 there"),
        (replace(layout(4), numerics="other"), Shard(1, 2), "numerics: 'numerics' here, 'other' there"),
        (layout(4, "bfloat16"), Shard(1, 2), "dtype: 'float32' here, 'bfloat16' there"),
        (replace(layout(4), block_size=4), Shard(1, 2), "block_size: 5 here, 4 there"),
        (replace(layout(2), layers=2), Shard(3, 4), "layers: 3 here, 2 there"),
        (layout(4), Shard(2, 2), "shards: 1, 2, 4 can be, 2 of 2 is asked"),
        (layout(1), Shard(0, 8), "shards: 1, 2, 4 can be, 0 of 8 is asked"),
    ],
)
def test_the_handshake_refuses_all_else_naming_both_values(theirs: KvLayout, shard: Shard, words: str) -> None:
    assert difference(layout(4), Shard(1, 2), theirs, shard) == words


def test_a_view_is_a_store_of_fewer_heads() -> None:
    store = ByteStore(6, layout=layout(8))
    view = HeadView(store, range(2, 5))
    assert (view.layout, view.blocks, view.descriptor) == (layout(3), 6, None)
    shown = view.read(0)
    assert (shown.readonly, shown.nbytes, shown.format, shown.ndim) == (True, view.layout.block_bytes, "B", 1)


def test_what_a_receive_that_was_cut_off_had_written_never_reaches_the_pool() -> None:
    store = ByteStore(6, layout=layout(8))
    HeadView(store, range(2)).writable(3)[:] = b"\1" * layout(2).block_bytes
    later = HeadView(store, range(2))
    assert bytes(later.read(3)) == bytes(layout(2).block_bytes)
    assert store.writes == []


async def test_the_checksum_is_that_of_what_lies_in_the_pool() -> None:
    """Somebody else writes into the pool's block between the copy and the check."""
    store = ByteStore(6, layout=layout(8))
    view = HeadView(store, range(4, 8))
    content = bytes(range(256)) * (view.layout.block_bytes // 256 + 1)
    view.writable(1)[:] = content[: view.layout.block_bytes]
    assert checksum(view.read(1)) == checksum(content[: view.layout.block_bytes])
    store.data[1][-1] ^= 1
    assert checksum(view.read(1)) != checksum(content[: view.layout.block_bytes])


async def test_a_payload_of_the_wrong_size_writes_nothing() -> None:
    store = ByteStore(6, layout=layout(8))
    with pytest.raises(Corrupt, match="came"):
        await InlineEnd(HeadView(store, range(4))).accept(bytes(layout(8).block_bytes), [1])
    assert store.writes == []


async def test_the_spare_blocks_are_seen_too() -> None:
    """Links are verified with them."""
    store = ByteStore(6, layout=layout(8))
    store.data[store.blocks][:] = bytes(range(240)) * (layout(8).block_bytes // 240)
    view = HeadView(store, range(1, 3))
    packed = await InlineEnd(view).pack([view.blocks])
    assert await InlineEnd(view).accept(packed.payload, [view.blocks + 1]) == packed.checksums
