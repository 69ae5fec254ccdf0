"""A request of either frontend, checked and completed: the one place that decides what a field may hold.

Called by router/http/ and router/grpc_frontend.py with a Draft. Knows neither JSON nor protobuf.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from contracts.errors import ContextLengthExceeded, DeadlineExceeded, InvalidRequest, ModelNotFound
from contracts.requests import GenerateRequest, SamplingParams
from router.answer import Service
from router.text_service import TextService

_COMPLETION_TOKENS = 16
MOST_MESSAGES = 4096
MOST_STOP_TOKENS = 128
_STOP_STRINGS = 16
_STOP_LENGTH = 1024
_STOP_LENGTHS = 4096
_TOP_LOGPROBS = 20
_SEEDS = 1 << 63
_SHOWN = 64
"""Characters of a caller's text that an error message repeats."""
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Who may speak, and what the template calls them."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation. Each message has "role" and "content", and may have "name" and "tool_call_id"."""

    messages: Sequence[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Draft:
    """What a caller asked for, with the types checked and nothing else. None: absent, use the default.

    `prompt` is raw text, token ids, or a conversation; `arrived` is the loop time at which the request began
    to come in, `timeout` its seconds from there.
    """

    model: str
    prompt: str | Sequence[int] | Chat
    arrived: float
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    min_tokens: int | None = None
    stop: Sequence[str] = ()
    include_stop: bool = False
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    traceparent: str = ""
    timeout: float | None = None


class RequestParser:
    """Makes a GenerateRequest of a Draft, or raises the error that its caller should see."""

    def __init__(
        self,
        service: Service,
        text: TextService,
        *,
        model: str,
        vocab_size: int,
        max_context: int,
        request_seconds: float,
    ) -> None:
        self._service = service
        self._text = text
        self._model = model
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._request_seconds = request_seconds

    async def parse(self, draft: Draft) -> GenerateRequest:
        """The request with defaults filled in and limits applied.

        Raises ModelNotFound, InvalidRequest naming the parameter, ContextLengthExceeded, Overloaded and
        DeadlineExceeded while its text waits to be read, and NotReady when a default depends on workers that are
        not there.
        """
        if draft.model != self._model:
            raise ModelNotFound(
                f"the model {draft.model[:_SHOWN]!r} does not exist; this is {self._model!r}", param="model"
            )
        self._check_sampling(draft)
        timeout = self._request_seconds if draft.timeout is None else min(draft.timeout, self._request_seconds)
        deadline = draft.arrived + timeout
        async with until(deadline):
            prompt_ids = await self._prompt_ids(draft.prompt)
        max_tokens = self._max_tokens(draft, len(prompt_ids))
        return GenerateRequest(
            prompt_ids=prompt_ids,
            sampling=SamplingParams(
                max_tokens=max_tokens,
                seed=secrets.randbelow(_SEEDS) if draft.seed is None else draft.seed,
                temperature=1.0 if draft.temperature is None else draft.temperature,
                top_p=1.0 if draft.top_p is None else draft.top_p,
                top_k=min(max(draft.top_k or 0, 0), self._vocab_size),
                min_tokens=min(draft.min_tokens or 0, max_tokens),
                stop=tuple(draft.stop),
                include_stop=draft.include_stop,
                stop_token_ids=tuple(draft.stop_token_ids),
                ignore_eos=draft.ignore_eos,
                logprobs=draft.logprobs,
            ),
            timeout=deadline - asyncio.get_running_loop().time(),
            traceparent=draft.traceparent,
        )

    def _check_sampling(self, draft: Draft) -> None:
        _in_range("max_tokens", draft.max_tokens, least=1)
        _in_range("temperature", draft.temperature, least=0, most=2)
        _in_range("top_p", draft.top_p, least=0, most=1)
        _in_range("top_k", draft.top_k, least=-1)
        _in_range("seed", draft.seed, least=0, most=_SEEDS - 1)
        _in_range("min_tokens", draft.min_tokens, least=0, most=draft.max_tokens)
        _in_range("logprobs", draft.logprobs, least=0, most=_TOP_LOGPROBS)
        if len(draft.stop) > _STOP_STRINGS:
            raise InvalidRequest(f"stop takes at most {_STOP_STRINGS} strings, not {len(draft.stop)}", param="stop")
        lengths = [len(stop) for stop in draft.stop]
        if not all(0 < length <= _STOP_LENGTH for length in lengths) or sum(lengths) > _STOP_LENGTHS:
            raise InvalidRequest(
                f"stop takes strings of 1 to {_STOP_LENGTH} characters, {_STOP_LENGTHS} together", param="stop"
            )
        if len(draft.stop_token_ids) > MOST_STOP_TOKENS:
            raise InvalidRequest(
                f"stop_token_ids takes at most {MOST_STOP_TOKENS} ids, not {len(draft.stop_token_ids)}",
                param="stop_token_ids",
            )
        self._check_ids("stop_token_ids", draft.stop_token_ids)

    async def _prompt_ids(self, prompt: str | Sequence[int] | Chat) -> tuple[int, ...]:
        match prompt:
            case Chat(messages):
                param = "messages"
                ids: Sequence[int] = await self._text.chat_ids(_conversation(messages))
            case str(text):
                param, ids = "prompt", await self._text.completion_ids(text)
            case _:
                param, ids = "prompt", prompt
        if not ids:
            raise InvalidRequest(f"{param} has no tokens", param=param)
        if len(ids) >= self._max_context:
            raise ContextLengthExceeded(
                f"the model's context is {self._max_context} tokens, and a prompt of {len(ids)} tokens "
                "leaves no room for an answer",
                param=param,
            )
        self._check_ids(param, ids)
        return tuple(ids)

    def _check_ids(self, param: str, ids: Sequence[int]) -> None:
        if ids and not 0 <= min(ids) <= max(ids) < self._vocab_size:
            wrong = next(i for i in ids if not 0 <= i < self._vocab_size)
            raise InvalidRequest(
                f"{param} holds {wrong}, which is not a token id; the vocabulary has {self._vocab_size}", param=param
            )

    def _max_tokens(self, draft: Draft, prompt: int) -> int:
        """A given limit is cut to the context only: what cannot fit the KV pools is refused by the service.
        A default is also cut to what the pools hold, so that nobody is refused for what they did not ask."""
        if draft.max_tokens is not None:
            return min(draft.max_tokens, self._max_context - prompt)
        left = max(1, min(self._service.token_limit(), self._max_context) - prompt)
        default = left if isinstance(draft.prompt, Chat) else min(left, _COMPLETION_TOKENS)
        _in_range("min_tokens", draft.min_tokens, least=0, most=default)
        return default


@asynccontextmanager
async def until(deadline: float) -> AsyncIterator[None]:
    """Ends what it encloses at this loop time, with DeadlineExceeded."""
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError as error:
        raise DeadlineExceeded("the request did not finish in time") from error


def _conversation(messages: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    if not messages:
        raise InvalidRequest("messages must hold at least one message", param="messages")
    if len(messages) > MOST_MESSAGES:
        raise InvalidRequest(f"messages may hold at most {MOST_MESSAGES} messages", param="messages")
    for message in messages:
        if message["role"] not in _ROLES:
            raise InvalidRequest(
                f"messages: the role {message['role'][:_SHOWN]!r} is not one of {', '.join(_ROLES)}", param="messages"
            )
    return [message | {"role": _ROLES[message["role"]]} for message in messages]


def _in_range(param: str, value: float | None, *, least: float, most: float | None = None) -> None:
    """Raises InvalidRequest; written so that NaN is out of every range."""
    if value is None or (value >= least and (most is None or value <= most)):
        return
    if most is None:
        raise InvalidRequest(f"{param} must be at least {least}, not {value}", param=param)
    raise InvalidRequest(f"{param} must be from {least} to {most}, not {value}", param=param)
