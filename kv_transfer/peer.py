"""One exporter as a puller sees it: how its blocks are reached, proven with one block before any is trusted.

Peers (peers.py) keeps one for each life of a worker. It must never write into a block of the pool, only into the
spare ones behind it.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from contracts.config import TransferConfig
from contracts.errors import Corrupt, HandoverFailed, PdserveError, PeerSilent, WorkerLost
from contracts.handover import Chunk, ExporterMessage, Introduce, Introduced, Probe, PullerMessage, PullFailed
from contracts.kv import BlockStore
from contracts.session import Source
from kv_transfer.offer import PROBE_CHUNKS
from kv_transfer.transports.base import Connection, Inlet, Transport
from protos.links.base import Duplex, Link, LinkClosed
from protos.patience import receive_within

_log = logging.getLogger(__name__)
PullerStream = Duplex[PullerMessage, ExporterMessage]


@dataclass(frozen=True, slots=True)
class Puller:
    """What a worker's side of all its links has in common. `measured` hears the rate of each link that was verified:
    transport, bytes a second (None: too fast for the clock). `probing`: who writes into the spare block, as all links
    are probed with the same one."""

    link: Link
    store: BlockStore
    transports: Mapping[str, Transport]
    config: TransferConfig
    worker_id: str
    secret: str = field(repr=False)
    measured: Callable[[str, float | None], None]
    probing: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True, slots=True)
class OpenInlet:
    """An inlet and the transport that it belongs to. `block_seconds`: what a block took on this line when the link was
    verified. `on_close` hears that the hand-over is over."""

    transport: str
    inlet: Inlet
    block_seconds: float
    on_close: Callable[[], None]

    def close(self, *, reuse: bool) -> None:
        """See Inlet.close. Once."""
        self.inlet.close(reuse=reuse)
        self.on_close()


@dataclass(frozen=True, slots=True)
class _Way:
    transport: str
    connection: Connection
    block_seconds: float


class Peer:
    """The link to one life of an exporter."""

    def __init__(self, source: Source, puller: Puller) -> None:
        self._source = source
        self._puller = puller
        self._way: _Way | None = None
        self._broken = asyncio.Event()
        self._setting_up = asyncio.Lock()
        self._users = 0
        self._replaced: list[Connection] = []  # not closed yet

    @property
    def used(self) -> bool:
        """Whether any hand-over goes over it."""
        return self._users > 0

    @property
    def verified(self) -> bool:
        """Whether a way has been found that works."""
        return self._way is not None

    async def verify(self) -> None:
        """Find a way, unless there is one. Raises PeerSilent, WorkerLost, or what the exporter answers: Stale,
        Incompatible, PullNotFound; HandoverFailed when no transport that both have works."""
        await self._find()

    async def broken(self) -> None:
        """Returns when the way that was found is lost."""
        await self._broken.wait()

    async def inlet(self) -> OpenInlet:
        """For one hand-over. A connection that has broken since is replaced, once. Raises as `verify`."""
        self._users += 1
        try:
            return await self._open()
        except BaseException:
            self._left()
            raise

    async def answers(self) -> bool:
        """Whether this life of the exporter is still there."""
        try:
            stream = await open_stream(self._puller, self._source)
        except PdserveError:
            return False
        try:
            await self._introduce(stream)
        except (PdserveError, LinkClosed):
            return False
        finally:
            await stream.close()
        return True

    async def close(self) -> None:
        """Break the connection. Idempotent."""
        async with self._setting_up:
            way, self._way = self._way, None
            if way is not None:
                self._replaced.append(way.connection)
            await self._close_replaced()

    async def _open(self) -> OpenInlet:
        way = await self._find()
        try:
            return await self._inlet(way)
        except LinkClosed as closed:
            _log.info("the %s link to worker %s broke: %s", way.transport, self._source.worker_id, closed)
        if self._way is way:
            self._way = None
            self._broken.set()
            self._replaced.append(way.connection)
            if self._users == 1:  # else another hand-over may go over it: a channel more is not to be had, that is all
                await self._close_replaced()
        way = await self._find()
        try:
            return await self._inlet(way)
        except LinkClosed as closed:
            raise self._lost(closed) from closed

    async def _inlet(self, way: _Way) -> OpenInlet:
        return OpenInlet(way.transport, await way.connection.inlet(), way.block_seconds, self._left)

    async def _close_replaced(self) -> None:
        while self._replaced:
            await self._replaced.pop().close()

    def _left(self) -> None:
        self._users -= 1

    async def _find(self) -> _Way:
        async with self._setting_up:  # whoever comes first sets it up, the others wait for it
            if self._way is None:
                self._way = await self._set_up()
                self._broken.clear()
            return self._way

    async def _set_up(self) -> _Way:
        """One stream for each transport that is tried: what is still in it after a failure concerns nobody."""
        worker, problems = self._source.worker_id, list[str]()
        for name, transport in self._puller.transports.items():
            stream = await open_stream(self._puller, self._source)
            try:
                addresses = await self._introduce(stream)
                if name not in addresses:
                    problems.append(f"{name} is not offered")
                    continue
                try:
                    return await self._try(stream, name, await transport.connect(addresses[name]))
                except (LinkClosed, HandoverFailed) as error:
                    problems.append(f"{name}: {error}")
                    _log.info("no %s link to worker %s: %s", name, worker, error)
            except LinkClosed as closed:
                raise self._lost(closed) from closed
            finally:
                await stream.close()
        raise HandoverFailed(f"no transport to worker {worker} works; {'; '.join(problems)}")

    async def _introduce(self, stream: PullerStream) -> dict[str, str]:
        """The exporter's addresses by transport."""
        me = self._puller
        await stream.send(Introduce(me.worker_id, me.secret, self._source.incarnation, me.store.layout))
        match await self._next(stream):
            case Introduced(endpoints):
                return {endpoint.transport: endpoint.address for endpoint in endpoints}
            case PullFailed(error):
                raise error.to_error()
            case other:
                raise HandoverFailed(f"an Introduce was answered with {type(other).__name__}")

    async def _try(self, stream: PullerStream, name: str, connection: Connection) -> _Way:
        """Raises HandoverFailed and LinkClosed when the connection does not bring what was sent."""
        try:
            seconds = await self._probe(stream, name, await connection.inlet())
        except BaseException:
            await connection.close()
            raise
        rate = self._puller.store.layout.block_bytes / seconds if seconds else None
        speed = "" if rate is None else f", {rate / 1e9:.2f} GB/s"
        _log.info("%s link to worker %s verified%s", name, self._source.worker_id, speed)
        self._puller.measured(name, rate)
        return _Way(name, connection, seconds)

    async def _probe(self, stream: PullerStream, name: str, inlet: Inlet) -> float:
        """Seconds that a block takes, as a rule: what only one of them was held up by says nothing about the line, nor
        does the first, whose pages are new."""
        loop = asyncio.get_running_loop()
        store = self._puller.store
        times: list[float] = []
        try:
            await stream.send(Probe(name, inlet.channel))
            for number in range(PROBE_CHUNKS):
                message = await self._next(stream)
                if isinstance(message, PullFailed):
                    raise message.error.to_error()
                if not isinstance(message, Chunk) or message.first_block != number:
                    raise HandoverFailed(f"chunk {number} of a probe was to come, not {type(message).__name__}")
                async with self._puller.probing:
                    came = await accept_within(inlet, message, [store.blocks + 1], self._puller.config.silence_seconds)
                if came != message.checksums:
                    raise Corrupt("the probe block arrived damaged")
                times.append(loop.time())
        finally:
            inlet.close(reuse=len(times) == PROBE_CHUNKS)
        return median(later - earlier for earlier, later in pairwise(times))

    async def _next(self, stream: PullerStream) -> ExporterMessage:
        seconds = self._puller.config.silence_seconds
        try:
            message = await receive_within(stream, seconds)
        except TimeoutError as error:
            raise PeerSilent(f"worker {self._source.worker_id} said nothing for {seconds:g} s") from error
        if message is None:
            raise LinkClosed("it ended the set-up of the link")
        return message

    def _lost(self, closed: LinkClosed) -> WorkerLost:
        return WorkerLost(f"worker {self._source.worker_id} is gone: {closed}")


async def open_stream(puller: Puller, source: Source) -> PullerStream:
    """A stream to an exporter. Raises PeerSilent, WorkerLost."""
    try:
        async with asyncio.timeout(puller.config.silence_seconds):
            return await puller.link.open_pull(source.address)
    except TimeoutError as error:
        raise PeerSilent(f"worker {source.worker_id} does not answer") from error
    except LinkClosed as closed:
        raise WorkerLost(f"worker {source.worker_id} is gone: {closed}") from closed


async def accept_within(inlet: Inlet, chunk: Chunk, blocks: Sequence[int], seconds: float) -> tuple[int, ...]:
    """inlet.accept, given up with PeerSilent when a chunk that was announced does not come."""
    try:
        async with asyncio.timeout(seconds):
            return await inlet.accept(chunk.payload, blocks)
    except TimeoutError as error:
        raise PeerSilent(f"blocks that were announced did not come in {seconds:g} s") from error
