"""The exporting side against a puller that a test plays message by message."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from contracts.errors import EngineFailed
from contracts.handover import (
    Abandon,
    Ack,
    Alive,
    Chunk,
    Ended,
    ExporterMessage,
    Last,
    Progress,
    Pull,
    PullerMessage,
    PullFailed,
)
from contracts.requests import FinishReason
from kv_transfer.channels.inline import InlineEnd
from kv_transfer.frames import checksum, digest
from kv_transfer.transports.base import Packed
from protos.links import memory
from protos.links.base import Duplex, LinkClosed
from tests.helpers.bent_transport import bent
from tests.helpers.handover import CONFIG, INCARNATION, KEY, LAYOUT, Prefill, Rig, in_virtual_time, pull, settle, token

Stream = Duplex[PullerMessage, ExporterMessage]


async def start(first: PullerMessage | None = None) -> tuple[Prefill, Rig, Stream]:
    """A prefill side, and a stream to it with the first message sent."""
    p, rig = Prefill(), Rig()
    await rig.serve(p.exporter.serve)
    stream = await memory.create(rig.network).open_pull("p")
    await stream.send(pull() if first is None else first)
    await settle()
    return p, rig, stream


async def read(stream: Stream) -> ExporterMessage:
    """The next message that is not Progress."""
    while isinstance(message := await stream.receive(), Progress):
        pass
    assert message is not None
    return message


@in_virtual_time
async def test_whole_blocks_leave_while_the_prompt_is_computed() -> None:
    p, _, stream = await start()
    p.open()
    p.attach()
    p.exports.publish(KEY, 13)
    first, second = await read(stream), await read(stream)
    assert isinstance(first, Chunk)
    assert isinstance(second, Chunk)
    assert [(c.first_block, c.count, len(c.payload)) for c in (first, second)] == [
        (0, 2, 2 * LAYOUT.block_bytes),
        (2, 1, LAYOUT.block_bytes),
    ]
    assert first.payload == bytes(p.store.read(10)) + bytes(p.store.read(11))
    assert first.checksums == (checksum(p.store.read(10)), checksum(p.store.read(11)))
    p.exports.publish(KEY, 18)
    p.finish(18)
    rest = await read(stream)
    assert isinstance(rest, Chunk)
    assert (rest.first_block, rest.count) == (3, 2)
    last = await read(stream)
    assert isinstance(last, Last)
    expected = digest(first.checksums + second.checksums + rest.checksums)
    assert last.token is not None
    assert (last.token.token_id, last.kv_tokens, last.blocks, last.digest) == (42, 18, 5, expected)
    assert p.exports.leases() == 1
    await stream.send(Ack())
    assert await stream.receive() is None
    assert p.exports.leases() == 0


@in_virtual_time
async def test_a_prefix_that_the_puller_holds_is_not_sent() -> None:
    p, _, stream = await start(pull(first_block=4))
    p.compute_all()
    chunk, last = await read(stream), await read(stream)
    assert isinstance(chunk, Chunk)
    assert isinstance(last, Last)
    assert (chunk.first_block, chunk.count, last.blocks) == (4, 1, 5)


@in_virtual_time
async def test_a_puller_that_holds_everything_gets_only_last() -> None:
    p, _, stream = await start(pull(first_block=5))
    p.compute_all()
    assert await read(stream) == Last(token(), 18, 5, digest([]))


@pytest.mark.parametrize("step", [lambda p: None, Prefill.open, lambda p: (p.open(), p.attach())])
def test_something_is_said_each_second(step: Callable[[Prefill], object]) -> None:
    @in_virtual_time
    async def check() -> None:
        p, _, stream = await start()
        step(p)
        loop = asyncio.get_running_loop()
        for second in (1, 2, 3):
            assert isinstance(await stream.receive(), Progress)
            assert loop.time() == pytest.approx(second, abs=0.001)

    check()


@in_virtual_time
async def test_progress_is_not_put_off_by_chunks_that_fill_no_block() -> None:
    p, _, stream = await start()
    p.open()
    p.attach()
    loop = asyncio.get_running_loop()
    for n in range(1, 4):
        loop.call_later(n * 0.7, p.exports.publish, KEY, n)
    seen = [await stream.receive() for _ in range(2)]
    assert seen == [Progress(1, 0), Progress(2, 0)]
    assert loop.time() == pytest.approx(2.0, abs=0.001)


@in_virtual_time
async def test_a_failed_prefill_is_told_in_band_in_the_same_turn() -> None:
    p, _, stream = await start()
    p.open()
    p.attach()
    p.exports.fail(KEY, EngineFailed("a step raised"))
    assert p.book.unpinned == [KEY]
    assert await stream.receive() == PullFailed(EngineFailed("a step raised").info())
    assert asyncio.get_running_loop().time() == 0.0
    assert await stream.receive() is None


@in_virtual_time
async def test_a_first_token_that_ends_the_request_sends_ended() -> None:
    p, _, stream = await start()
    p.open()
    p.attach()
    p.finish(finish=FinishReason.LENGTH)
    assert await read(stream) == Ended()
    assert await stream.receive() is None


@pytest.mark.parametrize(
    ("message", "code", "words"),
    [
        (pull(incarnation=INCARNATION - 1), "stale", "77 here, 76 asked for"),
        (pull(secret="guess"), "pull_not_found", "no such attempt"),
        (pull(secret="gu\N{LATIN SMALL LETTER E WITH ACUTE}ss"), "pull_not_found", "no such attempt"),
        (pull(ticket=b"guess"), "pull_not_found", "no such attempt"),
        (pull(layout=replace(LAYOUT, numerics="other")), "incompatible", "numerics: 'numerics' here, 'other' there"),
        (pull(transport="grpc"), "incompatible", "transport: memory here, 'grpc' asked for"),
    ],
)
def test_a_pull_that_must_not_be_served_is_refused_at_once(message: Pull, code: str, words: str) -> None:
    @in_virtual_time
    async def check() -> None:
        p, rig = Prefill(), Rig()
        p.compute_all()
        await rig.serve(p.exporter.serve)
        stream = await memory.create(rig.network).open_pull("p")
        await stream.send(message)
        answer = await stream.receive()
        assert isinstance(answer, PullFailed)
        assert (answer.error.code, asyncio.get_running_loop().time()) == (code, 0.0)
        assert words in answer.error.message
        assert p.exports.leases() == 1

    check()


@in_virtual_time
async def test_a_stream_that_does_not_start_with_a_pull_is_closed() -> None:
    _, _, stream = await start(Alive())
    assert await stream.receive() is None


@in_virtual_time
async def test_a_stream_that_says_nothing_is_closed() -> None:
    p, rig = Prefill(), Rig()
    await rig.serve(p.exporter.serve)
    stream = await memory.create(rig.network).open_pull("p")
    assert await stream.receive() is None
    assert asyncio.get_running_loop().time() == CONFIG.park_seconds


@pytest.mark.parametrize("goodbye", [Ack(), Abandon("cancelled"), None, "kill"])
def test_the_end_of_a_pull_releases_at_once(goodbye: PullerMessage | str | None) -> None:
    @in_virtual_time
    async def check() -> None:
        p, rig, stream = await start()
        p.open()
        p.attach()
        p.exports.publish(KEY, 9)
        await read(stream)
        if goodbye is None:
            await stream.close()
        elif isinstance(goodbye, str):
            rig.network.kill("p")
        else:
            await stream.send(goodbye)
        await settle()
        assert p.book.unpinned == [KEY]
        assert asyncio.get_running_loop().time() == 0.0

    check()


@in_virtual_time
async def test_an_open_stream_without_alive_does_not_keep_the_lease() -> None:
    p, _, stream = await start()
    p.compute_all()
    assert isinstance(await read(stream), Chunk)
    await asyncio.sleep(CONFIG.lease_seconds + 0.1)
    assert p.book.unpinned == [KEY]


@in_virtual_time
async def test_alive_keeps_the_lease() -> None:
    p, _, stream = await start()
    p.compute_all()
    for _ in range(10):
        await asyncio.sleep(CONFIG.lease_seconds / 3)
        await stream.send(Alive())
    assert p.exports.leases() == 1


@in_virtual_time
async def test_a_puller_that_reads_nothing_holds_up_nobody_and_loses_its_lease() -> None:
    p, rig, stream = await start()
    p.open()
    p.attach(40)
    for computed in range(1, 161):
        p.exports.publish(KEY, computed)  # returns at once, whatever the puller does
        await settle(2)
    p.finish(160)
    await asyncio.sleep(CONFIG.lease_seconds + 0.1)
    assert p.book.unpinned == [KEY]
    await asyncio.sleep(CONFIG.silence_seconds + 0.1)
    with pytest.raises(LinkClosed):  # the stream is over for the exporter as well
        await stream.send(Alive())
    rig.network.kill("p")


@in_virtual_time
async def test_blocks_that_were_let_go_while_they_were_packed_are_not_sent() -> None:
    packing = asyncio.Event()

    class Slow(InlineEnd):
        async def pack(self, blocks: Sequence[int]) -> Packed:
            packing.set()
            await asyncio.sleep(1)
            return await super().pack(blocks)

    p, rig = Prefill(transport=bent(Slow)), Rig()
    await rig.serve(p.exporter.serve)
    stream = await memory.create(rig.network).open_pull("p")
    await stream.send(pull())
    p.compute_all()
    await packing.wait()
    p.exports.cancel(KEY, "test")
    answer = await stream.receive()
    assert isinstance(answer, PullFailed)
    assert answer.error.code == "cancelled"


@in_virtual_time
async def test_an_older_stream_ends_when_a_newer_pull_comes() -> None:
    p, rig, older = await start()
    p.open()
    p.attach()
    newer = await memory.create(rig.network).open_pull("p")
    await newer.send(pull())
    answer = await older.receive()
    assert isinstance(answer, PullFailed)
    assert answer.error.code == "pull_gone"
    assert await older.receive() is None
    p.exports.publish(KEY, 4)
    assert isinstance(await newer.receive(), Chunk)
