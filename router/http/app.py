"""The HTTP application: routes, health, metrics, and what every answer has in common.

Made by router/frontends.py. An answer never shows a traceback; the log does, with the request's id.
"""

import asyncio
import logging
import re
import secrets
from email.utils import formatdate

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from contracts.errors import NotReady, PdserveError, status_of
from router.answer import Service
from router.http.errors import error_response
from router.http.openai_routes import OpenAiRoutes

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

logger = logging.getLogger(__name__)


def create_app(service: Service, openai: OpenAiRoutes) -> FastAPI:
    """The application, ready to be served."""

    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    async def ready() -> Response:
        if not service.ready():
            status = status_of(NotReady("not ready"))
            return JSONResponse({"ready": False}, status.http, {"Retry-After": str(status.retry_after)})
        return JSONResponse({"ready": True})

    async def metrics() -> Response:
        return PlainTextResponse(await service.scrape(), media_type="text/plain; version=0.0.4")

    app = FastAPI(title="pdserve", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_middleware(_Envelope)
    app.add_exception_handler(PdserveError, _pdserve_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_api_route("/health", health, methods=["GET"])
    app.add_api_route("/ready", ready, methods=["GET"])
    app.add_api_route("/metrics", metrics, methods=["GET"])
    app.include_router(openai.router())
    return app


class _Envelope:
    """Names every request, and turns what nobody expected into a plain 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        scope.setdefault("state", {})["request_id"] = request_id
        started = False

        async def named(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message).update({"Date": formatdate(usegmt=True), "X-Request-Id": request_id})
            await send(message)

        try:
            await self._app(scope, receive, named)
        except asyncio.CancelledError:
            # Only a server that stops cancels a request, and this task ends here.
            logger.info("request %s: ended by the stop of the router", request_id)
            error: PdserveError = NotReady("the router is stopping")
        except Exception:
            logger.exception("request %s failed", request_id)
            error = PdserveError("internal error")
        else:
            return
        if not started:
            await error_response(error)(scope, receive, named)


async def _pdserve_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, PdserveError)
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    """What the framework itself refuses: unknown routes and methods."""
    assert isinstance(error, HTTPException)
    body = {
        "message": f"{error.detail}: {request.method} {request.url.path[:256]}",
        "type": "invalid_request_error",
        "param": None,
        "code": "unknown_url" if error.status_code == 404 else "method_not_allowed",
    }
    return JSONResponse({"error": body}, error.status_code, error.headers)
