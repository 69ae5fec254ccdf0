"""Pairs of a prefill and a decode worker between which hand-overs fail: they are left alone for a while.

The service says how attempts ended, the ledger places around it. Without it a pair that fails at once would look idle,
and take every request until none may try again.
"""

import asyncio
from collections.abc import Callable

from router.attempt import Attempt
from router.ledger import Ledger, Pair

_FIRST_SECONDS = 0.1
_LONGEST_SECONDS = 2.0


class FailingPairs:
    """`on_room` is called when a pair may be tried again."""

    def __init__(self, ledger: Ledger, on_room: Callable[[], None]) -> None:
        self._ledger = ledger
        self._on_room = on_room
        self._failures: dict[Pair, int] = {}  # in a row

    def failed(self, attempt: Attempt) -> None:
        """An attempt was lost. Two workers that live and lose it before its KV has arrived are left alone; what was in
        work on them at the same time counts once."""
        pair = attempt.pair
        if pair is None or attempt.arrived or self._ledger.avoids(pair):
            return
        failures = self._failures[pair] = self._failures.get(pair, 0) + 1
        self._ledger.avoid(pair)
        seconds = min(_FIRST_SECONDS * 2 ** (failures - 1), _LONGEST_SECONDS)
        asyncio.get_running_loop().call_later(seconds, self._try_again, pair)

    def ended(self, attempt: Attempt) -> None:
        """However it ended: a hand-over that has arrived shows that the pair works."""
        if attempt.arrived and attempt.pair is not None:
            self._failures.pop(attempt.pair, None)

    def _try_again(self, pair: Pair) -> None:
        self._ledger.allow(pair)
        self._on_room()
