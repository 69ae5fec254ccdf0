"""The block manager as a state machine: any order of calls keeps its book-keeping true."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from contracts.requests import AttemptKey
from engine.block_manager import BlockManager, Holder, HolderKind, NoFreeBlocks

BLOCKS = 12
HASHES = st.integers(0, 8).map(lambda n: b"%016d" % n)


class Blocks(RuleBasedStateMachine):
    """A model of who holds what beside the real thing; contents are a hash per block."""

    holders: Bundle[Holder] = Bundle("holders")

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(BLOCKS)
        self.tables: dict[Holder, list[int]] = {}
        self.content: dict[int, bytes] = {}
        self.names = 0

    def name(self, kind: HolderKind) -> Holder:
        self.names += 1
        return Holder(kind, AttemptKey(str(self.names), 1))

    @rule(
        target=holders,
        kind=st.sampled_from(HolderKind),
        hashes=st.lists(HASHES, max_size=4, unique=True),
        fresh=st.integers(0, 5),
    )
    def allocate(self, kind: HolderKind, hashes: list[bytes], fresh: int) -> Holder:
        matched = self.manager.match(hashes)
        assert [self.content[block] for block in matched] == hashes[: len(matched)]
        before = self.manager.available
        holder = self.name(kind)
        if not self.manager.can_allocate(matched, fresh):
            try:
                self.manager.allocate(holder, matched, fresh)
            except NoFreeBlocks:
                assert self.manager.available == before
                return multiple()  # type: ignore[return-value]  # hypothesis' way to add nothing
            raise AssertionError("allocated more than there is")
        self.tables[holder] = list(self.manager.allocate(holder, matched, fresh))
        for block in self.tables[holder][len(matched) :]:
            assert not any(block in table for other, table in self.tables.items() if other != holder)
            self.content.pop(block, None)
        return holder

    @rule(holder=holders, fresh=st.integers(0, 3))
    def extend(self, holder: Holder, fresh: int) -> None:
        try:
            added = self.manager.extend(holder, fresh)
        except NoFreeBlocks:
            return
        assert not any(set(added) & set(table) for table in self.tables.values())
        self.tables[holder] += added
        for block in added:
            self.content.pop(block, None)

    @rule(target=holders, holder=holders)
    def share(self, holder: Holder) -> Holder:
        export = self.name(HolderKind.EXPORT)
        self.manager.share(export, self.tables[holder])
        self.tables[export] = list(self.tables[holder])
        return export

    @rule(target=holders, holder=consumes(holders))
    def transfer(self, holder: Holder) -> Holder:
        sequence = self.name(HolderKind.SEQUENCE)
        assert self.manager.transfer(holder, sequence) == self.tables[holder]
        self.tables[sequence] = self.tables.pop(holder)
        return sequence

    @rule(holder=consumes(holders))
    def release(self, holder: Holder) -> None:
        self.manager.release(holder)
        del self.tables[holder]

    @rule(holder=holders, block_hash=HASHES, which=st.integers(0, 10))
    def seal(self, holder: Holder, block_hash: bytes, which: int) -> None:
        table = self.tables[holder]
        if table and block_hash not in self.content.values() and table[which % len(table)] not in self.content:
            block = table[which % len(table)]
            self.manager.seal(block, block_hash)
            self.content[block] = block_hash

    @invariant()
    def books_are_true(self) -> None:
        self.manager.check()
        held = {block for table in self.tables.values() for block in table}
        assert self.manager.available == BLOCKS - len(held)
        counts = self.manager.counts()
        assert counts.total == BLOCKS
        assert counts.used + counts.pinned + counts.reserved == len(held)
        assert self.manager.holders() == {holder: tuple(table) for holder, table in self.tables.items()}


Blocks.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBlocks = Blocks.TestCase
