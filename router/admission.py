"""Whether a request can ever be served: the permanent bounds, as against a lack of room at the moment.

Called by the service before a request may wait. Pure functions over the capacities of the live workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from contracts.errors import ContextLengthExceeded, InvalidRequest, KvCapacityExceeded
from contracts.workers import WorkerCapacity


@dataclass(frozen=True, slots=True)
class Bounds:
    """Tokens that fit: in the model's context, and in the pool of the largest worker of each role.
    `prefill_tokens` None: decode workers compute the prompts."""

    context: int
    decode_tokens: int
    prefill_tokens: int | None

    @property
    def most_tokens(self) -> int:
        """Prompt and generated tokens that every attempt of a request can hold, also one that starts again
        with all but its last token."""
        pools = (self.decode_tokens,) if self.prefill_tokens is None else (self.decode_tokens, self.prefill_tokens)
        return min(self.context, *pools)


def bounds_of(decode: Sequence[WorkerCapacity], prefill: Sequence[WorkerCapacity] | None) -> Bounds:
    """Of at least one decode worker and, unless None, at least one prefill worker."""
    context = max(capacity.max_context for capacity in decode)
    if prefill is None:
        return Bounds(context, _largest_pool(decode), None)
    context = min(context, max(capacity.max_context for capacity in prefill))
    return Bounds(context, _largest_pool(decode), _largest_pool(prefill))


def clamp_max_tokens(prompt: int, max_tokens: int, bounds: Bounds) -> int:
    """`max_tokens`, cut to what the context leaves after a prompt of so many tokens.

    Raises InvalidRequest (no prompt, or no token asked for), ContextLengthExceeded (the prompt leaves no room
    for one token) or KvCapacityExceeded (no worker's pool could ever hold it), naming the numbers.
    """
    if prompt < 1:
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    if max_tokens < 1:
        raise InvalidRequest(f"max_tokens must be at least 1, not {max_tokens}", param="max_tokens")
    if prompt >= bounds.context:
        raise ContextLengthExceeded(
            f"the prompt has {prompt} tokens; the context of {bounds.context} tokens must leave room for one more",
            param="prompt",
        )
    max_tokens = min(max_tokens, bounds.context - prompt)
    if bounds.prefill_tokens is not None and prompt > bounds.prefill_tokens:
        raise KvCapacityExceeded(
            f"the prompt has {prompt} tokens; the KV pool of a prefill worker holds {bounds.prefill_tokens}",
            param="prompt",
        )
    decodes = bounds.prefill_tokens is None or max_tokens > 1
    if decodes and prompt + max_tokens > bounds.decode_tokens:
        raise KvCapacityExceeded(
            f"{prompt} prompt tokens and {max_tokens} to generate; the KV pool of a decode worker holds "
            f"{bounds.decode_tokens} tokens",
            param="max_tokens" if prompt < bounds.decode_tokens else "prompt",
        )
    return max_tokens


def _largest_pool(capacities: Sequence[WorkerCapacity]) -> int:
    return max(capacity.blocks * capacity.layout.block_size for capacity in capacities)
