"""The router of a hand-over's machines: it places attempts on both workers by messages that arrive in any order."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from hypothesis import strategies as st

from contracts.requests import AttemptKey
from tests.helpers.handover import BLOCK_SIZE
from tests.helpers.handover_workers import PROMPT_BLOCKS, Attempt, Life

FATES = st.sampled_from(["arrives"] * 6 + ["twice", "lost"])
"""What becomes of a message."""
ATTEMPTS = st.fixed_dictionaries(
    {
        "tokens": st.integers(1, PROMPT_BLOCKS * BLOCK_SIZE),
        "seconds": st.sampled_from([60.0, 60.0, 4.0, 1.0]),
        "right": st.sampled_from([True] * 5 + [False]),
        "ends": st.sampled_from([False] * 5 + [True]),
        "behind": st.sampled_from([0] * 7 + [1]),
        "instead": st.booleans(),
        "legs": st.sampled_from(["pd", "dp", "pd", "dp", "d", "p", "dpd"]),
    }
)
"""An attempt as `Router.start` makes it. `behind`: so many lives ago the router heard of the prefill worker.
`instead`: of the attempt before, which is cancelled. `legs`: the Submits to prefill and decode in the order in which
they come; those that are not named are lost."""
BACK = st.integers(0, 3)
"""Which attempt, counted from the newest."""


class Workers(Protocol):
    """What the router's messages reach."""

    @property
    def life(self) -> Life:
        """The prefill worker as it is at that moment."""

    def reserve(self, attempt: Attempt) -> None: ...

    def cancel_decode(self, key: AttemptKey) -> None: ...


@dataclass(slots=True)
class Router:
    """`posts`: messages under way."""

    workers: Workers
    loop: asyncio.AbstractEventLoop
    attempts: list[Attempt] = field(default_factory=list)
    posts: list[Callable[[], None]] = field(default_factory=list)

    def start(
        self, *, tokens: int, seconds: float, right: bool, ends: bool, behind: int, instead: bool, legs: str
    ) -> None:
        """A new attempt at a new request, or at the one before."""
        if instead and self.attempts:
            self.cancel(0, prefill=True, decode=True, at_once=True)
        number = len(self.attempts)
        key = AttemptKey(f"1-{number // 2}", 1 + number % 2)
        ticket, deadline = b"ticket %d" % number, self.loop.time() + seconds
        shown = ticket if right else b"guess"
        incarnation = self.workers.life.incarnation - behind
        attempt = Attempt(key, incarnation, ticket, shown, tokens, ends, deadline)
        self.attempts.append(attempt)
        submits = {"p": lambda: self.workers.life.submit(attempt), "d": lambda: self.workers.reserve(attempt)}
        self.posts += [submits[leg] for leg in legs]

    def deliver(self, which: int, fate: str = "arrives") -> None:
        if which >= len(self.posts):
            return
        message = self.posts.pop(which)
        for _ in range({"lost": 0, "arrives": 1, "twice": 2}[fate]):
            message()

    def cancel(self, back: int, *, prefill: bool, decode: bool, at_once: bool) -> None:
        key = self.attempt(back).key
        before = len(self.posts)
        if prefill:
            self.posts.append(lambda: self.workers.life.cancel(key))
        if decode:
            self.posts.append(lambda: self.workers.cancel_decode(key))
        while at_once and len(self.posts) > before:
            self.deliver(before)

    def refused(self, key: AttemptKey) -> None:
        """The decode worker has no room."""
        self.posts.append(lambda: self.workers.life.cancel(key))

    def place_prefill_again(self, back: int) -> None:
        """A router that is confused: the same attempt, on the life that there is."""
        life = self.workers.life
        life.submit(replace(self.attempt(back), incarnation=life.incarnation))

    def attempt(self, back: int) -> Attempt:
        return self.attempts[-1 - back % len(self.attempts)]
