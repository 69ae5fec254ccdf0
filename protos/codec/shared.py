"""Codec of the words that the session and the hand-over share, and the rules of all codecs.

Called by protos/codec/session.py and protos/codec/handover.py only. Encoding trusts our own dataclasses;
decoding trusts nothing: what cannot be a valid dataclass raises InvalidRequest. It never guesses a default.
"""

from collections.abc import Mapping
from typing import Protocol, TypeVar

from google.protobuf.message import DecodeError, Message

from contracts.errors import ErrorInfo, InvalidRequest
from contracts.kv import KvLayout
from contracts.requests import AttemptKey, FinishReason, Token, TokenLogprobs
from protos.pdserve.v1 import common_pb2 as pb

MessageT = TypeVar("MessageT", bound=Message)
ValueT = TypeVar("ValueT")


class _HasFields(Protocol):
    def HasField(self, field_name: str) -> bool: ...  # noqa: N802  protobuf's name


def parse(kind: type[MessageT], data: bytes) -> MessageT:
    """The protobuf message in `data`. Raises InvalidRequest for bytes that are none."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise InvalidRequest(f"malformed {kind.DESCRIPTOR.name}: {error}") from error


def require(message: _HasFields, *fields: str) -> None:
    """Raises InvalidRequest when one of these message fields is absent."""
    for field in fields:
        if not message.HasField(field):
            raise InvalidRequest(f"malformed {type(message).__name__}: no {field}")


def from_enum(values: Mapping[ValueT, int], number: int, field: str) -> ValueT:
    """The key of `number` in `values`. Raises InvalidRequest naming `field` for a number that has none."""
    for value, known in values.items():
        if known == number:
            return value
    raise InvalidRequest(f"malformed message: {field} cannot be {number}")


def encode_key(key: AttemptKey) -> pb.AttemptKey:
    return pb.AttemptKey(request_id=key.request_id, attempt=key.attempt)


def decode_key(key: pb.AttemptKey) -> AttemptKey:
    return AttemptKey(key.request_id, key.attempt)


def encode_token(token: Token) -> pb.Token:
    logprobs = None
    if token.logprobs is not None:
        top = [pb.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in token.logprobs.top]
        logprobs = pb.TokenLogprobs(logprob=token.logprobs.logprob, top=top)
    return pb.Token(
        position=token.position,
        token_id=token.token_id,
        text=token.text,
        logprobs=logprobs,
        finish=_FINISH[token.finish],
    )


def decode_token(token: pb.Token) -> Token:
    """Raises InvalidRequest for an unknown finish reason or another choice than 0."""
    if token.choice != 0:
        raise InvalidRequest(f"malformed Token: choice {token.choice}, only 0 is offered")
    logprobs = None
    if token.HasField("logprobs"):
        top = tuple((entry.token_id, entry.logprob) for entry in token.logprobs.top)
        logprobs = TokenLogprobs(token.logprobs.logprob, top)
    finish = from_enum(_FINISH, token.finish, "finish")
    return Token(token.position, token.token_id, token.text, logprobs, finish)


def encode_layout(layout: KvLayout) -> pb.KvLayout:
    return pb.KvLayout(
        model=layout.model,
        tokenizer=layout.tokenizer,
        numerics=layout.numerics,
        dtype=layout.dtype,
        layers=layout.layers,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        rope=layout.rope,
    )


def decode_layout(layout: pb.KvLayout) -> KvLayout:
    return KvLayout(
        model=layout.model,
        tokenizer=layout.tokenizer,
        numerics=layout.numerics,
        dtype=layout.dtype,
        layers=layout.layers,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        rope=layout.rope,
    )


def encode_error(error: ErrorInfo) -> pb.ErrorInfo:
    return pb.ErrorInfo(code=error.code, message=error.message, param=error.param, retry_after=error.retry_after)


def decode_error(error: pb.ErrorInfo) -> ErrorInfo:
    return ErrorInfo(
        code=error.code,
        message=error.message,
        param=error.param if error.HasField("param") else None,
        retry_after=error.retry_after if error.HasField("retry_after") else None,
    )


_FINISH: dict[FinishReason | None, pb.FinishReason] = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}
