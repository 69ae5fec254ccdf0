"""The public gRPC API: pdserve.v1.Inference and grpc.health.v1.

Started and stopped by router/frontends.py. The only file of the router that knows protobuf. Checks nothing
about a request that the request parser checks.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc

from contracts.config import LimitsConfig
from contracts.errors import Cancelled, InvalidRequest, PdserveError, RequestTooLarge, StartupError, status_of
from contracts.requests import FinishReason, Output
from protos.pdserve.v1 import common_pb2, inference_pb2
from router.answer import Service, Tally, valid_traceparent
from router.listening import listen
from router.request_parser import MOST_MESSAGES, Chat, Draft, RequestParser

_FINISH = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}
_SERVICES = ("", "pdserve.v1.Inference")
"""Names that grpc.health.v1 knows; "" is the whole server."""

_WATCH_SECONDS = 1.0

Context = grpc.aio.ServicerContext[Any, Any]

logger = logging.getLogger(__name__)


class GrpcFrontend:
    """One gRPC server. An empty model name in a request means `model`."""

    def __init__(
        self, service: Service, parser: RequestParser, limits: LimitsConfig, *, model: str, host: str, port: int
    ) -> None:
        self._inference = _Inference(service, parser, limits, model)
        self._health = _Health(service)
        self._limits = limits
        self._host = host
        self._port = port
        self._server: grpc.aio.Server | None = None

    async def start(self) -> int:
        """Listen; the bound port. Raises StartupError when the address cannot be bound."""
        server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),  # two routers on one port must be an error
                # above the limit of a request, so that one too large gets an answer that says so
                ("grpc.max_receive_message_length", 2 * self._limits.body_bytes),
            ]
        )
        # requests come as bytes: what is no request must be answered like any other bad input
        generate: Any = grpc.unary_stream_rpc_method_handler(
            self._inference.Generate, response_serializer=inference_pb2.GenerateResponse.SerializeToString
        )
        handler = grpc.method_handlers_generic_handler("pdserve.v1.Inference", {"Generate": generate})
        server.add_generic_rpc_handlers((handler,))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        listen(self._host, self._port, "gRPC").close()  # gRPC itself does not say what is wrong
        address = f"[{self._host}]" if ":" in self._host else self._host
        try:
            port = server.add_insecure_port(f"{address}:{self._port}")
        except RuntimeError as error:
            raise StartupError(f"cannot listen for gRPC on {address}:{self._port}") from error
        await server.start()
        self._server = server
        return port

    async def stop(self, grace: float) -> None:
        """Take no more calls, let calls end for `grace` seconds, then cancel them. Idempotent."""
        if self._server is not None:
            await self._server.stop(grace)


class _Health:
    """grpc.health.v1: serving means that a request could be served."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def Check(self, request: Any, context: Context) -> Any:  # noqa: N802 - the name in the proto
        if request.service not in _SERVICES:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return self._status()

    async def List(self, _: Any, __: Context) -> Any:  # noqa: N802 - the name in the proto
        return health_pb2.HealthListResponse(statuses={name: self._status() for name in _SERVICES})

    async def Watch(self, request: Any, _: Context) -> AsyncGenerator[Any, None]:  # noqa: N802 - the name in the proto
        """The status, and again when it has changed. Workers that fall silent make no event, so a watched
        status is judged each second."""
        unknown = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
        last = None
        while True:
            status = self._status() if request.service in _SERVICES else unknown
            if status != last:
                yield status
                last = status
            await asyncio.sleep(_WATCH_SECONDS)

    def _status(self) -> Any:
        status = health_pb2.HealthCheckResponse
        return status(status=status.SERVING if self._service.ready() else status.NOT_SERVING)


class _Inference:
    """pdserve.v1.Inference."""

    def __init__(self, service: Service, parser: RequestParser, limits: LimitsConfig, model: str) -> None:
        self._service = service
        self._parser = parser
        self._limits = limits
        self._model = model

    async def Generate(  # noqa: N802 - the name in the proto
        self, request: bytes, context: Context
    ) -> None:
        """`request`: a serialised GenerateRequest. A cancelled or expired call cancels this task and so the request."""
        try:
            await self._generate(request, context)
        except PdserveError as error:
            await _abort(context, error)
        except Exception:
            logger.exception("a gRPC request failed")
            await _abort(context, PdserveError("internal error"))

    async def _generate(self, data: bytes, context: Context) -> None:
        if len(data) > self._limits.body_bytes:
            raise RequestTooLarge(f"a request may have at most {self._limits.body_bytes} bytes")
        try:
            request = inference_pb2.GenerateRequest.FromString(data)
        except DecodeError as error:
            raise InvalidRequest("the message is not a GenerateRequest") from error
        work = await self._parser.parse(self._draft(request, context))
        tally = Tally(len(work.prompt_ids))
        async with aclosing(self._service.generate(work)) as outputs:
            async for output in outputs:
                tally.add(output)
                await self._write(context, _response(output, tally))
        tally.finish()

    async def _write(self, context: Context, response: inference_pb2.GenerateResponse) -> None:
        patience = self._limits.slow_client_seconds
        try:
            async with asyncio.timeout(patience):
                await context.write(response)
        except TimeoutError as error:
            raise Cancelled(f"slow_client: nothing was read for {patience:g} s") from error

    def _draft(self, request: inference_pb2.GenerateRequest, context: Context) -> Draft:
        def given(field: str) -> Any:
            return getattr(request, field) if request.HasField(field) else None

        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        return Draft(
            model=request.model or self._model,
            prompt=_prompt(request),
            arrived=asyncio.get_running_loop().time(),
            max_tokens=given("max_tokens"),
            temperature=given("temperature"),
            top_p=given("top_p"),
            top_k=given("top_k"),
            seed=given("seed"),
            min_tokens=given("min_tokens"),
            stop=request.stop,
            include_stop=request.include_stop_str_in_output,
            stop_token_ids=request.stop_token_ids,
            ignore_eos=request.ignore_eos,
            logprobs=given("logprobs"),
            traceparent=valid_traceparent(metadata.get("traceparent")),
            timeout=context.time_remaining(),
        )


def _prompt(request: inference_pb2.GenerateRequest) -> str | Sequence[int] | Chat:
    """Looks at no more of it than the parser needs to refuse it."""
    match request.WhichOneof("prompt"):
        case "text":
            return request.text
        case "token_ids":
            return request.token_ids.ids
        case "chat":
            messages = request.chat.messages[: MOST_MESSAGES + 1]
            return Chat([{"role": message.role, "content": message.content} for message in messages])
        case _:
            raise InvalidRequest("one of text, token_ids and chat must be set", param="prompt")


def _response(output: Output, tally: Tally) -> inference_pb2.GenerateResponse:
    response = inference_pb2.GenerateResponse(text="".join(token.text for token in output.tokens))
    for token in output.tokens:
        entry = response.tokens.add(id=token.token_id, text=token.text)
        if token.logprobs is not None:
            entry.logprob = token.logprobs.logprob
            for token_id, logprob in token.logprobs.top:
                entry.top.add(token_id=token_id, logprob=logprob)
    finish = output.tokens[-1].finish
    if finish is not None:
        response.finish_reason = _FINISH[finish]
        response.usage.prompt_tokens = tally.prompt_tokens
        response.usage.completion_tokens = tally.completion_tokens
        response.usage.cached_tokens = tally.cached_tokens
    return response


async def _abort(context: Context, error: PdserveError) -> NoReturn:
    status = status_of(error)
    metadata = [("pdserve-error-code", error.code)]
    if status.retry_after is not None:
        metadata.append(("retry-after", str(status.retry_after)))
    await context.abort(grpc.StatusCode[status.grpc], error.message, tuple(metadata))
