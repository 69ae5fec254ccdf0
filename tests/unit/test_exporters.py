"""Spans that leave over OTLP/gRPC, and collectors that do not answer."""

import logging
from collections.abc import Iterator
from threading import Event

import pytest
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

from contracts.config import TelemetryConfig
from telemetry.exporters import OtelTracing, create_tracing
from tests.helpers.otlp_collector import OtlpCollector


@pytest.fixture(autouse=True)
def _quiet_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    yield
    logging.getLogger("opentelemetry").setLevel(logging.NOTSET)


async def test_spans_reach_the_collector() -> None:
    with OtlpCollector() as collector:
        tracing = create_tracing(TelemetryConfig(otlp_endpoint=collector.endpoint), "pdserve", "decode", "decode-0")
        span = tracing.start("decode", tokens=3)
        span.event("step", number=1)
        span.end()
        await tracing.close()
        await tracing.close()
        (got,) = collector.wait_for(1)
    assert (got.name, got.parent, got.attributes) == ("decode", "", {"tokens": 3})
    assert got.events == [("step", {"number": 1})]
    assert got.resource["service.name"] == "pdserve"
    assert got.resource["pdserve.role"] == "decode"
    assert span.traceparent.startswith(f"00-{got.trace_id}-{got.span_id}-")


async def test_environment_names_the_endpoint_and_needs_no_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    with OtlpCollector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint.removeprefix("http://"))
        tracing = create_tracing(TelemetryConfig(), "pdserve", "router", "router-0")
        tracing.start("request").end()
        collector.wait_for(1)
        await tracing.close()


async def test_outage_is_logged_once_and_its_end_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with OtlpCollector(refuse=True) as collector:
        tracing = create_tracing(TelemetryConfig(otlp_endpoint=collector.endpoint), "pdserve", "router", "router-0")
        for round_ in range(1, 4):
            tracing.start("lost").end()
            collector.wait_for_exports(round_)
        collector.refuse = False
        tracing.start("kept").end()
        collector.wait_for(1)
        await tracing.close()
    messages = [record.getMessage() for record in caplog.records]
    assert len([m for m in messages if "traces are lost" in m]) == 1
    assert len([m for m in messages if m.endswith("again")]) == 1
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


async def test_dead_collector_raises_nothing_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with OtlpCollector() as collector:
        endpoint = collector.endpoint
    tracing = create_tracing(TelemetryConfig(otlp_endpoint=endpoint), "pdserve", "router", "router-0")
    for _ in range(5000):  # more than the exporter's queue holds
        tracing.start("lost").end()
    await tracing.close()
    tracing.start("too late").end()
    assert len(caplog.records) <= 1


class _Hung(SpanProcessor):
    """Its shutdown ends when it is told to."""

    def __init__(self) -> None:
        self.release = Event()
        self.ended = False

    def shutdown(self) -> None:
        self.release.wait(30)
        self.ended = True


async def test_close_does_not_wait_for_ever() -> None:
    hung = _Hung()
    tracing = OtelTracing(TracerProvider(shutdown_on_exit=False), hung)
    await tracing.close()
    assert not hung.ended
    hung.release.set()
