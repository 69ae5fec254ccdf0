"""How long a stream may be silent before its peer counts as lost.

Sessions (router) and pulls (kv_transfer) wait through it. The time is counted in pieces: while this process
itself stood still (stopped, swapped out, busy), the messages of the peer have piled up, and only one piece
is lost before they are read. A single timer would find its time gone and blame the peer.
"""

import asyncio
from typing import Any, TypeVar

from protos.links.base import Duplex

ReceiveT = TypeVar("ReceiveT")

_PIECES = 6


async def receive_within(stream: Duplex[Any, ReceiveT], seconds: float) -> ReceiveT | None:
    """stream.receive(), given up with TimeoutError after `seconds` of silence during which we listened. No
    message is lost by it: a receive that is cancelled takes nothing. Raises LinkClosed as receive does."""
    for _ in range(_PIECES):
        try:
            async with asyncio.timeout(seconds / _PIECES):
                return await stream.receive()
        except TimeoutError:
            continue
    raise TimeoutError
