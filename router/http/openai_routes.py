"""The OpenAI routes: a body becomes a GenerateRequest, the service's tokens become an answer.

Mounted by app.py. Every wait on the way is raced against the client going away.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from contracts.config import LimitsConfig
from contracts.errors import ModelNotFound
from contracts.requests import GenerateRequest, Token
from router.answer import Service, Tally, valid_traceparent
from router.http.connection import read_body, while_connected
from router.http.event_stream import EventStream
from router.http.openai_format import ChatFormat, CompletionFormat, Format, Heading, MakeFormat
from router.http.openai_schemas import ChatBody, CompletionBody
from router.request_parser import RequestParser, until
from router.text_service import TextService
from text.tokenizer import Tokenizer

_SMALL_BODY = 64 * 1024
"""Bytes. A body up to it is decoded at once: going to a thread and back would take longer."""


class OpenAiRoutes:
    """`/v1/...`. `max_context` in tokens."""

    def __init__(
        self,
        service: Service,
        parser: RequestParser,
        text: TextService,
        tokenizer: Tokenizer,
        limits: LimitsConfig,
        *,
        model: str,
        max_context: int,
    ) -> None:
        self._service = service
        self._parser = parser
        self._text = text
        self._tokenizer = tokenizer
        self._limits = limits
        self._model = model
        self._card = {
            "id": model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "pdserve",
            "max_model_len": max_context,
        }

    def router(self) -> APIRouter:
        """The routes, to be included in an application."""
        routes = APIRouter(prefix="/v1")
        routes.add_api_route("/chat/completions", self.chat, methods=["POST"])
        routes.add_api_route("/completions", self.completions, methods=["POST"])
        routes.add_api_route("/models", self.models, methods=["GET"])
        routes.add_api_route("/models/{name:path}", self.model, methods=["GET"])
        return routes

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, ChatBody, "chatcmpl-", ChatFormat)

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, CompletionBody, "cmpl-", CompletionFormat)

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._card]})

    async def model(self, name: str) -> Response:
        if name != self._model:
            raise ModelNotFound(f"the model {name!r} does not exist; this is {self._model!r}", param="model")
        return JSONResponse(self._card)

    async def _answer(
        self, request: Request, kind: type[ChatBody | CompletionBody], prefix: str, make_format: MakeFormat
    ) -> Response:
        arrived = asyncio.get_running_loop().time()
        traceparent = valid_traceparent(request.headers.get("traceparent"))
        async with until(arrived + self._limits.request_seconds):
            raw = await read_body(request.receive, request.headers, self._limits.body_bytes)
            if len(raw) > _SMALL_BODY:
                body = await while_connected(request.receive, self._text.run(lambda: kind.decode(raw)))
            else:
                body = kind.decode(raw)
        draft = body.to_draft(traceparent, arrived)
        work = await while_connected(request.receive, self._parser.parse(draft))
        heading = Heading(prefix + secrets.token_hex(12), int(time.time()), self._model)
        form = make_format(heading, self._tokenizer, work.sampling.logprobs is not None)
        if body.stream:
            events = _events(self._service, work, form, include_usage=body.include_usage)
            return EventStream(events, self._limits, request.state.request_id)
        content = await while_connected(request.receive, _whole(self._service, work, form))
        return Response(content, media_type="application/json")


async def _whole(service: Service, work: GenerateRequest, form: Format) -> bytes:
    tally = Tally(len(work.prompt_ids))
    tokens: list[Token] = []
    async with aclosing(service.generate(work)) as outputs:
        async for output in outputs:
            tally.add(output)
            tokens.extend(output.tokens)
    return form.whole(tokens, tally)


async def _events(
    service: Service, work: GenerateRequest, form: Format, *, include_usage: bool
) -> AsyncGenerator[bytes, Any]:
    tally = Tally(len(work.prompt_ids))
    opening = form.opening()
    async with aclosing(service.generate(work)) as outputs:
        async for output in outputs:
            finish = tally.add(output)
            yield opening + form.delta(output.tokens) + (form.ending(finish) if finish else b"")
            opening = b""
    tally.finish()
    if include_usage:
        yield form.usage(tally)
