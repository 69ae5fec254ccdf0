"""Messages of any size: KV frames round gRPC's default cap of 4 MiB and far above it, prompts of a million tokens."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from contracts.config import MOST_FRAME_BYTES
from contracts.errors import StartupError
from contracts.handover import Chunk, ExporterMessage, PullerMessage
from kv_transfer.transports.base import Packed
from kv_transfer.transports.grpc import _GrpcEnd
from protos.links.base import Duplex
from protos.links.grpc import create
from tests.helpers.answers import ask, assert_error, assert_refused_over_grpc, generate_request, post, settled
from tests.helpers.checkpoints import START, greedy_prompts, make_script_llama
from tests.helpers.handover import PullHandler
from tests.helpers.model_cluster import model_config, served_cluster

MIB = 1 << 20
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4  # layers, K and V, heads, dim, float32
MILLION = 1_000_000


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Payload bytes of every frame."""
    sizes: list[int] = []
    pack = _GrpcEnd.pack

    async def noting(self: _GrpcEnd, blocks: Sequence[int]) -> Packed:
        made = await pack(self, blocks)
        if self._store.blocks not in blocks:
            sizes.append(len(made.payload))
        return made

    monkeypatch.setattr(_GrpcEnd, "pack", noting)
    return sizes


@pytest.mark.parametrize(
    ("block_size", "frame_bytes", "frames"),
    [
        (4 * MIB // TOKEN_BYTES - 1, 2 * MIB, [4 * MIB - TOKEN_BYTES]),  # a block has a frame of its own
        (4 * MIB // TOKEN_BYTES, 4 * MIB, [4 * MIB]),
        (5 * MIB // TOKEN_BYTES, 4 * MIB, [5 * MIB]),
        (64 * MIB // TOKEN_BYTES, 2 * MIB, [64 * MIB]),
        (64, 4 * MIB, [64 * TOKEN_BYTES * 4]),
        (64, 64 * MIB, [64 * TOKEN_BYTES * 4]),
        (64, 64 * TOKEN_BYTES * 3, [64 * TOKEN_BYTES * 3, 64 * TOKEN_BYTES]),
        (64, 1, [64 * TOKEN_BYTES] * 4),
    ],
)
async def test_frames_of_kv(
    block_size: int, frame_bytes: int, frames: list[int], sent: list[int], noise_llama: Path
) -> None:
    prompt = greedy_prompts()[-1]
    async with served_cluster(model_config(noise_llama, aggregated=True)) as served:
        expected = await ask(served, "grpc", prompt, max_tokens=4, temperature=0)
    config = model_config(noise_llama, transport="grpc", blocks=3 if block_size > 64 else 20, block_size=block_size)
    config = replace(config, transfer=replace(config.transfer, frame_bytes=frame_bytes))
    async with served_cluster(config.validate()) as served:
        found = await ask(served, "grpc", prompt, max_tokens=4, temperature=0)
        assert found.token_ids == expected.token_ids
        assert sent == frames
        metrics = await settled(served)
        assert metrics("pdserve_kv_transfer_bytes_total", transport="grpc") == sum(frames)


async def test_the_largest_frame_of_the_smallest_blocks() -> None:
    """The most that may be configured, with a checksum for each 512 bytes, over the grpc link."""
    blocks = MOST_FRAME_BYTES // 512
    chunk = Chunk(0, blocks, (2**64 - 1,) * blocks, bytes(MOST_FRAME_BYTES))

    async def export(stream: Duplex[ExporterMessage, PullerMessage]) -> None:
        await stream.send(chunk)

    server, client = create(), create()
    stream = await client.open_pull(await server.serve("127.0.0.1:0", PullHandler(export)))
    assert await stream.receive() == chunk
    await stream.close()
    await client.close()
    await server.close()


async def test_prompts_of_a_million_tokens(tmp_path: Path) -> None:
    make_script_llama(tmp_path, [b"ok"])
    async with served_cluster(model_config(tmp_path)) as served:
        ids = [263] * MILLION  # two bytes each over gRPC
        assert 2 * MILLION < generate_request(ids).ByteSize() < 8 * MIB
        await assert_refused_over_grpc(served, ids, code="context_length_exceeded")
        assert_error(await post(served, ids), code="context_length_exceeded", param="prompt")
        await assert_refused_over_grpc(served, [2**32 - 1] * 2 * MILLION, code="request_too_large")
        assert_error(await post(served, [2**32 - 1] * MILLION), code="request_too_large", param=None, status=413)
        await assert_refused_over_grpc(served, "x" * 5 * MILLION, code="context_length_exceeded")
        for chat in (False, True):
            for stream in (False, True):
                response = await post(served, "x" * 5 * MILLION, chat=chat, stream=stream)
                assert_error(response, code="context_length_exceeded", param="messages" if chat else "prompt")
        assert (await ask(served, "whole", [START], max_tokens=5, temperature=0)).text == "ok"
        await settled(served)


async def test_a_block_that_no_frame_can_hold_is_refused_at_start(noise_llama: Path) -> None:
    size = MOST_FRAME_BYTES // TOKEN_BYTES + 1
    with pytest.raises(StartupError, match="block_size"):
        async with served_cluster(model_config(noise_llama, transport="grpc", blocks=1, block_size=size)):
            pass
