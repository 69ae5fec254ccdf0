"""Messages of one Pull: a decode worker (puller) fetches an attempt's blocks from an exporter.

Puller to exporter: Pull, then Alive each third of the lease, then Ack or Abandon. Exporter to puller:
Chunk and Progress while the prompt is computed, then exactly one of Last, Ended, PullFailed.
"""

from dataclasses import dataclass

from contracts.errors import ErrorInfo
from contracts.kv import KvLayout
from contracts.requests import AttemptKey, Token


@dataclass(frozen=True, slots=True)
class Pull:
    """Ask for the blocks of an attempt from `first_block` on. Served only with the router's `ticket`."""

    key: AttemptKey
    ticket: bytes
    incarnation: int  # of the exporter, as the router named it
    puller: str  # worker id
    secret: str
    layout: KvLayout
    transport: str
    first_block: int
    traceparent: str = ""


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


PullerMessage = Pull | Alive | Ack | Abandon


@dataclass(frozen=True, slots=True)
class Chunk:
    """Whole blocks, in order. `checksums` has one XXH3-64 per block; `payload` belongs to the transport
    (inline bytes for memory and grpc)."""

    first_block: int
    count: int
    checksums: tuple[int, ...]
    payload: bytes


@dataclass(frozen=True, slots=True)
class Progress:
    """Proof of life while nothing can be sent: tokens computed so far, requests queued ahead."""

    computed: int
    queued: int


@dataclass(frozen=True, slots=True)
class Last:
    """Commits the hand-over: the KV covers exactly `kv_tokens` tokens in `blocks` blocks; `digest` is
    XXH3-64 over all block checksums from Pull.first_block on (little-endian uint64)."""

    token: Token
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


ExporterMessage = Chunk | Progress | Last | Ended | PullFailed
