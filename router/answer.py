"""What the HTTP and the gRPC frontend share: the service they call and the tally of one answer.

Used by router/http/ and router/grpc_frontend.py. Knows neither HTTP nor gRPC.
"""

import re
from collections.abc import AsyncGenerator
from typing import Protocol

from contracts.errors import PdserveError
from contracts.requests import FinishReason, GenerateRequest, Output

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)


class Service(Protocol):
    """The router as its frontends see it."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Output, None]:
        """The answer, token by token. Closing the generator cancels. Raises PdserveError, on any step."""

    def token_limit(self) -> int:
        """Most tokens, prompt and generated together, that one request can have. Raises NotReady."""

    def ready(self) -> bool:
        """Whether a request could be served."""

    async def scrape(self) -> str:
        """Metrics of the whole cluster as Prometheus text."""


class Tally:
    """Adds up the outputs of one answer: what its usage report says, and why it ended."""

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self.cached_tokens = 0
        self._finish: FinishReason | None = None

    def add(self, output: Output) -> FinishReason | None:
        """Count an output; the finish reason when it is the last one."""
        last = output.tokens[-1]
        self.completion_tokens = last.position
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        self._finish = last.finish
        return last.finish

    def finish(self) -> FinishReason:
        """Why the answer ended. Raises PdserveError when the outputs ended without a reason."""
        if self._finish is None:
            raise PdserveError("the answer ended without a finish reason")
        return self._finish


def valid_traceparent(value: str | None) -> str:
    """The caller's span, or "" when it is absent or malformed (W3C Trace Context, version 00 layout)."""
    return value if value is not None and _TRACEPARENT.fullmatch(value) else ""
