"""Tracing off makes no object and imports no SDK; tracing on keeps the W3C rules."""

import subprocess
import sys

import pytest

from contracts.config import TelemetryConfig
from telemetry import tracing
from telemetry.exporters import create_memory_tracing, create_tracing
from telemetry.tracing import NO_SPAN, NoTracing

_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
_PARENT = "00f067aa0ba902b7"


async def test_off_makes_no_span_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    made = 0

    def count(cls: type) -> object:
        nonlocal made
        made += 1
        return object.__new__(cls)

    monkeypatch.setattr(tracing._NoSpan, "__new__", count)
    off = create_tracing(TelemetryConfig(), "pdserve", "decode", "decode-0")
    spans = [off.start("request", f"00-{_TRACE}-{_PARENT}-01", tokens=n) for n in range(100)]
    for span in spans:
        span.event("chunk", tokens=1)
        span.set(tokens=2)
        span.end("went wrong")
    await off.close()
    assert isinstance(off, NoTracing)
    assert {id(span) for span in spans} == {id(NO_SPAN)}
    assert {span.traceparent for span in spans} == {""}
    assert made == 0


def test_off_does_not_import_the_sdk() -> None:
    code = (
        "import sys\n"
        "from contracts.config import TelemetryConfig\n"
        "from telemetry.exporters import create_tracing\n"
        "create_tracing(TelemetryConfig(), 'pdserve', 'router', 'router-0').start('request')\n"
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={})
    assert done.stdout.strip() == "[]"


def test_child_continues_the_parents_trace() -> None:
    tracing_on, exporter = create_memory_tracing("pdserve", "router", "router-0")
    request = tracing_on.start("request", f"00-{_TRACE}-{_PARENT}-01", model="m")
    child = tracing_on.start("queue", request.traceparent)
    child.event("admitted", waiting=3)
    child.end()
    child.end("a second end changes nothing")
    request.set(tokens=7)
    request.end("gone")
    queue, root = exporter.get_finished_spans()
    assert queue.context is not None
    assert root.context is not None
    assert root.parent is not None
    assert queue.parent is not None
    assert f"{root.context.trace_id:032x}" == f"{queue.context.trace_id:032x}" == _TRACE
    assert f"{root.parent.span_id:016x}" == _PARENT
    assert queue.parent.span_id == root.context.span_id
    assert request.traceparent.startswith(f"00-{_TRACE}-{root.context.span_id:016x}-")
    assert [(event.name, dict(event.attributes or {})) for event in queue.events] == [("admitted", {"waiting": 3})]
    assert dict(root.attributes or {}) == {"model": "m", "tokens": 7}
    assert root.status.description == "gone"
    assert not queue.status.description
    assert dict(root.resource.attributes)["service.name"] == "pdserve"
    assert dict(root.resource.attributes)["pdserve.worker"] == "router-0"


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "nonsense",
        f"00-{_TRACE}-{_PARENT}",
        f"00-{'0' * 32}-{_PARENT}-01",
        f"00-{_TRACE}-{'0' * 16}-01",
        f"ff-{_TRACE}-{_PARENT}-01",
        f"00-{_TRACE}-{_PARENT}-01-extra",
        "x" * 100_000,
        "\x00\n",
    ],
)
def test_malformed_parent_starts_a_new_trace(parent: str) -> None:
    tracing_on, exporter = create_memory_tracing("pdserve", "router", "router-0")
    tracing_on.start("request", parent).end()
    (span,) = exporter.get_finished_spans()
    assert span.parent is None
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" != _TRACE


def test_unsampled_parent_is_respected() -> None:
    tracing_on, exporter = create_memory_tracing("pdserve", "router", "router-0")
    span = tracing_on.start("request", f"00-{_TRACE}-{_PARENT}-00")
    assert span.traceparent.startswith(f"00-{_TRACE}-")
    assert span.traceparent.endswith("-00")
    span.event("ignored")
    span.end()
    assert exporter.get_finished_spans() == ()


def test_ratio_applies_to_new_traces_only() -> None:
    tracing_on, exporter = create_memory_tracing("pdserve", "router", "router-0", ratio=0.0)
    tracing_on.start("new").end()
    tracing_on.start("wanted", f"00-{_TRACE}-{_PARENT}-01").end()
    assert [span.name for span in exporter.get_finished_spans()] == ["wanted"]
