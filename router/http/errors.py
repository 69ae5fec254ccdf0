"""Errors in the form that OpenAI clients understand, as a response and as an event of a stream.

Called by app.py and event_stream.py.
"""

import orjson
from starlette.responses import Response

from contracts.errors import PdserveError, status_of


def error_body(error: PdserveError) -> bytes:
    """{"error": {message, type, param, code}} as JSON."""
    return orjson.dumps(
        {
            "error": {
                "message": error.message,
                "type": status_of(error).openai_type,
                "param": error.param,
                "code": error.code,
            }
        }
    )


def error_response(error: PdserveError) -> Response:
    """The whole answer to a request that failed before its first byte."""
    status = status_of(error)
    headers = {} if status.retry_after is None else {"Retry-After": str(status.retry_after)}
    return Response(error_body(error), status.http, headers, "application/json")
