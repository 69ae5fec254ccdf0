"""An OTLP/gRPC collector in the test's process: keeps the spans it is sent.

Use as a context manager, or start() and stop(); safe to use from tests of any event loop because the
server has its own threads.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Condition
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service


@dataclass(frozen=True, slots=True)
class CollectedSpan:
    """One span as it came over the wire; ids in lower-case hex, `parent` "" for a root."""

    name: str
    trace_id: str
    span_id: str
    parent: str
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    resource: dict[str, Any]
    error: str = ""


@dataclass
class OtlpCollector:
    """`endpoint` is what a configuration names; `refuse` answers every export with an error."""

    endpoint: str = ""
    spans: list[CollectedSpan] = field(default_factory=list)
    refuse: bool = False
    exports: int = 0

    def start(self, address: str = "127.0.0.1:0") -> Self:
        self._arrived = Condition()
        self._server = grpc.server(ThreadPoolExecutor(2))
        service.add_TraceServiceServicer_to_server(_Servicer(self), self._server)  # type: ignore[no-untyped-call]  # generated
        port = self._server.add_insecure_port(address)
        self._server.start()
        self.endpoint = f"http://127.0.0.1:{port}"
        return self

    def stop(self) -> None:
        self._server.stop(grace=None).wait(5)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def wait_for(self, count: int, timeout: float = 10.0) -> list[CollectedSpan]:
        """Block until `count` spans are here. Raises AssertionError when they do not come."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: len(self.spans) >= count, timeout):
                raise AssertionError(f"{len(self.spans)} of {count} spans: {[s.name for s in self.spans]}")
            return list(self.spans)

    def wait_for_exports(self, count: int, timeout: float = 10.0) -> None:
        """Block until `count` exports were attempted. Raises AssertionError when they do not come."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: self.exports >= count, timeout):
                raise AssertionError(f"{self.exports} of {count} exports")

    def take(self, spans: list[CollectedSpan]) -> None:
        """Called by the server's threads."""
        with self._arrived:
            self.exports += 1
            if not self.refuse:
                self.spans.extend(spans)
            self._arrived.notify_all()


class _Servicer(service.TraceServiceServicer):
    def __init__(self, collector: OtlpCollector) -> None:
        self._collector = collector

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802 - the service's name for it
        self._collector.take(
            [
                _span(span, _attributes(part.resource.attributes))
                for part in request.resource_spans
                for scope in part.scope_spans
                for span in scope.spans
            ]
        )
        if self._collector.refuse:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "refused by the test")
        return messages.ExportTraceServiceResponse()


def _span(span: Any, resource: dict[str, Any]) -> CollectedSpan:
    return CollectedSpan(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        attributes=_attributes(span.attributes),
        events=[(event.name, _attributes(event.attributes)) for event in span.events],
        resource=resource,
        error=span.status.message,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
