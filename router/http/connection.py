"""What a request's connection tells: its body, and that the client went away.

Called by openai_routes.py and event_stream.py, on the ASGI channel of one request.
"""

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

from starlette.datastructures import Headers
from starlette.types import Receive

from contracts.errors import Cancelled, RequestTooLarge

T = TypeVar("T")


class ClientGone(Cancelled):
    """Nobody is left to answer: the client closed its connection, or has stopped reading."""


async def read_body(receive: Receive, headers: Headers, limit: int) -> bytes:
    """The body. Raises RequestTooLarge as soon as it is known to have more than `limit` bytes, and ClientGone
    when the client goes away first."""
    declared = headers.get("content-length", "")
    size = int(declared) if declared.isdecimal() else 0
    body = bytearray()
    more = True
    while more and size <= limit:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("the client went away")
        body += message.get("body", b"")
        size = max(size, len(body))
        more = message.get("more_body", False)
    if size > limit:
        raise RequestTooLarge(f"the body may have at most {limit} bytes")
    return bytes(body)


async def while_connected(receive: Receive, work: Coroutine[None, None, T]) -> T:
    """The result of `work`, whose request body has been read.

    Raises ClientGone when the client goes away first; `work` has then been cancelled and has ended.
    """
    try:
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(_disconnect(receive))
            result = await work
            watcher.cancel()
    except ExceptionGroup as failed:
        raise failed.exceptions[-1] from None  # the last one is of `work`, when it failed too
    return result


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGone("the client went away")
