"""Links of every plug."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from contracts.seams import load_plug, plugs
from protos.links.base import Link
from protos.memory_network import MemoryNetwork


@pytest.fixture(params=plugs("link"))
async def make_link(request: pytest.FixtureRequest) -> AsyncIterator[Callable[[], Link]]:
    """Makes links that can reach each other; closes them, and checks that they leave no task behind."""
    plug = load_plug("link", request.param)
    arguments = {"memory": (MemoryNetwork(),)}.get(request.param, ())
    links: list[Link] = []

    def make() -> Link:
        links.append(plug.create(*arguments))
        return links[-1]

    yield make
    for link in links:
        await link.close()
    left = asyncio.all_tasks() - {asyncio.current_task()}
    if left:
        _, left = await asyncio.wait(left, timeout=5)
    assert not left
