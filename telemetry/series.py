"""What metrics are made of: counters, histograms and gauges of one process with bounded labels.

telemetry/metrics.py builds its two classes from these. Recording never raises: a metric must not cost
anybody a request. Only here is prometheus_client known.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import prometheus_client
from prometheus_client.core import GaugeMetricFamily

OTHER = "other"
"""The label value of everything that is not known beforehand."""


class Counter:
    """A counter, or one for each known value of `label`. Every series exists from the start, at 0."""

    def __init__(self, series: "Series", name: str, text: str, *, label: str = "", known: Collection[str] = ()) -> None:
        metric = prometheus_client.Counter(name, text, [label] if label else [], registry=series.registry)
        self._children = _children(metric, label, known)

    def add(self, amount: float = 1, value: str = OTHER) -> None:
        """Count `amount`; a counter cannot go down, so what is not above 0 counts as nothing."""
        if amount > 0:
            self._children.get(value, self._children[OTHER]).inc(amount)


class Histogram:
    """A histogram, or one for each known value of `label`. `buckets`: upper bounds, rising."""

    def __init__(
        self,
        series: "Series",
        name: str,
        text: str,
        buckets: tuple[float, ...],
        *,
        label: str = "",
        known: Collection[str] = (),
    ) -> None:
        metric = prometheus_client.Histogram(
            name, text, [label] if label else [], registry=series.registry, buckets=buckets
        )
        self._children = _children(metric, label, known)

    def observe(self, amount: float, value: str = OTHER) -> None:
        """Record one measurement."""
        self._children.get(value, self._children[OTHER]).observe(amount)


class Series:
    """All series of one process object; nothing is shared between two of them."""

    def __init__(self) -> None:
        self.registry = prometheus_client.CollectorRegistry(auto_describe=False)

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge that is read when somebody asks, so that it can never be stale."""
        self.registry.register(_Gauge(name, text, "", lambda: {"": read()}))

    def gauges(self, name: str, text: str, label: str, read: Callable[[], Mapping[str, float]]) -> None:
        """One gauge per key of what `read` returns at that moment. The caller bounds the keys."""
        self.registry.register(_Gauge(name, text, label, read))

    def exposition(self) -> str:
        """Everything as Prometheus text, version 0.0.4. Raises what a gauge's reader raises."""
        text: bytes = prometheus_client.generate_latest(_WithoutCreated(self.registry))
        return text.decode()


class _Gauge:
    """A collector (prometheus_client asks for no more than `collect`) of one callback gauge."""

    def __init__(self, name: str, text: str, label: str, read: Callable[[], Mapping[str, float]]) -> None:
        self._name = name
        self._text = text
        self._label = label
        self._read = read

    def collect(self) -> Iterator[Any]:
        family = GaugeMetricFamily(self._name, self._text, labels=[self._label] if self._label else [])
        for value, amount in self._read().items():
            family.add_metric([value] if self._label else [], amount)
        yield family


class _WithoutCreated:
    """Leaves out the `_created` samples, which double the text; the library's own switch for them is
    global to the process."""

    def __init__(self, registry: Any) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Any]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


def _children(metric: Any, label: str, known: Collection[str]) -> dict[str, Any]:
    if not label:
        return {OTHER: metric}
    return {value: metric.labels(value) for value in (*sorted(known), OTHER)}
