"""The bodies of the OpenAI routes: which fields there are, their types, and the Draft they make.

Called by openai_routes.py. Decides about shape only: ranges are the request parser's. Nothing is ever
accepted and ignored, apart from bookkeeping that does not change the answer.
"""

from typing import Annotated, Any, Self

import orjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from contracts.errors import InvalidRequest, RequestTooLarge
from router.request_parser import MOST_MESSAGES, MOST_STOP_TOKENS, Chat, Draft

_BOOKKEEPING = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
)

_SHOWN = 64
"""Characters of a caller's field name that an error message repeats."""

_MOST_FIELDS = 64
"""Of one object, apart from bookkeeping. Every unknown field costs an error."""

_MOST_CONTAINERS = 65_536
_MOST_STRINGS = 131_072
_MOST_VALUES = 1_048_576
"""Of one body; keys are strings. Far above what any request needs, and bounds the time that decoding takes."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0, 0.0),
    "function_call": (None, "none"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "min_p": (None, 0, 0.0),
    "modalities": (None, ["text"]),
    "n": (None, 1),
    "prediction": (None,),
    "presence_penalty": (None, 0, 0.0),
    "reasoning_effort": (None,),
    "repetition_penalty": (None, 1, 1.0),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "tool_choice": (None, "none"),
    "tools": (None, []),
    "verbosity": (None,),
    "web_search_options": (None,),
}
"""Fields that are not supported, and the values of theirs that ask for nothing."""


def _text_content(value: Any) -> Any:
    """Text parts joined by line ends: parts are separate pieces of text, and words must not run together."""
    if not isinstance(value, list):
        return value
    if not value:
        raise PydanticCustomError("content", "must hold at least one part")
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or set(part) != {"type", "text"}:
            raise PydanticCustomError("content", 'takes only parts of the form {"type": "text", "text": "..."}')
        if not isinstance(part["text"], str):
            raise PydanticCustomError("content", "has a text part whose text is not a string")
    return "\n".join(part["text"] for part in value)


def _one_prompt(value: Any) -> str | list[int]:
    """Text or token ids, also as the one element of a list."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise PydanticCustomError("prompt", "several prompts in one request are not supported")
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(token) is int for token in value):
        return value
    raise PydanticCustomError("prompt", "must be a string or a list of token ids")


def _check_structure(body: bytes) -> None:
    """Raises RequestTooLarge for more objects, lists, strings or values of any kind than a body may hold.

    The parser holds the interpreter's lock until it has made them all, so a thread alone would not keep it from
    stopping the event loop. This counts at the speed of memory: without escapes, quotes are ends of strings, and
    every other piece between them is structure.
    """
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') <= 2 * _MOST_STRINGS:
        structure = b"".join(plain.split(b'"')[::2])
        containers = structure.count(b"{") + structure.count(b"[")
        if containers <= _MOST_CONTAINERS and structure.count(b",") < _MOST_VALUES:
            return
    raise RequestTooLarge(
        f"the body may hold at most {_MOST_CONTAINERS} objects and lists, {_MOST_STRINGS} strings "
        f"and {_MOST_VALUES} values"
    )


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > _MOST_FIELDS:
            raise PydanticCustomError("fields", "has too many fields")
        return value


class StreamOptions(_Body):
    include_usage: bool | None = None


class ChatMessage(_Body):
    role: str
    content: Annotated[str, BeforeValidator(_text_content)]
    name: str | None = None
    tool_call_id: str | None = None
    refusal: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None


class Sampling(_Body):
    """What both routes take. Absent and null are the same."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    min_tokens: int | None = None
    stop: (
        Annotated[list[str], Field(fail_fast=True), BeforeValidator(lambda v: [v] if isinstance(v, str) else v)] | None
    ) = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True, max_length=MOST_STOP_TOKENS)] | None = None
    ignore_eos: bool | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def draft(self, prompt: str | list[int] | Chat, logprobs: int | None, traceparent: str, arrived: float) -> Draft:
        """Raises InvalidRequest for stream_options without stream."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
        wins = self.max_completion_tokens
        return Draft(
            model=self.model,
            prompt=prompt,
            arrived=arrived,
            max_tokens=self.max_tokens if wins is None else wins,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            min_tokens=self.min_tokens,
            stop=self.stop or (),
            include_stop=bool(self.include_stop_str_in_output),
            stop_token_ids=self.stop_token_ids or (),
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
            traceparent=traceparent,
        )

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """The body of a request. Raises InvalidRequest naming the first field that is wrong, and RequestTooLarge."""
        _check_structure(body)
        try:
            fields = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise InvalidRequest(f"the body is not valid JSON: {error}") from error
        if not isinstance(fields, dict):
            raise InvalidRequest("the body must be a JSON object")
        return cls._from_fields({name: value for name, value in fields.items() if name not in _BOOKKEEPING})

    @classmethod
    def _from_fields(cls, fields: dict[str, Any]) -> Self:
        for name in [name for name in fields if name in _NEUTRAL]:
            value = fields.pop(name)
            if not any(value == neutral and type(value) is type(neutral) for neutral in _NEUTRAL[name]):
                raise InvalidRequest(f"{name} is not supported", param=name)
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise _invalid(error.errors(include_url=False, include_context=False)[0]) from error


class ChatBody(Sampling):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, max_length=MOST_MESSAGES)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def to_draft(self, traceparent: str, arrived: float) -> Draft:
        """Raises InvalidRequest for fields that do not go together."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        kept = {"role", "content", "name", "tool_call_id"}
        messages = tuple(m.model_dump(include=kept, exclude_none=True) for m in self.messages)
        return self.draft(Chat(messages), (self.top_logprobs or 0) if self.logprobs else None, traceparent, arrived)


class CompletionBody(Sampling):
    """POST /v1/completions."""

    prompt: Annotated[str | list[int], PlainValidator(_one_prompt)]
    logprobs: int | None = None

    def to_draft(self, traceparent: str, arrived: float) -> Draft:
        """Raises InvalidRequest for fields that do not go together."""
        return self.draft(self.prompt, self.logprobs, traceparent, arrived)


def _invalid(error: ErrorDetails) -> InvalidRequest:
    """`param` is the path to the field, up to the first list index: what a caller can look for."""
    path: list[str] = []
    for part in error["loc"]:
        if not isinstance(part, str):
            break
        path.append(part[:_SHOWN])
    param = ".".join(path) or None
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:_SHOWN]}" for part in error["loc"]).lstrip(".")
    where = where or "the body"
    if error["type"] == "extra_forbidden":
        return InvalidRequest(f"unknown field: {where}", param=param)
    if error["type"] == "missing":
        return InvalidRequest(f"{where} is required", param=param)
    return InvalidRequest(f"{where}: {error['msg'][0].lower()}{error['msg'][1:]}", param=param)
