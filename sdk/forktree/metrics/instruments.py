"""A program's metrics as objects: made of the table, recorded in microseconds, read when somebody scrapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client import Metric as Family
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from forktree.metrics.table import METRICS, Kind, Metric, Program

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_Made = TypeVar("_Made", Counter, Gauge, Histogram)


class Instruments:
    """Those of one program. Two of them share nothing.

    A counter whose labels are all enumerated has each of its series from the first scrape on, so that the
    first event is seen as a step.
    """

    def __init__(self, program: Program) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._made: dict[str, Counter | Gauge | Histogram] = {}
        self._readings: list[Callable[[], None]] = []
        for metric in METRICS:
            if program in metric.programs:
                self._made[metric.name] = self._make(metric)

    def counter(self, metric: Metric) -> Counter:
        return _as(Counter, self._made[metric.name])

    def gauge(self, metric: Metric) -> Gauge:
        return _as(Gauge, self._made[metric.name])

    def histogram(self, metric: Metric) -> Histogram:
        return _as(Histogram, self._made[metric.name])

    def before_each_scrape(self, read: Callable[[], None]) -> Callable[[], None]:
        """Have `read` set gauges to what is so then. Returns what ends that. Must not wait, nor take long."""
        self._readings.append(read)
        return lambda: self._readings.remove(read)

    def read(self) -> None:
        """Bring all up to date that is not recorded as it happens."""
        for read in self._readings:
            read()

    def text(self) -> bytes:
        """All of it, as Prometheus wants it; some milliseconds, also in another thread."""
        return generate_latest(_Tidy(self._registry))

    def _make(self, metric: Metric) -> Counter | Gauge | Histogram:
        names = tuple(label.name for label in metric.labels)
        match metric.kind:
            case Kind.COUNTER:
                made = Counter(metric.name, metric.help, names, registry=self._registry)
                _begin(made, metric)
                return made
            case Kind.GAUGE:
                gauge = Gauge(metric.name, metric.help, names, registry=self._registry)
                _begin(gauge, metric)
                return gauge
            case Kind.HISTOGRAM:
                return Histogram(
                    metric.name, metric.help, names, buckets=metric.buckets, registry=self._registry
                )


class _Tidy(CollectorRegistry):
    """A registry without the times at which series began, which nobody asks for and double their number."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(auto_describe=False)
        self._whole = registry

    def collect(self) -> Iterator[Family]:
        for family in self._whole.collect():
            family.samples = [each for each in family.samples if not each.name.endswith("_created")]
            yield family


def _begin(made: Counter | Gauge, metric: Metric) -> None:
    if metric.labels and all(label.values for label in metric.labels):
        for values in product(*(label.values for label in metric.labels)):
            made.labels(*values)


def _as(kind: type[_Made], made: object) -> _Made:
    assert isinstance(made, kind), "the table says another kind"
    return made
