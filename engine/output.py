"""From token ids to what the client sees: text, logprobs, finish reason.

One OutputProcessor belongs to one sequence. Its results are a function of (prompt ids, generated ids), so
another worker that replays the ids goes on exactly where the first one stopped.
"""

from contracts.requests import FinishReason, SamplingParams, Token, TokenLogprobs
from text.detokenizer import Detokenizer
from text.stops import StopMatcher
from text.tokenizer import Tokenizer


class OutputProcessor:
    """Numbers, detokenises and ends a sequence's tokens."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: frozenset[int], sampling: SamplingParams) -> None:
        self._sampling = sampling
        self._end_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos_ids)
        self._banned = tuple(sorted(self._end_ids))
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopMatcher(sampling.stop, sampling.include_stop)
        self.position = 0

    @property
    def banned(self) -> tuple[int, ...]:
        """Token ids that the next position must not have: end tokens within the first min_tokens."""
        return self._banned if self.position < self._sampling.min_tokens else ()

    def replay(self, token_ids: tuple[int, ...]) -> None:
        """Take in tokens whose text was sent before."""
        for token_id in token_ids:
            self.push(token_id, None)

    def push(self, token_id: int, logprobs: TokenLogprobs | None) -> Token:
        """The next token. An end token adds no text; a stop string ends the text before (or behind) it;
        whatever was held back comes out with the last token."""
        self.position += 1
        past_minimum = self.position > self._sampling.min_tokens
        finish: FinishReason | None = None
        text, stopped = "", False
        if token_id in self._end_ids and past_minimum:
            finish = FinishReason.STOP
        else:
            text, stopped = self._match(self._detokenizer.push(token_id), past_minimum)
            if stopped:
                finish = FinishReason.STOP
            elif self.position >= self._sampling.max_tokens:
                finish = FinishReason.LENGTH
        if finish is not None and not stopped:
            text += self._flush(past_minimum)
            # a cut character that is flushed can complete nothing, so no stop can match any more
        return Token(self.position, token_id, text, logprobs, finish)

    def _match(self, text: str, past_minimum: bool) -> tuple[str, bool]:
        """Stop strings count only behind min_tokens tokens."""
        return self._stops.push(text) if past_minimum else (text, False)

    def _flush(self, past_minimum: bool) -> str:
        rest, stopped = self._match(self._detokenizer.flush(), past_minimum)
        return rest if stopped else rest + self._stops.flush()
