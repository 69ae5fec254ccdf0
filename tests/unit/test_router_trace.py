"""RouterService.generate against scripted workers: what a trace says."""

from dataclasses import replace

from contracts.requests import FinishReason
from contracts.session import Reserved, Tokens
from telemetry.tracing import Attribute
from tests.helpers.router_rig import PAIR, request, rig, token, virtual

STOP = FinishReason.STOP


class Spans:
    """Tracing that keeps every span."""

    def __init__(self) -> None:
        self.started: list[Recorded] = []

    def start(self, name: str, parent: str = "", **attributes: Attribute) -> "Recorded":
        span = Recorded(name, parent, dict(attributes))
        self.started.append(span)
        return span

    async def close(self) -> None:
        """Nothing to hand over."""


class Recorded:
    """A span and what was said to it."""

    def __init__(self, name: str, parent: str, attributes: dict[str, Attribute]) -> None:
        self.name, self.parent, self.attributes = name, parent, attributes
        self.traceparent = f"inside {name}"
        self.events: list[str] = []
        self.ended: list[str] = []

    def event(self, name: str, **attributes: Attribute) -> None:
        self.events.append(name)

    def set(self, **attributes: Attribute) -> None:
        self.attributes.update(attributes)

    def end(self, error: str = "") -> None:
        self.ended.append(error)


@virtual
async def test_one_request_is_one_trace() -> None:
    spans = Spans()
    async with rig(*PAIR, tracing=spans) as (router, workers):
        call = router.ask(replace(request(), traceparent="the caller"))
        submit = await workers["d0"].submits.get()
        assert submit.traceparent == "inside pdserve.request"
        await workers["d0"].say(Reserved(submit.key), Tokens(submit.key, (token(1), token(2, STOP))))
        await call.end()
    asked, queued, placed = spans.started
    assert [(span.name, span.parent) for span in spans.started] == [
        ("pdserve.request", "the caller"),
        ("pdserve.queue", "inside pdserve.request"),
        ("pdserve.placement", "inside pdserve.request"),
    ]
    assert asked.events == ["received", "admitted", "placed", "reserved", "first_token", "finished"]
    assert placed.attributes == {
        "policy": "least_loaded",
        "pdserve.request": "7-1",
        "pdserve.attempt": 1,
        "prefill_worker": "p0",
        "decode_worker": "d0",
    }
    assert asked.attributes["pdserve.request"] == "7-1"
    assert asked.ended == queued.ended == placed.ended == [""]
