"""Names the messages that pass on a stream: which point of the protocol each of them is, and whose request's.

faulty_link.py asks one for each end of a stream. It changes nothing.
"""

from dataclasses import dataclass

from contracts.errors import Refused
from contracts.handover import (
    Abandon,
    Ack,
    Alive,
    Chunk,
    Ended,
    ExporterMessage,
    Fetch,
    Introduce,
    Introduced,
    Last,
    Probe,
    Progress,
    Pull,
    PullerMessage,
    PullFailed,
)
from contracts.requests import AttemptKey
from contracts.session import (
    Cancel,
    Failed,
    Hello,
    Reserved,
    RouterMessage,
    Submit,
    Tokens,
    Welcome,
    WorkerEvent,
    WorkerFrame,
    WorkerMessage,
)
from simulator.fault_points import Point

Message = RouterMessage | WorkerMessage | PullerMessage | ExporterMessage


@dataclass(frozen=True, slots=True)
class Sight:
    """A message as it passes. `request_id` "": it belongs to none."""

    point: Point
    request_id: str = ""


class Recogniser:
    """Names the messages of one stream, in the order in which one of its ends sees them."""

    def __init__(self) -> None:
        self._request_id = ""  # whose hand-over the stream is
        self._probing = False
        self._chunks = 0
        self._spoken: set[AttemptKey] = set()  # legs whose first token has passed

    def see(self, message: Message) -> Sight:
        """What this message is."""
        match message:
            case WorkerFrame():
                return self._frame(message)
            case Submit():
                return Sight(Point.PREFILL if message.source is None else Point.RESERVE, message.key.request_id)
            case Cancel():
                return Sight(Point.CANCEL, message.key.request_id)
            case Hello():
                return Sight(Point.HELLO)
            case Welcome():
                return Sight(Point.WELCOME)
        return self._of_a_pull(message)

    def _frame(self, frame: WorkerFrame) -> Sight:
        """The rarest of its events names it."""
        sights = [self._event(event) for event in frame.events]
        return min(sights, key=lambda sight: _RAREST.index(sight.point), default=Sight(Point.HEARTBEAT))

    def _event(self, event: WorkerEvent) -> Sight:
        match event:
            case Reserved():
                point = Point.RESERVED
            case Failed():
                point = Point.REFUSED if event.error.code == Refused.code else Point.FAILED
            case Tokens():
                point = Point.TOKENS if event.key in self._spoken else Point.FIRST_TOKEN
                self._spoken.add(event.key)
                if event.tokens[-1].finish is not None:
                    self._spoken.remove(event.key)
        return Sight(point, event.key.request_id)

    def _of_a_pull(self, message: PullerMessage | ExporterMessage) -> Sight:
        match message:
            case Pull() | Fetch():
                self._request_id = message.key.request_id.partition("/")[0]  # of a Fetch: "<request>/prefix"
            case Introduced():
                self._probing = True
            case Chunk():
                self._chunks += 1
                if self._probing:
                    return Sight(Point.PROBE_BLOCK)
                return Sight(Point.FIRST_FRAME if self._chunks == 1 else Point.BETWEEN_CHUNKS, self._request_id)
        return Sight(_BY_TYPE[type(message)], self._request_id)


_RAREST = (Point.REFUSED, Point.FAILED, Point.RESERVED, Point.FIRST_TOKEN, Point.TOKENS)
_BY_TYPE: dict[type[Message], Point] = {
    Introduce: Point.INTRODUCE,
    Introduced: Point.INTRODUCED,
    Probe: Point.PROBE,
    Pull: Point.PULL,
    Fetch: Point.FETCH,
    Progress: Point.PROGRESS,
    Last: Point.LAST,
    Ended: Point.ENDED,
    PullFailed: Point.PULL_FAILED,
    Alive: Point.ALIVE,
    Ack: Point.ACK,
    Abandon: Point.ABANDON,
}
