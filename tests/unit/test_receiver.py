"""The receiving side: against the real exporter, and against exporters that lie, stop or vanish."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from contracts.errors import (
    Corrupt,
    DeadlineExceeded,
    EngineFailed,
    PdserveError,
    PeerSilent,
    PullGone,
    PullNotFound,
    Stale,
    WorkerLost,
)
from contracts.handover import Abandon, Ack, Alive, Chunk, Ended, ExporterMessage, Last, Progress, Pull, PullFailed
from contracts.session import Source
from kv_transfer.channels.inline import InlineEnd
from kv_transfer.frames import checksum, digest
from kv_transfer.orders import TransferStats
from tests.helpers.bent_transport import bent
from tests.helpers.handover import CONFIG, INCARNATION, KEY, LAYOUT, Prefill, Rig, in_virtual_time, settle, token
from tests.helpers.scripted_exporter import GOOD, LAST, SIZE, WHOLE, Script, Stream, chunk, play


@in_virtual_time
async def test_blocks_of_a_running_prefill_arrive_and_are_acknowledged() -> None:
    p, rig = Prefill(), Rig()
    await rig.serve(p.exporter.serve)
    loop = asyncio.get_running_loop()
    p.open()
    p.attach()
    for second, computed in ((1, 7), (2, 12), (3, 18)):
        loop.call_later(second, p.exports.publish, KEY, computed)
    loop.call_later(3, p.finish, 18)
    stats = await rig.receive()
    await settle()
    assert rig.received() == [11, 12, 13, 14, 15]
    assert [last.kv_tokens for last in rig.committed] == [18]
    assert (stats.bytes, stats.blocks, stats.end) == (5 * SIZE, 5, rig.committed[0])
    assert (stats.seconds, stats.waited, stats.first_byte) == pytest.approx((3, 3, 1), abs=0.01)
    assert p.book.unpinned == [KEY]


@in_virtual_time
async def test_the_pull_names_what_the_order_says() -> None:
    _, script, _ = await play(*GOOD, traceparent="00-trace")
    pull, ack = script.heard
    assert isinstance(pull, Pull)
    assert (pull.key, pull.incarnation, pull.layout, pull.first_block) == (KEY, INCARNATION, LAYOUT, 0)
    assert (pull.puller, pull.secret, pull.traceparent, pull.transport) == ("d", "s3cret", "00-trace", "memory")
    assert ack == Ack()


@in_virtual_time
async def test_blocks_that_are_already_here_are_not_written() -> None:
    rig, _, result = await play(chunk(3, 2), Last(token(), 18, 5, digest(chunk(3, 2).checksums)), first_block=3)
    assert isinstance(result, TransferStats)
    assert rig.store.writes == [33, 34]
    assert result.blocks == 2


@in_virtual_time
async def test_when_everything_is_here_only_last_comes() -> None:
    rig, _, result = await play(Last(token(), 18, 5, digest([])), first_block=5)
    assert isinstance(result, TransferStats)
    assert (rig.store.writes, result.bytes, result.first_byte) == ([], 0, None)
    assert len(rig.committed) == 1


def damaged(chunk_: Chunk, at: int) -> Chunk:
    payload = bytearray(chunk_.payload)
    payload[at] ^= 1
    return replace(chunk_, payload=bytes(payload))


@pytest.mark.parametrize(
    "messages",
    [
        (damaged(WHOLE, 0), LAST),
        (damaged(WHOLE, 5 * SIZE - 1), LAST),
        (replace(WHOLE, payload=WHOLE.payload[:-1]), LAST),
        (replace(WHOLE, checksums=WHOLE.checksums[:-1]), LAST),
        (replace(WHOLE, checksums=(*WHOLE.checksums, 0)), LAST),
        (chunk(0, 2), chunk(3, 2), LAST),  # one is missing
        (chunk(0, 2), chunk(0, 2), LAST),  # one came twice
        (chunk(0, 6), LAST),  # more than was ordered
        (chunk(0, 0), WHOLE, LAST),
        (chunk(0, 4), LAST),  # the end is missing
        (WHOLE, replace(LAST, digest=LAST.digest ^ 1)),
        (WHOLE, replace(LAST, blocks=4)),
        (WHOLE, replace(LAST, kv_tokens=17)),
        (LAST,),
    ],
)
def test_what_is_not_exactly_what_was_ordered_is_never_committed(messages: Sequence[ExporterMessage]) -> None:
    @in_virtual_time
    async def check() -> None:
        rig, script, result = await play(*messages)
        assert isinstance(result, Corrupt)
        assert rig.committed == []
        assert script.heard[-1] == Abandon("Corrupt")
        assert set(rig.store.writes) <= set(range(30, 35))

    check()


@pytest.mark.parametrize("wrong", [chunk(0, 2), chunk(1, 2), chunk(3, 2), chunk(2, 4)])
def test_a_chunk_out_of_order_is_not_even_written(wrong: Chunk) -> None:
    @in_virtual_time
    async def check() -> None:
        rig, _, result = await play(chunk(0, 2), wrong)
        assert isinstance(result, Corrupt)
        assert rig.store.writes == [30, 31]

    check()


@in_virtual_time
async def test_the_copy_is_verified_and_not_the_payload() -> None:
    rig, script = Rig(), Script(*GOOD)

    class Careless(InlineEnd):
        async def accept(self, payload: bytes | memoryview, blocks: Sequence[int]) -> tuple[int, ...]:
            await super().accept(payload, blocks)
            if 33 in blocks:
                rig.store.data[33][:] = bytes(SIZE)
            return tuple(checksum(rig.store.read(block)) for block in blocks)

    rig.transport = bent(Careless)(rig.store)
    await rig.serve(script)
    with pytest.raises(Corrupt, match="block 3"):
        await rig.receive()
    assert rig.committed == []


@pytest.mark.parametrize("error", [Stale("s"), PullGone("g"), PullNotFound("n"), EngineFailed("e")])
def test_errors_of_the_other_side_are_raised_as_they_were(error: PdserveError) -> None:
    @in_virtual_time
    async def check() -> None:
        rig, _, result = await play(chunk(0, 2), PullFailed(error.info()))
        assert isinstance(result, PdserveError)
        assert (type(result), result.message) == (type(error), error.message)
        assert rig.committed == []

    check()


@in_virtual_time
async def test_a_request_that_its_first_token_ended_commits_nothing() -> None:
    rig, script, result = await play(chunk(0, 2), Ended())
    assert isinstance(result, TransferStats)
    assert result.end == Ended()
    assert rig.committed == []
    assert len(script.heard) == 1


@in_virtual_time
async def test_silence_fails_the_attempt_and_progress_does_not() -> None:
    rig, _, result = await play(chunk(0, 2), 2.9, Progress(8, 0), 2.9, Progress(8, 0), 9.0)
    assert isinstance(result, PeerSilent)
    assert rig.committed == []
    rig, _, result = await play(*[m for n in range(20) for m in (2.9, Progress(n, 0))], *GOOD)
    assert isinstance(result, TransferStats)


@in_virtual_time
async def test_alive_is_said_each_third_of_the_lease() -> None:
    quiet = [m for n in range(8) for m in (2.0, Progress(n, 0))]
    _, script, _ = await play(*quiet, *GOOD)
    assert script.heard[1:] == [Alive()] * 3 + [Ack()]


@in_virtual_time
async def test_the_deadline_of_the_request_ends_the_wait() -> None:
    quiet = [m for n in range(40) for m in (1.0, Progress(n, 0))]
    rig, script, result = await play(*quiet, deadline=20.5)
    assert isinstance(result, DeadlineExceeded)
    assert script.heard[-1] == Abandon("deadline")
    assert rig.committed == []


@in_virtual_time
async def test_a_break_in_the_middle_is_a_lost_worker() -> None:
    rig, script = Rig(), Script(chunk(0, 2))
    await rig.serve(script)
    asyncio.get_running_loop().call_later(1, rig.network.kill, "p")
    with pytest.raises(WorkerLost, match="prefill-0"):
        await rig.receive()
    assert rig.committed == []


@in_virtual_time
async def test_a_stream_that_ends_early_is_a_lost_worker() -> None:
    rig = Rig()

    async def answer(stream: Stream) -> None:
        await stream.send(chunk(0, 2))

    await rig.serve(answer)
    with pytest.raises(WorkerLost, match="before its last block"):
        await rig.receive()


@in_virtual_time
async def test_nobody_there_is_a_lost_worker() -> None:
    with pytest.raises(WorkerLost, match="nobody answers"):
        await Rig().receive()


@in_virtual_time
async def test_a_lost_ack_neither_undoes_the_commit_nor_keeps_the_pin() -> None:
    p, rig = Prefill(), Rig()
    await rig.serve(p.exporter.serve)
    p.compute_all()

    def commit_and_break(last: Last) -> None:
        rig.committed.append(last)
        rig.network.kill("p")

    rig.commit = commit_and_break
    await rig.receive()
    await settle()
    assert len(rig.committed) == 1
    assert p.book.unpinned == [KEY]


@in_virtual_time
async def test_an_error_of_commit_abandons() -> None:
    p, rig = Prefill(), Rig()
    await rig.serve(p.exporter.serve)
    p.compute_all()

    def fail(last: Last) -> None:
        raise KeyError("gone")

    rig.commit = fail
    with pytest.raises(KeyError):
        await rig.receive()
    await settle()
    assert p.book.unpinned == [KEY]


@in_virtual_time
async def test_a_stale_incarnation_is_refused() -> None:
    p, rig = Prefill(), Rig()
    await rig.serve(p.exporter.serve)
    p.compute_all()
    with pytest.raises(Stale):
        await rig.receive(source=Source("prefill-0", "p", INCARNATION + 1))
    assert (rig.committed, rig.store.writes) == ([], [])


@in_virtual_time
async def test_a_pull_comes_before_its_submit_and_another_one_far_too_late() -> None:
    p, rig = Prefill(), Rig()
    await rig.serve(p.exporter.serve)
    asyncio.get_running_loop().call_later(CONFIG.park_seconds - 0.5, p.compute_all)
    await rig.receive()
    assert len(rig.committed) == 1
    await settle()  # the Ack arrives
    with pytest.raises(PullGone):
        await rig.receive()
    assert len(rig.committed) == 1


@in_virtual_time
async def test_a_receiver_that_sleeps_beyond_its_lease_does_not_commit() -> None:
    p, rig = Prefill(), Rig()
    await rig.serve(p.exporter.serve)
    p.open()
    p.attach()
    p.exports.publish(KEY, 8)
    receiving = asyncio.create_task(rig.receive())
    await settle()
    rig.network.freeze("p")  # as seen from the exporter: the puller says nothing
    await asyncio.sleep(CONFIG.lease_seconds + 1)
    assert p.book.unpinned == [KEY]
    p.finish()
    rig.network.thaw("p")
    with pytest.raises(PdserveError):
        await receiving
    assert rig.committed == []
