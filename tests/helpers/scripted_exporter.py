"""An exporter that says what it is told, for tests of the receiver. Blocks are those of tests/helpers/handover.py."""

import asyncio
from typing import Any

from contracts.errors import PdserveError
from contracts.handover import Chunk, ExporterMessage, Last, PullerMessage
from kv_transfer.frames import checksum, digest
from kv_transfer.orders import TransferStats
from protos.links.base import Duplex
from tests.helpers.handover import LAYOUT, Rig, token

Stream = Duplex[ExporterMessage, PullerMessage]
SIZE = LAYOUT.block_bytes


def chunk(first: int, count: int) -> Chunk:
    """Blocks of the prompt, each filled with its number + 11."""
    blocks = [bytes([first + i + 11]) * SIZE for i in range(count)]
    return Chunk(first, count, tuple(map(checksum, blocks)), b"".join(blocks))


WHOLE = chunk(0, 5)
LAST = Last(token(), 18, 5, digest(WHOLE.checksums))
GOOD: tuple[ExporterMessage, ...] = (chunk(0, 2), chunk(2, 2), chunk(4, 1), LAST)


class Script:
    """An exporter that says what it is told, then listens until the stream ends."""

    def __init__(self, *messages: ExporterMessage | float) -> None:
        self.messages = messages
        self.heard: list[PullerMessage] = []
        self.ended = asyncio.Event()

    async def __call__(self, stream: Stream) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                listening = tasks.create_task(self._listen(stream))
                for message in self.messages:
                    if isinstance(message, float):
                        await asyncio.sleep(message)
                    else:
                        await stream.send(message)
                await listening
        finally:
            self.ended.set()

    async def _listen(self, stream: Stream) -> None:
        while (message := await stream.receive()) is not None:
            self.heard.append(message)


async def play(*messages: ExporterMessage | float, **order: Any) -> tuple[Rig, Script, TransferStats | PdserveError]:
    """Receive from a script; the error is a result."""
    rig, script = Rig(), Script(*messages)
    await rig.serve(script)
    result: TransferStats | PdserveError
    try:
        result = await rig.receive(**order)
    except PdserveError as error:
        result = error
    await script.ended.wait()
    return rig, script, result
