"""The seam between processes: sessions (router to worker), pulls (decode to prefill), and scrapes.

Plugs carry the dataclasses of contracts/session.py and contracts/handover.py and nothing else; only the
grpc plug knows protobuf (through protos/codec/). Each plug's module has `create(...)`.
"""

from typing import Protocol, TypeVar

from contracts.handover import ExporterMessage, PullerMessage
from contracts.session import RouterMessage, WorkerMessage

SendT_contra = TypeVar("SendT_contra", contravariant=True)
ReceiveT_co = TypeVar("ReceiveT_co", covariant=True)


class LinkClosed(Exception):
    """The other end is gone or the stream was closed; says why."""


class Duplex(Protocol[SendT_contra, ReceiveT_co]):
    """One bidirectional stream of messages, in order. Safe for one sender task and one receiver task."""

    async def send(self, message: SendT_contra) -> None:
        """Returns when the message is accepted for sending (back-pressure). Raises LinkClosed."""

    async def receive(self) -> ReceiveT_co | None:
        """The next message; None when the other end closed cleanly. Raises LinkClosed when it broke."""

    async def close(self) -> None:
        """End the stream in both directions. Idempotent."""


class Handler(Protocol):
    """What a process answers. Each stream call runs until the stream ends; returning closes the stream."""

    async def session(self, stream: Duplex[WorkerMessage, RouterMessage]) -> None: ...

    async def pull(self, stream: Duplex[ExporterMessage, PullerMessage]) -> None: ...

    async def scrape(self) -> str:
        """The process's metrics as Prometheus text."""


class Link(Protocol):
    """One end of the transport of messages; a process has one and uses it both ways."""

    async def serve(self, address: str, handler: Handler) -> str:
        """Listen and return the bound address ("host:port"; port 0 lets the system choose). Raises
        StartupError when the address cannot be bound."""

    async def open_session(self, address: str) -> Duplex[RouterMessage, WorkerMessage]:
        """Raises LinkClosed when nobody answers."""

    async def open_pull(self, address: str) -> Duplex[PullerMessage, ExporterMessage]:
        """Raises LinkClosed when nobody answers."""

    async def scrape(self, address: str, timeout: float) -> str:
        """Handler.scrape of the process at `address`. Raises LinkClosed, also after `timeout` seconds."""

    async def close(self) -> None:
        """Stop serving and break every stream of this end. Idempotent."""
