"""Messages of the session between a router and a worker: one bidirectional stream per pair.

Router to worker: Hello, then Submit and Cancel. Worker to router: Welcome, then at most one WorkerFrame
per engine step. The end of the stream is a cancel of everything that came over it. All messages are
idempotent and carry their attempt.
"""

from dataclasses import dataclass, field

from contracts.errors import ErrorInfo
from contracts.requests import AttemptKey, SamplingParams, Token
from contracts.workers import WorkerCapacity, WorkerInfo, WorkerLoad


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a session. `secret` is the cluster secret ("" when there is none)."""

    router_id: str
    router_incarnation: int
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a decode worker pulls the prompt's KV from."""

    worker_id: str
    address: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Submit:
    """Start one leg of an attempt.

    On a prefill worker: compute prompt + relayed up to the next token and export the blocks. On a decode
    worker: reserve, pull from `source` and go on; without a source compute the prompt here.
    `relayed` are token ids that earlier attempts already sent to the client; the next position is
    len(relayed) + 1. `deadline_ms` is what remains. `incarnation` is the worker's the router means. `prefix` names a
    worker that may have the prompt's KV in its cache: what is missing here is fetched from there before it is
    computed.
    """

    key: AttemptKey
    incarnation: int
    ticket: bytes = field(repr=False)
    prompt_ids: tuple[int, ...]
    relayed: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str
    deadline_ms: int
    traceparent: str
    source: Source | None = None
    prefix: Source | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop an attempt in whatever state it is. Unknown attempts are fine."""

    key: AttemptKey
    reason: str


RouterMessage = Hello | Submit | Cancel


@dataclass(frozen=True, slots=True)
class Welcome:
    """A worker's answer to Hello; `load` as of this moment."""

    worker: WorkerInfo
    capacity: WorkerCapacity
    load: WorkerLoad


@dataclass(frozen=True, slots=True)
class Reserved:
    """A decode worker holds blocks and a slot for the attempt."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens of one attempt in order of position. `cached_tokens`: see Output; set by the leg that
    computed the prompt."""

    key: AttemptKey
    tokens: tuple[Token, ...]
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """The leg ended with an error. AttemptFailed and its kinds may be placed again; Refused is one."""

    key: AttemptKey
    error: ErrorInfo


WorkerEvent = Reserved | Tokens | Failed


@dataclass(frozen=True, slots=True)
class WorkerFrame:
    """What happened since the last frame for this router, and the load after it."""

    load: WorkerLoad
    events: tuple[WorkerEvent, ...] = ()


WorkerMessage = Welcome | WorkerFrame
