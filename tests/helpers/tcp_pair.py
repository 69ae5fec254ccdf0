"""An exporter's and a puller's tcp transport in one process, and what a hand-over between them does."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import trustme

from contracts.config import TransferConfig
from contracts.kv import KvLayout
from kv_transfer.transports import tcp
from kv_transfer.transports.base import Connection, Inlet, Outlet, Transport
from tests.helpers.handover import ByteStore

MIB = KvLayout("model", "tokenizer", "numerics", "uint64", 32, 8, 16, 16, "rope")
"""Blocks of 1 MiB."""
STUCK = [0] * 64
"""Blocks of a frame that does not fit into the buffers between two sockets, if nobody reads."""


def filled(blocks: int = 4) -> ByteStore:
    """Each block has other bytes."""
    store = ByteStore(blocks, layout=MIB)
    for data in store.data:
        data[:] = os.urandom(len(data))
    return store


def certificates(directory: Path, authority: trustme.CA | None = None) -> TransferConfig:
    """A configuration whose certificate a new authority has signed, or this one."""
    authority = authority or trustme.CA()
    signed = authority.issue_cert("worker.test")
    names = {name: directory / f"{name}.pem" for name in ("tls_cert", "tls_key", "tls_ca")}
    signed.cert_chain_pems[0].write_to_path(names["tls_cert"])
    signed.private_key_pem.write_to_path(names["tls_key"])
    authority.cert_pem.write_to_path(names["tls_ca"])
    return TransferConfig(tls_cert=str(names["tls_cert"]), tls_key=str(names["tls_key"]), tls_ca=str(names["tls_ca"]))


@dataclass(frozen=True)
class Pair:
    """`connection` is the puller's to the exporter."""

    here: ByteStore
    there: ByteStore
    exporter: Transport
    puller: Transport
    address: str
    connection: Connection

    async def open(self) -> tuple[Outlet, Inlet]:
        inlet = await self.connection.inlet()
        return self.exporter.outlet(inlet.channel), inlet


@asynccontextmanager
async def connected(config: TransferConfig, host: str = "127.0.0.1") -> AsyncIterator[Pair]:
    """When the block ends, neither a descriptor nor a thread may be left."""
    before = open_files()
    here, there = filled(), ByteStore(4, layout=MIB)
    exporter, puller = tcp.create(here, config), tcp.create(there, config)
    try:
        address = await exporter.serve(host)
        connection = await puller.connect(address)
        yield Pair(here, there, exporter, puller, address, connection)
        await connection.close()
    finally:
        await puller.close()
        await exporter.close()
    assert open_files() <= before
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("pdserve-tcp")]


async def chunk(outlet: Outlet, blocks: Sequence[int], inlet: Inlet, into: Sequence[int]) -> None:
    """One, from the exporter's blocks into the puller's, verified."""
    packed = await outlet.pack(blocks)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(outlet.push(blocks))
        assert await inlet.accept(packed.payload, into) == packed.checksums


def open_files() -> int:
    """Descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))
