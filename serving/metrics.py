"""Prometheus metrics of a model service, by version, so that a canary can be compared.

Each process of a service counts for itself: label ``worker``. Label values come from leases alone, never from requests:
strangers cannot create labels.
"""

from __future__ import annotations

import bisect
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from geartrain.ams.observe.metrics import Buckets, Metric
from geartrain.serving.batching import AnsweredBatch
from geartrain.serving.catalog import Catalog

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_ITEMS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_MAX_VERSIONS = 8
"""Versions of a model with counts, the last used; older counts go, as a training makes new versions for ever."""


class RequestTarget(NamedTuple):
    """Model, version and operation of a request; all empty: it was refused before they were known."""

    model: str = ""
    version: str = ""
    operation: str = ""


class _Family(NamedTuple):
    help: str
    labels: tuple[str, ...] = ()
    """Labels beside those of RequestTarget."""
    bounds: Sequence[float] = ()
    """Bounds of a histogram; empty: a counter."""


FAMILIES = {
    "serve_requests_total": _Family(
        "Requests that were answered or refused, by how: status of HTTP or gRPC.", ("protocol", "code")
    ),
    "serve_request_seconds": _Family(
        "Seconds from the headers of a request until its answer.", ("protocol",), _SECONDS
    ),
    "serve_items_total": _Family("Items that were answered."),
    "serve_batch_items": _Family("Items of a batch, answered together.", bounds=_ITEMS),
    "serve_batch_seconds": _Family("Seconds that the model took for a batch.", bounds=_SECONDS),
    "serve_wait_seconds": _Family("Seconds that the first item of a batch had waited.", bounds=_SECONDS),
}


FOLLOWED: dict[str, tuple[Literal["counter", "gauge"], str]] = {
    "seconds_behind": ("gauge", "Most seconds since the training took a snapshot that is not served."),
    "steps_behind": ("gauge", "Steps of the training since what is served."),
    "age_seconds": ("gauge", "Seconds since the moment of the training that is served."),
    "versions": ("counter", "Versions taken of the training."),
    "failures": ("counter", "Attempts at a version that failed; what was served is served on."),
}
"""Metrics of models that follow a training, by the names of their facts."""


class ServingCounts:
    """Counts of one process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[tuple[str, tuple[str, ...]], list[float]] = {}
        """Number of values up to each bound, and above all; last their sum."""
        self._versions: dict[str, OrderedDict[str, None]] = {}

    def request(self, asked: RequestTarget, protocol: str, code: str, seconds: float) -> None:
        """Count a request that was answered or refused."""
        self._add(asked, ("serve_requests_total", (protocol, code), 1), ("serve_request_seconds", (protocol,), seconds))

    def batch(self, batch: AnsweredBatch) -> None:
        """Count the items of an answered batch."""
        self._add(
            RequestTarget(batch.lease.model, str(batch.lease.servable.version), batch.operation),
            ("serve_items_total", (), batch.items),
            ("serve_batch_items", (), batch.items),
            ("serve_batch_seconds", (), batch.ran_seconds),
            ("serve_wait_seconds", (), batch.waited_seconds),
        )

    def read(self) -> list[Any]:
        """Return all counts: [[family, [value of each label], numbers], ...]."""
        with self._lock:
            return [[name, [*values], [*numbers]] for (name, values), numbers in self._numbers.items()]

    def _add(self, asked: RequestTarget, *counted: tuple[str, tuple[str, ...], float]) -> None:
        """Add a number to each family, under ``asked`` and the other labels; drop the oldest version's counts."""
        with self._lock:
            for name, labels, number in counted:
                bounds, values = FAMILIES[name].bounds, (*asked, *labels)
                numbers = self._numbers.get((name, values))
                if numbers is None:
                    numbers = self._numbers[name, values] = [0.0] * (len(bounds) + 2)
                numbers[bisect.bisect_left(bounds, number)] += 1
                numbers[-1] += number
            versions = self._versions.setdefault(asked.model, OrderedDict())
            versions[asked.version] = None
            versions.move_to_end(asked.version)
            if len(versions) > _MAX_VERSIONS:
                gone = (asked.model, versions.popitem(last=False)[0])
                self._numbers = {key: found for key, found in self._numbers.items() if key[1][:2] != gone}


def describe_process(counts: ServingCounts, queued: int, catalog: Catalog) -> dict[str, Any]:
    """Return the metrics of one process as JSON values."""
    return {
        "numbers": counts.read(),
        "queued": queued,
        "ready": not catalog.unready_reason(),
        "states": [catalog.state(name) for name in catalog.names],
    }


def serving_metrics(told: Mapping[int, Mapping[str, Any]]) -> Iterator[Metric]:
    """Yield the metrics of a service's processes, by process number."""
    for family, (about, labels, bounds) in FAMILIES.items():
        samples = [
            ((worker, *values), Buckets(bounds, numbers[:-1], numbers[-1]) if bounds else numbers[-1])
            for worker, process in told.items()
            for name, values, numbers in process["numbers"]
            if name == family
        ]
        kind: Literal["counter", "histogram"] = "histogram" if bounds else "counter"
        yield Metric(family, kind, about, ("worker", *RequestTarget._fields, *labels), samples)
    queued = [((worker,), process["queued"]) for worker, process in told.items()]
    yield _gauge("serve_queue_items", "Items that wait to be answered.", queued, "worker")
    asking = [
        ((worker, state["name"], loaded["version"]), loaded["asking"])
        for worker, process in told.items()
        for state in process["states"]
        for loaded in state["loaded"]
    ]
    yield _gauge("serve_requests_under_way", "Questions that hold a version.", asking, "worker", "model", "version")
    ready = bool(told) and all(process["ready"] for process in told.values())
    yield _gauge("serve_ready", "1 if all models can be asked.", [((), int(ready))])
    yield from _of_models(next((process["states"] for process in told.values()), ()))


def _of_models(states: Iterable[Mapping[str, Any]]) -> Iterator[Metric]:
    """Yield the metrics that are the same in all processes."""
    versions, created, shares = [], [], []
    for state in states:
        name = (state["name"],)
        shares.append((name, state["canary"]["share"] if state["canary"] else 0))
        for loaded in state["loaded"]:
            if loaded["version"] == state["current"]:
                versions.append((name, loaded["version"]))
                created.append((name, loaded["created"]))
    yield _gauge("serve_version", "Current version.", versions, "model")
    about = "Unix time of the moment of the training that the current version is of."
    yield _gauge("serve_version_created_timestamp_seconds", about, created, "model")
    yield _gauge("serve_canary_share", "Part of the questions that the canary answers; 0: none.", shares, "model")


def _gauge(name: str, about: str, samples: list[tuple[Any, float]], *labels: str) -> Metric:
    return Metric(name, "gauge", about, labels, samples)


def following_metrics(following: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    """Yield the lag of models behind the trainings they follow: facts of each, by its name."""
    for name, (kind, what) in FOLLOWED.items():
        found = [((model,), float(facts[name])) for model, facts in following.items() if facts.get(name) is not None]
        if found:
            total = "_total" if kind == "counter" else ""
            yield Metric(f"serve_follow_{name}{total}", kind, what, ("model",), found)
