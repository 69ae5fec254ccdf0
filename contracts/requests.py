"""A request and its tokens: the words that router, workers and engine share."""

from dataclasses import dataclass
from enum import Enum


class FinishReason(Enum):
    """Why a choice ended well. Anything else ends in an error (contracts/errors.py)."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of a request are drawn and when they end. Validated by the frontends.

    temperature 0 (or below 1e-5) is greedy. `top_k` 0 and `top_p` 1.0 are off. `logprobs` None: none are
    reported; k >= 0: the sampled token's and those of the k best. `max_tokens` counts all generated
    tokens of the request (also those of earlier attempts).
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt, one choice, as a frontend hands it to RouterService.generate.

    `timeout` is in seconds from that moment; `cache_salt` separates prefix caches; `traceparent` names the
    caller's span (W3C) or is "".
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    timeout: float
    cache_salt: str = ""
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probability of the sampled token and of the best alternatives [(token id, logprob)]."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. `position` counts from 1 over the whole request; `text` is what this token
    made visible (may be empty while a character or a possible stop string is held back)."""

    position: int
    token_id: int
    text: str
    logprobs: TokenLogprobs | None = None
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class AttemptKey:
    """The name of one attempt at one request: every life-cycle message carries it.

    `request_id` is "<router incarnation>-<n>"; attempts count from 1. A retry is a new attempt.
    """

    request_id: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}/{self.attempt}"


@dataclass(frozen=True, slots=True)
class Output:
    """What RouterService.generate yields: new tokens in order of position, each position once.

    `cached_tokens`: prompt tokens that the worker which computed the prompt found in its prefix cache
    (transferred KV is not a cache hit).
    """

    request_id: str
    tokens: tuple[Token, ...]
    cached_tokens: int
