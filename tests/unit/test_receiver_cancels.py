"""The receiving side is cancelled: at any turn it ends without a writer and without a pin on the other side."""

import asyncio
from collections.abc import Sequence

import pytest

from contracts.handover import Abandon
from contracts.kv import BlockStore
from kv_transfer.channels.inline import InlineEnd
from kv_transfer.frames import checksum
from tests.helpers.bent_transport import bent
from tests.helpers.handover import KEY, Prefill, Rig, in_virtual_time, settle
from tests.helpers.scripted_exporter import SIZE, Script, Stream, chunk


class Laggard(InlineEnd):
    """Writes block by block with pauses, and needs a while to stop: as a copy engine would."""

    def __init__(self, store: BlockStore) -> None:
        super().__init__(store)
        self.busy = False

    async def accept(self, payload: bytes | memoryview, blocks: Sequence[int]) -> tuple[int, ...]:
        self.busy = True
        try:
            for index, block in enumerate(blocks):
                await asyncio.sleep(0.5)
                self._store.writable(block)[:] = payload[index * SIZE : (index + 1) * SIZE]
        except asyncio.CancelledError:
            await asyncio.sleep(0.5)
            self._store.writable(blocks[0])[:] = payload[:SIZE]
            raise
        finally:
            self.busy = False
        return tuple(checksum(self._store.read(block)) for block in blocks)


@pytest.mark.parametrize("turn", range(80))
def test_a_cancel_at_any_turn_leaves_no_writer_and_no_pin(turn: int) -> None:
    @in_virtual_time
    async def check() -> None:
        p, rig = Prefill(), Rig()
        laggard = Laggard(rig.store)
        rig.transport = bent(lambda _: laggard)(rig.store)
        await rig.serve(p.exporter.serve)
        p.compute_all()
        receiving = asyncio.create_task(rig.receive())
        for _ in range(turn):  # virtual time passes with the laggard's pauses in between
            if laggard.busy:
                await asyncio.sleep(0.05)
            else:
                await asyncio.sleep(0)
        receiving.cancel()
        await asyncio.wait({receiving})
        assert not laggard.busy
        writes = list(rig.store.writes)
        await asyncio.sleep(5)
        assert rig.store.writes == writes  # nobody writes any more: the blocks may go to others
        assert rig.received() == [11, 12, 13, 14, 15] if rig.committed else turn < 79
        if turn:  # a Pull was sent: the other side need not wait for the lease
            assert p.book.unpinned == [KEY]

    check()


@in_virtual_time
async def test_a_cancel_says_why_and_is_bounded_when_the_other_side_does_not_read() -> None:
    rig = Rig()
    release = asyncio.Event()

    async def deaf(stream: Stream) -> None:
        await release.wait()

    await rig.serve(deaf)
    receiving = asyncio.create_task(rig.receive())
    await settle()
    since = asyncio.get_running_loop().time()
    receiving.cancel()
    await asyncio.wait({receiving})
    assert asyncio.get_running_loop().time() - since <= 1.0
    release.set()

    script = Script(chunk(0, 2))
    rig = Rig()
    await rig.serve(script)
    receiving = asyncio.create_task(rig.receive())
    await settle()
    receiving.cancel()
    await script.ended.wait()
    assert script.heard[-1] == Abandon("CancelledError")
