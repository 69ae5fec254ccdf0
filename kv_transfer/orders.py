"""What a receiver is asked to fetch, and what came of it. Roles make orders; receiver.py carries them out."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from contracts.handover import Ended, Last
from contracts.kv import BlockHash
from contracts.requests import AttemptKey
from contracts.session import Source


@dataclass(frozen=True, slots=True)
class ReceiveOrder:
    """What an attempt needs. `blocks`: all blocks of the prompt, in order; the first `first_block` of them hold
    their content already. `kv_tokens`: tokens that they hold in the end. `deadline`: in the event loop's time."""

    key: AttemptKey
    ticket: bytes = field(repr=False)
    source: Source
    blocks: Sequence[int]
    first_block: int
    kv_tokens: int
    traceparent: str
    deadline: float


@dataclass(frozen=True, slots=True)
class FetchOrder:
    """What may be in another worker's cache: blocks by their content. `blocks` take it, in order; fewer may come."""

    key: AttemptKey
    source: Source
    blocks: Sequence[int]
    hashes: Sequence[BlockHash]
    traceparent: str
    deadline: float

    @property
    def first_block(self) -> int:
        return 0


Order = ReceiveOrder | FetchOrder


@dataclass(frozen=True, slots=True)
class TransferStats:
    """A finished hand-over: payload bytes and blocks; seconds in all, of those waited for messages, and from
    the start to the first block's arrival (None: no block was needed). `end` says how it ended."""

    end: Last | Ended
    transport: str
    bytes: int
    blocks: int
    seconds: float
    waited: float
    first_byte: float | None
