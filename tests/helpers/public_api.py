"""A scripted service behind the real frontends, and a tiny model's text."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import httpx

from contracts.config import Config, LimitsConfig, ModelConfig, RouterConfig
from contracts.requests import FinishReason, GenerateRequest, Output, Token, TokenLogprobs
from router.frontends import RouterFrontends
from tests.helpers.text_models import write_hf_model
from text.model_resolver import resolve_model
from text.text_processor import TextProcessor

MODEL = "tiny"
CONTEXT = 256
VOCABULARY = 320

Step = Output | Exception | asyncio.Event


class FakeService:
    """Answers every request with the steps of `script`: an output, an error to raise, an event to wait for."""

    def __init__(self, script: Sequence[Step] = (), *, limit: int | Exception = 200) -> None:
        self.script = script
        self.limit = limit
        self.is_ready = True
        self.requests: list[GenerateRequest] = []
        self.started = asyncio.Event()
        self.closed = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Output, None]:
        self.requests.append(request)
        self.started.set()
        try:
            for step in self.script:
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, Exception):
                    raise step
                else:
                    yield step
        finally:
            self.closed.set()

    def token_limit(self) -> int:
        if isinstance(self.limit, Exception):
            raise self.limit
        return self.limit

    def ready(self) -> bool:
        return self.is_ready

    async def scrape(self) -> str:
        return "pdserve_up 1\n"


def output(position: int, *texts: str, finish: FinishReason | None = None, cached: int = 0, top: int = -1) -> Output:
    """Tokens from `position` on. `top` >= 0: with logprobs and that many alternatives. Ids are of the texts'
    first bytes."""
    tokens = []
    for index, text in enumerate(texts):
        logprobs = TokenLogprobs(-0.5, ((10, -0.5), (11, -1.5), (12, float("-inf")))[:top]) if top >= 0 else None
        last = finish if index == len(texts) - 1 else None
        tokens.append(Token(position + index, 10 + index, text, logprobs, last))
    return Output("1-1", tuple(tokens), cached)


def answer(*texts: str, finish: FinishReason = FinishReason.STOP, cached: int = 0, top: int = -1) -> list[Step]:
    """One output per text; the last carries the finish reason."""
    return [
        output(index + 1, text, finish=finish if index == len(texts) - 1 else None, cached=cached, top=top)
        for index, text in enumerate(texts)
    ]


def tiny_text(directory: Path, *, bos: bool = True) -> TextProcessor:
    """A byte-level model: each byte is a token, BOS in front of raw prompts when `bos`."""
    configuration: dict[str, Any] = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "add_bos_token": bos}
    configuration["chat_template"] = (
        "{% for message in messages %}{{ message['role'] }}:{{ message['content'] }}\n{% endfor %}>"
    )
    model = write_hf_model(directory, changes={"vocab_size": VOCABULARY}, tokenizer_config=configuration)
    return TextProcessor(resolve_model(ModelConfig(name=str(model)), lambda _: None))


def frontends(
    service: FakeService, text: TextProcessor, *, http_port: int = 0, grpc_port: int = 0, **limits: Any
) -> RouterFrontends:
    """Both frontends, by default on ports that the system chooses. `limits` go into config.limits."""
    config = Config(
        model=ModelConfig(served_name=MODEL),
        router=RouterConfig(http_port=http_port, grpc_port=grpc_port),
        limits=LimitsConfig(**limits),
    )
    return RouterFrontends(config, service, text)


def asgi_client(made: RouterFrontends) -> httpx.AsyncClient:
    """A client without sockets."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(made.app), base_url="http://router")


def events_of(content: bytes) -> list[Any]:
    """The data of a stream's events: decoded JSON, and the text [DONE]. Comments are left out."""
    *blocks, rest = content.decode().split("\n\n")
    assert rest == ""
    data = [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]
    return [item if item == "[DONE]" else json.loads(item) for item in data]
