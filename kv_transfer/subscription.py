"""One Pull or Fetch as the exports and the task that serves it share it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from contracts.handover import Ended, Fetch, Pull, PullFailed
from contracts.requests import AttemptKey, Token


@dataclass(slots=True, eq=False)
class Export:
    """The blocks of one attempt on their way out. Only Exports changes it; see the table there.

    `ready`: leading blocks that may be sent. `complete`: nothing will be added to them. `lease_ends` None: no lease
    runs. Times are the event loop's.
    """

    key: AttemptKey
    ticket: bytes
    deadline: float
    timer: asyncio.TimerHandle
    blocks: Sequence[int] | None = None  # pinned while not None
    computed: int = 0
    ready: int = 0
    complete: bool = False
    token: Token | None = None
    kv_tokens: int = 0
    lease_ends: float | None = None
    subscription: "Subscription | None" = None


@dataclass(slots=True, eq=False)
class Subscription:
    """`export` None: parked until the attempt's Submit comes. `changed` is set when there may be something to
    send. Once `over` is set nothing may be sent but `final`, what the puller must still be told (None:
    nothing, it is the one who left)."""

    pull: Pull | Fetch
    export: Export | None = None
    timer: asyncio.TimerHandle | None = None  # runs while parked
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    final: Ended | PullFailed | None = None

    @property
    def first_block(self) -> int:
        """The first of the export's blocks that the puller asks for."""
        return self.pull.first_block if isinstance(self.pull, Pull) else 0

    def end(self, final: Ended | PullFailed | None) -> None:
        """Only the first end counts."""
        if self.over.is_set():
            return
        if self.timer is not None:
            self.timer.cancel()
        self.final = final
        self.over.set()
        self.changed.set()
