"""Both public frontends of a router, put together.

Made by the router's composition with a service and the model's text. Starts no service and stops none:
stop the service's running requests first (drain), then the frontends.
"""

import asyncio
from dataclasses import dataclass

from contracts.config import Config
from router.answer import Service
from router.grpc_frontend import GrpcFrontend
from router.http.app import create_app
from router.http.http_server import HttpServer
from router.http.openai_routes import OpenAiRoutes
from router.request_parser import RequestParser
from router.text_service import TextService
from text.text_processor import TextProcessor


@dataclass(frozen=True, slots=True)
class PublicPorts:
    """Where a router listens."""

    http: int
    grpc: int


class RouterFrontends:
    """HTTP and gRPC over one service, with one request parser. `app` is the HTTP part as an ASGI application."""

    def __init__(self, config: Config, service: Service, text: TextProcessor) -> None:
        model = config.model.served_name or config.model.name
        metadata = text.metadata
        max_context = min(config.model.max_context or metadata.max_context, metadata.max_context)
        self._text = TextService(text, max_context=max_context, most_waiting=config.router.queue_requests)
        parser = RequestParser(
            service,
            self._text,
            model=model,
            vocab_size=metadata.vocab_size,
            max_context=max_context,
            request_seconds=config.limits.request_seconds,
        )
        openai = OpenAiRoutes(
            service, parser, self._text, text.tokenizer, config.limits, model=model, max_context=max_context
        )
        host, ports = config.router.host, config.router
        self.app = create_app(service, openai)
        self._http = HttpServer(self.app, host, ports.http_port, config.limits.slow_client_seconds)
        self._grpc = GrpcFrontend(service, parser, config.limits, model=model, host=host, port=ports.grpc_port)

    async def start(self) -> PublicPorts:
        """Listen on both ports. Raises StartupError, with nothing left listening, when one is taken."""
        http = await self._http.start()
        try:
            grpc = await self._grpc.start()
        except BaseException:
            await self.stop(0)
            raise
        return PublicPorts(http, grpc)

    async def stop(self, grace: float) -> None:
        """Take no new requests, let running ones end for `grace` seconds, then cancel them. Idempotent."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._http.stop(grace))
            group.create_task(self._grpc.stop(grace))
        self._text.close()
