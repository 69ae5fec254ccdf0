"""A request inside an engine: its tokens, how many of them have KV, and its block table.

The scheduler moves sequences between waiting and running; the loop appends tokens. No torch, no clock.
"""

import numpy as np
import numpy.typing as npt

from contracts.kv import BlockHash, BlockHasher, blocks_for
from contracts.requests import AttemptKey, SamplingParams, Token, TokenLogprobs
from engine.block_manager import Holder, HolderKind
from engine.output import OutputProcessor
from engine.runners.base import Draw


class Sequence:
    """`tokens` are the prompt, the tokens relayed by earlier attempts, and those generated here.

    `computed` of them have KV; the sequence catches up to len(tokens), then a token is drawn. It has no
    phase: a prompt is many missing tokens, decoding is one. With `one_token` it ends at the first token
    drawn (a prefill worker's sequence). `reserve_tokens`: it holds blocks for at least so many tokens while it
    runs.
    """

    def __init__(
        self,
        key: AttemptKey,
        context: tuple[int, ...],
        sampling: SamplingParams,
        output: OutputProcessor,
        *,
        hasher: BlockHasher,
        salt: str,
        block_size: int,
        one_token: bool,
        reserve_tokens: int = 0,
    ) -> None:
        self.key = key
        self.holder = Holder(HolderKind.SEQUENCE, key)
        self.tokens = list(context)
        self.context_tokens = len(context)
        self.sampling = sampling
        self.output = output
        self.one_token = one_token
        self.reserve_tokens = max(reserve_tokens, len(context))
        self.computed = 0
        self.handed_over = 0  # leading tokens whose KV came from another worker
        self.cached_tokens = 0
        self.preemptions = 0
        self.order = 0
        self._block_size = block_size
        self._hasher = hasher
        self._hashes: list[BlockHash] = []
        self._root = hasher.root(salt)
        self._sealed = 0
        most = len(context) + sampling.max_tokens - output.position
        self._blocks: npt.NDArray[np.int64] = np.zeros(blocks_for(most, block_size), dtype=np.int64)
        self._block_count = 0

    @property
    def missing(self) -> int:
        """Tokens without KV."""
        return len(self.tokens) - self.computed

    @property
    def beyond_reserve(self) -> bool:
        """Whether it has outgrown what it holds from the start."""
        return len(self.tokens) > self.reserve_tokens

    @property
    def block_table(self) -> npt.NDArray[np.int64]:
        """Its blocks in order of position (a view, int64)."""
        return self._blocks[: self._block_count]

    def blocks_missing(self, tokens: int) -> int:
        """How many blocks the table lacks to hold `tokens` tokens."""
        return max(0, blocks_for(tokens, self._block_size) - self._block_count)

    def append_blocks(self, blocks: list[int]) -> None:
        """The holder's table in the block manager has grown by `blocks`."""
        self._blocks[self._block_count : self._block_count + len(blocks)] = blocks
        self._block_count += len(blocks)

    def drop_blocks(self) -> None:
        """Its blocks were released (preemption): all KV must be made again."""
        self._block_count = 0
        self._sealed = 0
        self.computed = 0

    def hashes(self, tokens: int) -> list[BlockHash]:
        """Content hashes of the full blocks among the first `tokens` tokens."""
        full = tokens // self._block_size
        while len(self._hashes) < full:
            start = len(self._hashes) * self._block_size
            parent = self._hashes[-1] if self._hashes else self._root
            self._hashes.append(self._hasher.extend(parent, self.tokens[start : start + self._block_size]))
        return self._hashes[:full]

    def newly_full(self) -> list[tuple[int, BlockHash]]:
        """Blocks (with hash) that `computed` has filled since the last call."""
        full = self.computed // self._block_size
        if full == self._sealed:
            return []
        hashes = self.hashes(self.computed)
        filled = [(int(self._blocks[i]), hashes[i]) for i in range(self._sealed, full)]
        self._sealed = full
        return filled

    def draw(self) -> Draw:
        """How the token behind the last one is drawn."""
        sampling = self.sampling
        return Draw(
            seed=sampling.seed,
            position=self.output.position + 1,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            logprobs=sampling.logprobs,
            banned=self.output.banned,
        )

    def append(self, token_id: int, logprobs: TokenLogprobs | None) -> Token:
        """A drawn (or handed over) token joins the sequence."""
        self.tokens.append(token_id)
        return self.output.push(token_id, logprobs)
