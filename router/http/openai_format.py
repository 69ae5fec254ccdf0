"""How an answer looks on the two OpenAI routes, whole and streamed.

Called by openai_routes.py. Runs once per token of every stream, so it assembles plain dicts for orjson.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from contracts.requests import FinishReason, Token
from router.answer import Tally
from router.http.event_stream import event
from text.tokenizer import Tokenizer

_LEAST_LOGPROB = -9999.0
"""What OpenAI reports for a probability of zero; JSON has no infinity."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Heading:
    """What every object of one answer repeats. `created` in seconds since 1970."""

    id: str
    created: int
    model: str


class Format(Protocol):
    """The form of one answer. Streaming methods return whole events; `opening` comes with the first."""

    def opening(self) -> bytes: ...

    def delta(self, tokens: Sequence[Token]) -> bytes:
        """What these tokens add; b"" when a client would see nothing."""

    def ending(self, finish: FinishReason) -> bytes: ...

    def usage(self, tally: Tally) -> bytes:
        """The chunk of stream_options.include_usage."""

    def whole(self, tokens: Sequence[Token], tally: Tally) -> bytes:
        """The answer as one JSON object. Raises PdserveError when it has no finish reason."""


class ChatFormat:
    """POST /v1/chat/completions."""

    def __init__(self, heading: Heading, tokenizer: Tokenizer, logprobs: bool) -> None:
        self._chunk = _object(heading, "chat.completion.chunk")
        self._whole = _object(heading, "chat.completion")
        self._tokenizer = tokenizer
        self._logprobs = logprobs

    def opening(self) -> bytes:
        return self._event({"role": "assistant", "content": ""}, None, None)

    def delta(self, tokens: Sequence[Token]) -> bytes:
        text = _text(tokens)
        if not text and not self._logprobs:
            return b""
        return self._event({"content": text}, self._logprobs_of(tokens), None)

    def ending(self, finish: FinishReason) -> bytes:
        return self._event({}, None, finish.value)

    def usage(self, tally: Tally) -> bytes:
        return event(orjson.dumps(self._chunk | {"choices": [], "usage": _usage(tally)}))

    def whole(self, tokens: Sequence[Token], tally: Tally) -> bytes:
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": _text(tokens), "refusal": None},
            "logprobs": self._logprobs_of(tokens),
            "finish_reason": tally.finish().value,
        }
        return orjson.dumps(self._whole | {"choices": [choice], "usage": _usage(tally)})

    def _event(self, delta: Json, logprobs: Json | None, finish: str | None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return event(orjson.dumps(self._chunk | {"choices": [choice]}))

    def _logprobs_of(self, tokens: Sequence[Token]) -> Json | None:
        if not self._logprobs:
            return None
        content = [
            self._entry(token.token_id, token.logprobs.logprob)
            | {"top_logprobs": [self._entry(token_id, logprob) for token_id, logprob in token.logprobs.top]}
            for token in tokens
            if token.logprobs is not None
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> Json:
        return {
            "token": self._tokenizer.token_text(token_id),
            "logprob": max(logprob, _LEAST_LOGPROB),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }


class CompletionFormat:
    """POST /v1/completions. `text_offset` counts characters of the answer, also across chunks."""

    def __init__(self, heading: Heading, tokenizer: Tokenizer, logprobs: bool) -> None:
        self._object = _object(heading, "text_completion")
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._offset = 0

    def opening(self) -> bytes:
        return b""

    def delta(self, tokens: Sequence[Token]) -> bytes:
        text = _text(tokens)
        if not text and not self._logprobs:
            return b""
        return self._event(text, self._logprobs_of(tokens), None)

    def ending(self, finish: FinishReason) -> bytes:
        return self._event("", None, finish.value)

    def usage(self, tally: Tally) -> bytes:
        return event(orjson.dumps(self._object | {"choices": [], "usage": _usage(tally)}))

    def whole(self, tokens: Sequence[Token], tally: Tally) -> bytes:
        choice = self._choice(_text(tokens), self._logprobs_of(tokens), tally.finish().value)
        return orjson.dumps(self._object | {"choices": [choice], "usage": _usage(tally)})

    def _event(self, text: str, logprobs: Json | None, finish: str | None) -> bytes:
        return event(orjson.dumps(self._object | {"choices": [self._choice(text, logprobs, finish)]}))

    def _choice(self, text: str, logprobs: Json | None, finish: str | None) -> Json:
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs_of(self, tokens: Sequence[Token]) -> Json | None:
        if not self._logprobs:
            return None
        texts, logprobs, tops, offsets = [], [], [], []
        for token in tokens:
            if token.logprobs is not None:
                texts.append(self._tokenizer.token_text(token.token_id))
                logprobs.append(max(token.logprobs.logprob, _LEAST_LOGPROB))
                tops.append(self._top(token.logprobs.top))
                offsets.append(self._offset)
            self._offset += len(token.text)
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Best first. Of two tokens with one text the better one stays."""
        named: dict[str, float] = {}
        for token_id, logprob in top:
            named.setdefault(self._tokenizer.token_text(token_id), max(logprob, _LEAST_LOGPROB))
        return named


MakeFormat = Callable[[Heading, Tokenizer, bool], Format]


def _object(heading: Heading, kind: str) -> Json:
    return {"id": heading.id, "object": kind, "created": heading.created, "model": heading.model}


def _text(tokens: Sequence[Token]) -> str:
    return "".join(token.text for token in tokens)


def _usage(tally: Tally) -> Json:
    return {
        "prompt_tokens": tally.prompt_tokens,
        "completion_tokens": tally.completion_tokens,
        "total_tokens": tally.prompt_tokens + tally.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": tally.cached_tokens},
    }
