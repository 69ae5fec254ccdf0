"""Bodies to objects and prompts to token ids, off the event loop and a few at a time.

Called by router/request_parser.py and router/http/openai_routes.py. A long prompt takes tens of milliseconds
to tokenise; on the event loop that would be a gap in every running stream.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from contracts.errors import ContextLengthExceeded, Overloaded
from text.text_processor import TextProcessor

T = TypeVar("T")

_THREADS = 2
"""The tokeniser frees the interpreter lock; two keep short prompts from waiting behind one long one."""


class TextService:
    """Two threads and a bounded number of requests, `most_waiting`, that are with them or wait for them.
    `max_context` in tokens. Every method raises Overloaded when too many wait."""

    def __init__(self, text: TextProcessor, *, max_context: int, most_waiting: int) -> None:
        self._text = text
        self._max_context = max_context
        self._most_waiting = most_waiting
        self._waiting = 0
        self._longest_token = max(
            len(data)
            for token in range(text.metadata.vocab_size)
            for data in (text.tokenizer.token_bytes(token), text.tokenizer.token_text(token).encode())
        )
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenise")

    async def completion_ids(self, prompt: str) -> list[int]:
        """Token ids of a raw prompt. Raises ContextLengthExceeded when it cannot possibly fit."""
        self._check_size("prompt", len(prompt.encode()))
        return await self.run(lambda: self._text.template.completion_ids(prompt))

    async def chat_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation. Raises ContextLengthExceeded, and InvalidRequest from the template."""
        self._check_size("messages", sum(len(message["content"].encode()) for message in messages))
        return await self.run(lambda: self._text.template.prompt_ids(list(messages)))

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises, in one of the threads. Nobody waits for the work of a cancelled call."""
        if self._waiting >= self._most_waiting:
            raise Overloaded(f"{self._waiting} requests wait for their text to be read")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """Let the threads go. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _check_size(self, param: str, size: int) -> None:
        least = -(-size // self._longest_token)
        if least > self._max_context:
            raise ContextLengthExceeded(
                f"the model's context is {self._max_context} tokens, and a prompt of {size} bytes has at least {least}",
                param=param,
            )
