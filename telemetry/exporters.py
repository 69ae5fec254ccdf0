"""The real tracing: spans that leave the process over OTLP/gRPC.

The composition root calls `create_tracing` once per process. This is the only file that knows the
OpenTelemetry SDK, and it imports the SDK inside the functions that need it: a process without an
endpoint neither pays for the import nor starts the SDK's thread. An exporter's failure must never reach
a request, and is logged once per outage.
"""
# ruff: noqa: PLC0415 - imports inside functions, for the reason above

import asyncio
import logging
import os
from collections.abc import Sequence
from threading import Thread
from typing import TYPE_CHECKING, cast

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from contracts.config import TelemetryConfig
from telemetry.tracing import Attribute, NoTracing, Span, Tracing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

_log = logging.getLogger(__name__)
_CLOSE_SECONDS = 2.0
_MAX_TRACEPARENT = 512  # characters; the propagator logs a warning for each longer one


def create_tracing(config: TelemetryConfig, service: str, role: str, worker: str) -> Tracing:
    """Tracing to `config.otlp_endpoint`, else to OTEL_EXPORTER_OTLP_ENDPOINT, else NoTracing.

    An endpoint without a scheme is taken as plain text (http). The SDK's own variables
    (OTEL_EXPORTER_OTLP_HEADERS, OTEL_BSP_SCHEDULE_DELAY, ...) are honoured.
    """
    endpoint = config.otlp_endpoint or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    if not endpoint:
        return NoTracing()
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # The SDK complains of each lost batch and each dropped span; _LoudOnce says it once.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    exporter = OTLPSpanExporter(endpoint if "://" in endpoint else f"http://{endpoint}", timeout=_CLOSE_SECONDS)
    # _LoudOnce fits without the SDK's base class, which is not imported while tracing is off.
    processor = BatchSpanProcessor(cast("SpanExporter", _LoudOnce(exporter, endpoint)))
    return OtelTracing(_provider(config.trace_ratio, service, role, worker), processor)


def create_memory_tracing(
    service: str, role: str, worker: str, ratio: float = 1.0
) -> "tuple[OtelTracing, InMemorySpanExporter]":
    """Tracing for tests: the same spans, kept in the returned exporter as soon as they end."""
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    return OtelTracing(_provider(ratio, service, role, worker), SimpleSpanProcessor(exporter)), exporter


def _provider(ratio: float, service: str, role: str, worker: str) -> "TracerProvider":
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    resource = Resource.create(
        {
            "service.name": service,
            "service.instance.id": worker,
            "process.pid": os.getpid(),
            "pdserve.role": role,
            "pdserve.worker": worker,
        }
    )
    # No exit hook: it would wait for a collector that is gone; close() waits for a bounded time.
    return TracerProvider(ParentBased(TraceIdRatioBased(ratio)), resource, shutdown_on_exit=False)


class OtelTracing:
    """Spans of one process, made by an OpenTelemetry provider and given to `processor` when they end."""

    def __init__(self, provider: "TracerProvider", processor: "SpanProcessor") -> None:
        provider.add_span_processor(processor)
        self._provider = provider
        self._tracer = provider.get_tracer("pdserve")
        self._propagator = TraceContextTextMapPropagator()
        self._closing: Thread | None = None

    def start(self, name: str, parent: str = "", **attributes: Attribute) -> Span:
        """See Tracing.start."""
        carrier = {"traceparent": parent} if len(parent) <= _MAX_TRACEPARENT else {}
        # An explicit context: which task happens to run must not decide the parent.
        context = self._propagator.extract(carrier)
        return _OtelSpan(self._tracer.start_span(name, context, attributes=attributes))

    async def close(self) -> None:
        """See Tracing.close. Spans that end later are dropped."""
        if self._closing is None:
            # The SDK's shutdown waits up to 30 s for a collector that does not answer.
            self._closing = Thread(target=self._provider.shutdown, name="tracing-close", daemon=True)
            self._closing.start()
            await asyncio.to_thread(self._closing.join, _CLOSE_SECONDS)


class _OtelSpan:
    """telemetry.tracing.Span over an OpenTelemetry span, recording or not."""

    __slots__ = ("_ended", "_span")

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        self._ended = False

    @property
    def traceparent(self) -> str:
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def event(self, name: str, **attributes: Attribute) -> None:
        if not self._ended:
            self._span.add_event(name, attributes)

    def set(self, **attributes: Attribute) -> None:
        if not self._ended:
            self._span.set_attributes(attributes)

    def end(self, error: str = "") -> None:
        if self._ended:
            return
        self._ended = True
        if error:
            self._span.set_status(trace.StatusCode.ERROR, error)
        self._span.end()


class _LoudOnce:
    """A span exporter that logs the start and the end of an outage of the one it wraps. Runs on the
    SDK's thread only."""

    def __init__(self, inner: "SpanExporter", endpoint: str) -> None:
        self._inner = inner
        self._endpoint = endpoint
        self._failing = False

    def export(self, spans: "Sequence[ReadableSpan]") -> "SpanExportResult":
        try:
            result = self._inner.export(spans)
        except Exception as error:
            self._note(repr(error))
            raise  # to the SDK's thread, which drops the batch
        self._note("" if result.name == "SUCCESS" else "the collector does not take them")
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)

    def _note(self, reason: str) -> None:
        if reason and not self._failing:
            _log.warning("traces are lost: cannot export to %s: %s", self._endpoint, reason)
        elif self._failing and not reason:
            _log.info("traces reach %s again", self._endpoint)
        self._failing = bool(reason)
