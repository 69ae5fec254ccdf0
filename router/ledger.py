"""The ledger: what each worker has free for new work, and the placement made from it.

The fleet opens one account per session, so a worker that came back starts from its Welcome. A dispatch
counts at once, not when the worker reports it. Plain synchronous code: no I/O, no clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from contracts.errors import Refused
from contracts.kv import blocks_for
from contracts.requests import AttemptKey
from contracts.session import Failed, WorkerFrame
from contracts.workers import Role, WorkerCapacity, WorkerLoad
from router.policies.base import Candidate, Policy


@dataclass(frozen=True, slots=True)
class Need:
    """What an attempt asks for. `tokens`: prompt and relayed tokens to compute; `growth`: room for generated
    tokens that the decode reservation holds from the start; `whole`: the prompt and all that may be generated;
    `roles`: the legs."""

    tokens: int
    growth: int
    whole: int
    roles: frozenset[Role]


@dataclass(slots=True)
class _Claim:
    """One leg's share of a worker. `answered`: the worker's own figures include it."""

    blocks: int
    tokens: int
    answered: bool = False


class WorkerAccount:
    """One worker as the router reckons it: its last report, minus what it cannot have reported yet."""

    def __init__(self, worker_id: str, role: Role, capacity: WorkerCapacity, load: WorkerLoad) -> None:
        self.worker_id = worker_id
        self.role = role
        self.capacity = capacity
        self.load = load
        self.draining = False  # as the registry says: it finishes what it has
        self._refused = False  # until its next frame: what it reported was not to be had
        self._claims: dict[AttemptKey, _Claim] = {}
        self._unanswered_blocks = 0
        self._unanswered = 0
        self._outstanding_tokens = 0

    @property
    def taking(self) -> bool:
        """Whether it takes new work, by all that is known."""
        return self.load.linked and not (self.draining or self.load.draining)

    @property
    def free_blocks(self) -> int:
        """Blocks that a new reservation can have."""
        return max(0, self.load.free_blocks - self._unanswered_blocks)

    @property
    def free_slots(self) -> int:
        """Sequences that can join."""
        return max(0, self.load.free_slots - self._unanswered)

    @property
    def backlog(self) -> int:
        """Prompt tokens that are not computed yet: ours, or everybody's if the worker reports more."""
        return max(self._outstanding_tokens, self.load.backlog_tokens)

    @property
    def placed(self) -> int:
        """Claims of this router."""
        return len(self._claims)

    def candidate(self) -> Candidate:
        """As the policies see it."""
        if self.role is Role.PREFILL:
            return Candidate(self.worker_id, self.backlog)
        return Candidate(self.worker_id, max(self.placed, self.load.running + self.load.waiting))

    def can_ever_hold(self, need: Need) -> bool:
        """Whether the empty worker has room for it to its end. It may ask for a token more than the worker
        itself would: the KV of the last one is never needed."""
        tokens = need.whole if self.role is Role.DECODE else need.tokens
        blocks = blocks_for(tokens, self.capacity.layout.block_size)
        return self.taking and need.whole <= self.capacity.max_context and blocks <= self.capacity.blocks

    def has_room(self, need: Need) -> bool:
        """Whether the need can be dispatched in this moment. An idle prefill worker takes any prompt."""
        if self._refused or not self.can_ever_hold(need):
            return False
        if self.role is Role.PREFILL:
            return self.backlog < self.capacity.backlog_tokens
        return self._blocks(need) <= self.free_blocks and self.free_slots >= 1

    def claim(self, key: AttemptKey, need: Need) -> None:
        """Count a dispatch."""
        assert key not in self._claims
        claim = _Claim(self._blocks(need), need.tokens)
        self._claims[key] = claim
        self._unanswered_blocks += claim.blocks
        self._unanswered += 1
        self._outstanding_tokens += claim.tokens

    def release(self, key: AttemptKey) -> None:
        """The leg needs nothing more: its prompt is computed (prefill), or it ended. Exactly once per claim."""
        claim = self._claims.pop(key)
        self._outstanding_tokens -= claim.tokens
        if not claim.answered:
            self._settle(claim)

    def frame(self, frame: WorkerFrame) -> None:
        """A report: the load in it includes every attempt that it has an event of."""
        self.load = frame.load
        self._refused = False
        for event in frame.events:
            claim = self._claims.get(event.key)
            if claim is not None and not claim.answered:
                claim.answered = True
                self._settle(claim)
            if isinstance(event, Failed) and event.error.code == Refused.code:
                self._refused = True

    def check(self) -> None:
        """Assert the sums against a recount."""
        waiting = [claim for claim in self._claims.values() if not claim.answered]
        assert self._unanswered == len(waiting), "unanswered dispatches drifted"
        assert self._unanswered_blocks == sum(claim.blocks for claim in waiting), "unanswered blocks drifted"
        assert self._outstanding_tokens == sum(c.tokens for c in self._claims.values()), "outstanding tokens drifted"

    def _blocks(self, need: Need) -> int:
        growth = need.growth if self.role is Role.DECODE else 0
        return blocks_for(need.tokens + growth, self.capacity.layout.block_size)

    def _settle(self, claim: _Claim) -> None:
        self._unanswered_blocks -= claim.blocks
        self._unanswered -= 1


Pair = tuple[str, str]
"""Ids of a prefill and a decode worker."""


class Ledger:
    """All accounts, by worker id, and the choice among them."""

    def __init__(self, policies: Mapping[Role, Policy]) -> None:
        self._policies = policies
        self._accounts: dict[str, WorkerAccount] = {}
        self._avoided: set[Pair] = set()

    def open(self, account: WorkerAccount) -> None:
        """A session began. Replaces nothing: the account of an earlier life was closed."""
        assert account.worker_id not in self._accounts
        self._accounts[account.worker_id] = account

    def close(self, account: WorkerAccount) -> None:
        """The session ended; claims that are still released later touch nobody."""
        del self._accounts[account.worker_id]

    def accounts(self, role: Role) -> list[WorkerAccount]:
        """Workers of a role that take new work."""
        return [account for account in self._accounts.values() if account.role is role and account.taking]

    def can_ever_hold(self, need: Need) -> bool:
        """Whether the workers of this moment, once empty, could take the need."""
        return all(any(account.can_ever_hold(need) for account in self.accounts(role)) for role in need.roles)

    def avoid(self, pair: Pair) -> None:
        """Place nothing on these two together, until `allow`."""
        self._avoided.add(pair)

    def allow(self, pair: Pair) -> None:
        """Take an `avoid` back. Idempotent."""
        self._avoided.discard(pair)

    def avoids(self, pair: Pair) -> bool:
        """Whether nothing is placed on these two together."""
        return pair in self._avoided

    def place(self, key: AttemptKey, need: Need) -> dict[Role, str] | None:
        """Worker ids by role, claimed at once; None while some role has no room, or only pairs to avoid have."""
        candidates = {
            role: sorted(
                (account.candidate() for account in self.accounts(role) if account.has_room(need)),
                key=lambda candidate: candidate.worker_id,
            )
            # prefill first, and in order, so that a run can be repeated
            for role in sorted(need.roles, key=lambda role: role.value, reverse=True)
        }
        if self._avoided and Role.PREFILL in candidates and Role.DECODE in candidates:
            prefill, decode = candidates[Role.PREFILL], candidates[Role.DECODE]
            candidates[Role.PREFILL] = [
                p for p in prefill if not all(self.avoids((p.worker_id, d.worker_id)) for d in decode)
            ]
        if not all(candidates.values()):
            return None
        chosen: dict[Role, str] = {}
        for role, fit in candidates.items():
            partners = fit
            if role is Role.DECODE and Role.PREFILL in chosen:
                partners = [d for d in fit if not self.avoids((chosen[Role.PREFILL], d.worker_id))]
            chosen[role] = self._policies[role].choose(partners).worker_id
        for worker_id in chosen.values():
            self._accounts[worker_id].claim(key, need)
        return chosen

    def check(self) -> None:
        """Assert the books of every account."""
        for account in self._accounts.values():
            account.check()
