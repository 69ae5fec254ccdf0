"""Messages between a puller (a worker that needs KV blocks) and an exporter (one that has them), on one stream.

A hand-over. Puller: Pull, then Alive each third of the lease, then Ack or Abandon. Exporter: Chunk and Progress while
the prompt is computed, then exactly one of Last, Ended, PullFailed.

Cached blocks by their content, from whatever worker has them. Puller: Fetch instead of Pull; the rest is the same.

A link is set up and verified before the first hand-over. Puller: Introduce. Exporter: Introduced, or PullFailed.
Puller: Probe. Exporter: a fixed number of Chunks of its probe block. Puller: further Probes, or the stream's end.
"""

from dataclasses import dataclass, field

from contracts.errors import ErrorInfo
from contracts.kv import BlockHash, KvLayout
from contracts.requests import AttemptKey, Token


@dataclass(frozen=True, slots=True)
class Introduce:
    """Who wants to pull, and into what. `incarnation` is the exporter's, as the registry or the router named it."""

    puller: str  # worker id
    secret: str = field(repr=False)
    incarnation: int
    layout: KvLayout


@dataclass(frozen=True, slots=True)
class Probe:
    """Send the probe block over this transport: what arrives must be what was sent."""

    transport: str
    channel: bytes = b""


@dataclass(frozen=True, slots=True)
class Pull:
    """Ask for the blocks of an attempt from `first_block` on. Served only with the router's `ticket`. `channel` names
    the transport's connection that the bytes shall take."""

    key: AttemptKey
    ticket: bytes = field(repr=False)
    incarnation: int  # of the exporter, as the router named it
    puller: str  # worker id
    secret: str = field(repr=False)
    layout: KvLayout
    transport: str
    first_block: int
    traceparent: str = ""
    channel: bytes = b""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Ask for cached blocks by content: the longest run of `hashes`, from the first on, that the exporter has. The
    hashes are keyed, so knowing them is the permission. `key` names this fetch; `deadline_ms` is what remains."""

    key: AttemptKey
    hashes: tuple[BlockHash, ...] = field(repr=False)
    deadline_ms: int
    incarnation: int  # of the exporter
    puller: str  # worker id
    secret: str = field(repr=False)
    layout: KvLayout
    transport: str
    traceparent: str = ""
    channel: bytes = b""


@dataclass(frozen=True, slots=True)
class Alive:
    """Renews the lease of the export, never beyond the request's deadline."""


@dataclass(frozen=True, slots=True)
class Ack:
    """The blocks are committed; the exporter may let go."""


@dataclass(frozen=True, slots=True)
class Abandon:
    """The puller gives up (cancel, failure); the exporter may let go."""

    reason: str


PullerMessage = Introduce | Probe | Pull | Fetch | Alive | Ack | Abandon


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One way to an exporter's blocks. `address` belongs to the transport, and may hold a key."""

    transport: str
    address: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Introduced:
    """The ways that the exporter offers."""

    endpoints: tuple[Endpoint, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Whole blocks, in order. `checksums` has one per block (XXH3-64, for nccl a sum); `payload` belongs to the
    transport (inline bytes for memory and grpc)."""

    first_block: int
    count: int
    checksums: tuple[int, ...]
    payload: bytes | memoryview


@dataclass(frozen=True, slots=True)
class Progress:
    """Proof of life while nothing can be sent: tokens computed so far, requests queued ahead."""

    computed: int
    queued: int


@dataclass(frozen=True, slots=True)
class Last:
    """Commits the hand-over: the KV covers exactly `kv_tokens` tokens in `blocks` blocks; `digest` is
    XXH3-64 over all block checksums from Pull.first_block on (little-endian uint64). `token` is the first one that
    was generated; None after a Fetch, which has none."""

    token: Token | None
    kv_tokens: int
    blocks: int
    digest: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The first token ended the request: nothing to decode, release."""


@dataclass(frozen=True, slots=True)
class PullFailed:
    """This pull cannot succeed (HandoverFailed kinds) or the prefill failed (EngineFailed, Cancelled)."""

    error: ErrorInfo


ExporterMessage = Introduced | Chunk | Progress | Last | Ended | PullFailed
