"""Metrics of a process for Prometheus, served as text at a port of their own.

A source yields :class:`Metric` values and needs no library. They are read at each scrape, on a thread of the port:
scraping adds no work to a step.
"""

from __future__ import annotations

import itertools
import logging
import socket
import socketserver
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, Self

from geartrain.ams.values.config import format_address, split_address
from geartrain.ams.values.errors import ConfigError
from geartrain.ams.values.rpc import version

if TYPE_CHECKING:
    import prometheus_client.core as library

logger = logging.getLogger(__name__)

PREFIX = "geartrain_"
_MAX_SCRAPES = 64
"""Most connections at once, idle ones included; more are refused."""
_SCRAPE_SECONDS = 10.0
"""Timeout of a handshake, of a request, and of the transfer of its answer."""


ADDRESSES: list[str] = []
"""host:port of each metrics port of this process."""


class Buckets(NamedTuple):
    """Value of a histogram."""

    bounds: Sequence[float]
    """Upper bounds, ascending, in the unit of the metric."""
    counts: Sequence[float]
    """Count between each bound and the one before, and last the count above all bounds."""
    total: float | None = None
    """Sum of all values; None: unknown."""


class Metric(NamedTuple):
    """Family of samples; those of several families with one name are joined."""

    name: str
    """Name with its unit, and ``_total`` for a counter; without PREFIX."""
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: Sequence[str] = ()
    """Names of labels; ``cluster`` is added to every sample."""
    samples: Iterable[tuple[Sequence[object], float | Buckets]] = ()
    """Pairs of (values of the labels, value)."""


class Source(Protocol):
    """Source of metrics in a process beside its role: a cache, a reader of a topic."""

    def metrics(self) -> Iterable[Metric]:
        """Yield the metrics so far. Thread-safe."""


def cache_metrics(cache: str, holds: str, hits: int, misses: int) -> Iterator[Metric]:
    """Yield the metrics of a cache: its name, what it ``holds``, hits and misses."""
    for name, count, what in (("hits", hits, "found"), ("misses", misses, "fetched or computed")):
        samples = [((cache, holds), count)]
        yield Metric(f"cache_{name}_total", "counter", f"Look-ups of entries {what}.", ("cache", "holds"), samples)


_sources: weakref.WeakSet[Source] = weakref.WeakSet()
_sources_lock = threading.Lock()


def register_source(source: Source) -> None:
    """Add ``source`` to the metrics of this process, for as long as it is referenced. Thread-safe."""
    with _sources_lock:
        _sources.add(source)


def _of_sources() -> Iterator[Metric]:
    with _sources_lock:
        live = list(_sources)
    for source in live:
        yield from source.metrics()


class Port(Protocol):
    """Access control of a metrics port: geartrain.ams.rpc.credentials.Credentials."""

    @property
    def cluster(self) -> str:
        """Name of the cluster."""

    def accept(self, connection: socket.socket) -> socket.socket:
        """Return the connection once the peer is authenticated. Raises OSError: it is not of this cluster."""


def serve_metrics(address: str, collect: Callable[[], Iterable[Metric]], role: str, port: Port) -> MetricsServer:
    """Serve the metrics of ``collect`` and of all sources at ``"host:port"`` to the peers that ``port`` accepts.

    Raises ConfigError: prometheus_client is not installed, or the address cannot be bound.
    """
    registry = _registry(collect, role, lambda: port.cluster, f"metrics {address!r} needs")
    from prometheus_client import MetricsHandler

    handler: Any = MetricsHandler.factory(registry)
    handler.timeout = _SCRAPE_SECONDS
    try:
        return MetricsServer(address, handler, port)
    except OSError as exc:
        raise ConfigError(
            f"cannot serve metrics at {address!r}: {(exc.strerror or str(exc)).lower()}; choose an address of this "
            "machine and a port that is free (0 picks one)"
        ) from exc


def metrics_text(collect: Callable[[], Iterable[Metric]], role: str, cluster: str) -> tuple[bytes, str]:
    """Return all metrics as text, and its content type, for a server with other paths too. Raises ConfigError."""
    registry = _registry(collect, role, lambda: cluster, "/metrics needs")
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

    return generate_latest(registry), CONTENT_TYPE_LATEST


def _registry(
    collect: Callable[[], Iterable[Metric]], role: str, cluster: Callable[[], str], who: str
) -> library.CollectorRegistry:
    try:
        from prometheus_client import CollectorRegistry, ProcessCollector
    except ImportError as exc:
        raise ConfigError(f"{who} prometheus_client; pip install 'geartrain[metrics]'") from exc

    class Collector:
        _process = ProcessCollector(registry=None)
        _lock = threading.Lock()

        def collect(self) -> Iterator[library.Metric]:
            """Yield all metrics; scrapes take turns."""
            with self._lock:
                yield from _labelled(self._process.collect(), cluster())
                yield from _families([_build_info(role), *collect(), *_of_sources()], cluster())

    registry = CollectorRegistry()
    registry.register(Collector())
    return registry


def _build_info(role: str) -> Metric:
    return Metric("build_info", "gauge", "Always 1; says what runs.", ("role", "version"), [((role, version()), 1)])


def _families(metrics: Iterable[Metric], cluster: str) -> Iterator[library.Metric]:
    from prometheus_client import core

    kinds = {
        "counter": core.CounterMetricFamily,
        "gauge": core.GaugeMetricFamily,
        "histogram": core.HistogramMetricFamily,
    }
    found: dict[str, tuple[Any, dict[tuple[str, ...], Any]]] = {}
    for metric in metrics:
        if metric.name not in found:
            family = kinds[metric.kind](PREFIX + metric.name, metric.help, labels=["cluster", *metric.labels])
            found[metric.name] = family, {}
        samples = found[metric.name][1]
        for values, value in metric.samples:
            labels = tuple(map(str, values))
            samples[labels] = _together(samples[labels], value) if labels in samples else value
    for family, samples in found.values():
        for labels, value in samples.items():
            if isinstance(value, Buckets):
                bounds = [*map(str, map(float, value.bounds)), "+Inf"]
                cumulative = itertools.accumulate(value.counts)
                family.add_metric([cluster, *labels], list(zip(bounds, cumulative, strict=True)), value.total)
            else:
                family.add_metric([cluster, *labels], value)
        yield family


def _together(one: Any, other: Any) -> Any:
    """Return the sum of two values under the same labels, such as those of two caches of one table."""
    if not isinstance(one, Buckets):
        return one + other
    total = None if one.total is None or other.total is None else one.total + other.total
    return Buckets(one.bounds, [sum(both) for both in zip(one.counts, other.counts, strict=True)], total)


def _labelled(families: Iterable[library.Metric], cluster: str) -> Iterator[library.Metric]:
    for family in families:
        family.samples = [sample._replace(labels={"cluster": cluster, **sample.labels}) for sample in family.samples]
        yield family


class MetricsServer(socketserver.ThreadingTCPServer):
    """Port that answers scrapes on threads of its own until it is closed. A context manager."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, address: str, handler: Any, port: Port) -> None:
        host, number = split_address(address)
        family, *_, bind_to = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0]
        self.address_family = family
        self._port = port
        self._free = threading.BoundedSemaphore(_MAX_SCRAPES)
        super().__init__(bind_to[:2], handler)  # type: ignore[arg-type]
        self.address = format_address(host, self.socket.getsockname()[1])
        """host:port of the listening socket."""
        ADDRESSES.append(self.address)
        self._thread = threading.Thread(target=self.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the port."""
        ADDRESSES.remove(self.address)
        self.shutdown()
        self._thread.join()
        self.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for the request, unless there are too many."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer the request on its own thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answer the request if the peer is accepted."""
        request.settimeout(_SCRAPE_SECONDS)
        with self._port.accept(request) as connection:
            super().finish_request(connection, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Log why a scrape failed, in one line if the peer caused it."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            logger.info("cannot send metrics to %s: %s", client_address[0], error)
        else:
            logger.error("cannot collect metrics", exc_info=error)
