"""What a request may ask for: the permanent bounds, as against a lack of room at the moment.

Called by the service before a request may wait. Pure functions over the capacities of the live workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from contracts.errors import ContextLengthExceeded, InvalidRequest, KvCapacityExceeded
from contracts.workers import WorkerCapacity


@dataclass(frozen=True, slots=True)
class Bounds:
    """Tokens that fit: in the longest context, and in the roomiest worker of each role. `prefill_tokens` None:
    decode workers compute the prompts."""

    context: int
    decode_tokens: int
    prefill_tokens: int | None

    @property
    def most_tokens(self) -> int:
        """Prompt and generated tokens that every attempt of a request can hold, also one that starts again
        with all but its last token."""
        return self.decode_tokens if self.prefill_tokens is None else min(self.decode_tokens, self.prefill_tokens)

    def too_large(self, prompt: int, max_tokens: int) -> KvCapacityExceeded:
        """The error of a request that no worker could ever hold, with the numbers."""
        held = f"a decode worker holds {self.decode_tokens} tokens"
        if self.prefill_tokens is not None:
            held += f", a prefill worker {self.prefill_tokens}"
        prompt_fits = prompt < self.decode_tokens and prompt <= (self.prefill_tokens or prompt)
        return KvCapacityExceeded(
            f"{prompt} prompt tokens and {max_tokens} to generate: the KV pool of {held}",
            param="max_tokens" if prompt_fits else "prompt",
        )


def bounds_of(decode: Sequence[WorkerCapacity], prefill: Sequence[WorkerCapacity] | None) -> Bounds:
    """Of at least one decode worker and, unless None, at least one prefill worker."""
    context = max(capacity.max_context for capacity in decode)
    if prefill is None:
        return Bounds(context, _most_tokens(decode), None)
    context = min(context, max(capacity.max_context for capacity in prefill))
    return Bounds(context, _most_tokens(decode), _most_tokens(prefill))


def clamp_max_tokens(prompt: int, max_tokens: int, context: int) -> int:
    """`max_tokens`, cut to what the context leaves after a prompt of so many tokens.

    Raises InvalidRequest (no prompt, or no token asked for) or ContextLengthExceeded (the prompt leaves no room
    for one token), naming the numbers.
    """
    if prompt < 1:
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    if max_tokens < 1:
        raise InvalidRequest(f"max_tokens must be at least 1, not {max_tokens}", param="max_tokens")
    if prompt >= context:
        raise ContextLengthExceeded(
            f"the prompt has {prompt} tokens; the context of {context} tokens must leave room for one more",
            param="prompt",
        )
    return min(max_tokens, context - prompt)


def _most_tokens(capacities: Sequence[WorkerCapacity]) -> int:
    return max(min(c.max_context, c.blocks * c.layout.block_size) for c in capacities)
