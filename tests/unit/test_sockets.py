"""Sockets under pressure: bursts, and a process that may open no more files."""

import asyncio
import logging
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from contracts.errors import StartupError
from kv_transfer.channels.admission import Admission
from kv_transfer.channels.descriptor_desk import DescriptorDesk, DeskAddress, Shape, fetch_descriptor
from kv_transfer.channels.sockets import KEY_BYTES
from kv_transfer.channels.tcp_greeting import TcpAddress, greet, listen
from protos.links.base import LinkClosed
from tests.helpers.handover import settle


@contextmanager
def no_more_files() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_a_burst_of_channels_waits_for_nobody() -> None:
    """None of them is accepted meanwhile; one that the system drops would be tried again after a second."""
    with await listen("127.0.0.1") as listener, ExitStack() as burst:
        for _ in range(300):
            sock = burst.enter_context(socket.socket())
            sock.settimeout(0.8)
            sock.connect(listener.getsockname())


async def test_without_descriptors_there_is_no_channel_and_a_typed_error() -> None:
    with no_more_files():
        with pytest.raises(LinkClosed, match="Too many open files"):
            await greet(TcpAddress("127.0.0.1", 1, bytes(KEY_BYTES)), None, 1.0)
        with pytest.raises(LinkClosed, match="Too many open files"):
            await fetch_descriptor(DeskAddress("nobody", bytes(KEY_BYTES)))
        with pytest.raises(StartupError, match="Too many open files"):
            DescriptorDesk(0, Shape(1, 1))


async def test_an_admission_that_fails_says_so_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(_: bytes, sock: socket.socket) -> None:
        sock.close()
        raise ValueError("ours")

    admission = Admission(1.0, fail)
    sock, _ = await greet(await admission.open("127.0.0.1"), None, 1.0)
    with sock, caplog.at_level(logging.ERROR):
        assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""
        await settle()
        assert "no more connections" in caplog.text
    await admission.close()
