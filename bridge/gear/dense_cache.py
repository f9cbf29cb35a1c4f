"""Caches of dense features by id: one in the worker's memory, and one in a store that slow gears share.

Shapes: N ids of one call, D width of a dense feature. Both keep with each vector the time and the dense version of its
computation. An entry is fresh (a hit) if

    |now − time| < expire_seconds    and    |dense_version − version| <= max_version_lag (None: any).

Magnitudes, because clocks and versions can go back: an entry from the future (a clock was set back, another host's is
ahead, a snapshot was restored) counts as one from the past, so no entry lives longer than 2 · expire_seconds on the
reader's clock, however far that was set back. But an entry of a host whose clock is ahead by more than expire_seconds
is a miss at first and fresh later: clocks of slow gears that share a store must agree to less than that; a store that
removes records after a while (``record_seconds``) limits it by its own clock. With ``expire_seconds=0`` nothing is
fresh.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from geartrain.ams.kernels.freshness import FreshnessCheck, judge
from geartrain.ams.kernels.position_lru import PositionLru, Positions
from geartrain.ams.observe.metrics import Buckets, Metric, cache_metrics, register_source
from geartrain.ams.storage.features.store import FeatureStore
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.gear_messages import FeatureReply, Features
from geartrain.ams.values.specs import Ids
from geartrain.bridge.rows.transfers import put, take

Hits = npt.NDArray[np.bool_]

AGE_EDGES = tuple(10.0 ** (exponent / 4) for exponent in range(-12, 25))
"""Edges of age bins, in seconds: 1 ms … 10^6 s, four bins a decade, one below and one above."""
LAG_EDGES = tuple(2**exponent for exponent in range(25))
"""Edges of lag bins, in dense updates: 0, 1, 2 to 3, 4 to 7, …, and one for 2^24 and more."""


class FeatureCache(Protocol):
    """Cache as an engine uses it: :class:`WorkerCache` or :class:`SharedCache`."""

    def lookup(self, ids: Ids, *, now: float, dense_version: int) -> tuple[FeatureReply, Hits]:
        """Return the features of ids, and whether each is a hit; misses have version -1 and time -inf."""

    def insert(self, ids: Ids, features: FeatureReply) -> None:
        """Store features."""

    def report(self) -> dict[str, Any]:
        """Return ``hits``, ``misses`` and more."""


class FreshnessCounts:
    """Counts of hits and misses, and histograms of the hits' age and version lag. Not thread-safe."""

    def __init__(self, expire_seconds: float, max_version_lag: int | None) -> None:
        """Raises InvalidArgument for a value outside its range."""
        if not expire_seconds >= 0:
            raise InvalidArgument(f"expire_seconds is {expire_seconds!r}; it must be >= 0 (0: nothing is kept)")
        if max_version_lag is not None and max_version_lag < 0:
            raise InvalidArgument(f"max_version_lag is {max_version_lag}; it must be >= 0, or None for any")
        self._expire_seconds = expire_seconds
        self._max_version_lag = max_version_lag
        self._hits = self._absent = self._expired = self._lagging = 0
        self._edges = np.array(AGE_EDGES)
        self._ages = np.zeros(len(AGE_EDGES) + 1, np.int64)
        self._lags = np.zeros(len(LAG_EDGES) + 1, np.int64)

    def judge(
        self,
        positions: Positions | None,
        versions: npt.NDArray[np.int64],
        times: npt.NDArray[np.float64],
        now: float,
        dense_version: int,
    ) -> FreshnessCheck:
        """Read the stamps of the entries ``positions`` [N] (None: all), decide which are hits, and count."""
        judged = judge(
            positions,
            versions,
            times,
            now=now,
            dense_version=dense_version,
            expire_seconds=self._expire_seconds,
            max_version_lag=self._max_version_lag,
            age_edges=self._edges,
            age_counts=self._ages,
            lag_counts=self._lags,
        )
        self._hits += judged.num_hits
        self._lagging += judged.num_lagging
        self._absent += judged.num_absent
        self._expired += len(judged.hits) - judged.num_hits - judged.num_lagging - judged.num_absent
        return judged

    def metrics(self, name: str, holds: str) -> Iterator[Metric]:
        """Yield the metrics of a cache called ``name``; ``holds`` says what it caches."""
        misses = self._absent + self._expired + self._lagging
        yield from cache_metrics(name, holds, self._hits, misses)
        labels, values = ("cache", "holds"), (name, holds)
        age, lag = "Age of features that were found.", "Dense updates between features that were found and the newest."
        ages = Buckets(AGE_EDGES, self._ages.tolist())
        yield Metric("feature_age_seconds", "histogram", age, labels, [(values, ages)])
        lags = Buckets([edge - 1 for edge in LAG_EDGES], self._lags.tolist())
        yield Metric("feature_lag_updates", "histogram", lag, labels, [(values, lags)])

    def report(self) -> dict[str, Any]:
        """Return numbers and lists, for metrics and JSON; a histogram has ``edges`` [E] and ``counts`` [E + 1]."""
        misses = self._absent + self._expired + self._lagging
        return {
            "hits": self._hits,
            "misses": misses,
            "hit_rate": self._hits / max(1, self._hits + misses),
            "absent": self._absent,
            "expired": self._expired,
            "lagging": self._lagging,
            "age_seconds": {"edges": list(AGE_EDGES), "counts": self._ages.tolist()},
            "version_lag": {"edges": list(LAG_EDGES), "counts": self._lags.tolist()},
        }


class WorkerCache:
    """LRU cache of features in this process, without network. Thread-safe.

    One array [capacity + 1, D] and stamps by position; the least recently used entry is overwritten. Memory: capacity ×
    (4 D + 80) bytes. A lookup costs a gather of its rows and about 60 ns an id. Vectors may be on a device
    (:meth:`vectors`), stamps are always on the host, so that misses are known without waiting for the device.
    """

    def __init__(
        self, capacity: int, dim: int, *, expire_seconds: float, max_version_lag: int | None = None, name: str = ""
    ) -> None:
        """``name``: of its metrics. Raises InvalidArgument for a value outside its range."""
        self.name = name
        self._index = PositionLru(capacity)
        # One row more than positions: misses read it.
        self._vectors = torch.zeros(capacity + 1, _checked_dim(dim), dtype=torch.float32)
        self._versions = np.full(capacity + 1, -1, np.int64)
        self._times = np.full(capacity + 1, -math.inf)
        self._counts = FreshnessCounts(expire_seconds, max_version_lag)
        self._evicted = 0
        self._lock = threading.Lock()
        register_source(self)

    def metrics(self) -> Iterator[Metric]:
        """Yield the metrics of hits and misses."""
        return self._counts.metrics(self.name, "features")

    def lookup(self, ids: Ids, *, now: float, dense_version: int) -> tuple[FeatureReply, Hits]:
        vectors, judged = self.vectors(ids, self._vectors.device, now=now, dense_version=dense_version)
        return _found(vectors.cpu().numpy(), judged.versions, judged.times, dense_version), judged.hits

    def vectors(
        self, ids: Ids, device: torch.device, *, now: float, dense_version: int
    ) -> tuple[torch.Tensor, FreshnessCheck]:
        """Return :meth:`lookup` with vectors [N, D] on ``device``, to which the cache moves all of its vectors."""
        with self._lock:
            positions = self._index.find(ids, touch=True)
            positions[positions < 0] = self._index.capacity
            judged = self._counts.judge(positions, self._versions, self._times, now, dense_version)
            if self._vectors.device != device:
                with torch.inference_mode(False):  # otherwise later training could not write there
                    self._vectors = self._vectors.to(device)
            return take(self._vectors, positions), judged

    def insert(self, ids: Ids, features: FeatureReply) -> None:
        last = slice(-self._index.capacity, None)
        with self._lock:
            positions, evicted = self._index.place(ids[last])
            self._evicted += evicted
            self._times[positions] = -math.inf  # a failure below leaves misses, not another id's vectors
            put(self._vectors, positions, features.vectors_KD[last])
            self._versions[positions] = features.versions[last]
            self._times[positions] = features.times[last]

    def clear(self) -> None:
        """Drop all entries; the counts stay."""
        with self._lock:
            self._index.remove(self._index.oldest(len(self._index))[0])

    def report(self) -> dict[str, Any]:
        """Return hits, misses, histograms of the hits' age and version lag, entries, capacity, evictions and bytes."""
        with self._lock:
            return {
                **self._counts.report(),
                "entries": len(self._index),
                "capacity": self._index.capacity,
                "evicted": self._evicted,
                "bytes": self._vectors.nbytes + self._versions.nbytes + self._times.nbytes + 64 * self._index.capacity,
            }


class SharedCache:
    """Features in a :class:`FeatureStore`; with Redis several slow gears share them. Thread-safe.

    A record is the version (int64), the time (float64) and the vector (float32 [D]), little-endian. A lookup is one
    read of the store: with Redis one round trip of N × (4 D + 24) bytes.
    """

    def __init__(
        self,
        store: FeatureStore,
        dim: int,
        *,
        expire_seconds: float,
        max_version_lag: int | None = None,
        name: str = "",
    ) -> None:
        """The arguments are those of :class:`WorkerCache`. The caller closes the store."""
        self.name = name
        self._record = np.dtype([("version", "<i8"), ("time", "<f8"), ("vector", "<f4", (_checked_dim(dim),))])
        self._absent = np.zeros(1, self._record)
        self._absent["version"], self._absent["time"] = -1, -math.inf
        self._store = store
        self._counts = FreshnessCounts(expire_seconds, max_version_lag)
        self._foreign = 0
        self._lock = threading.Lock()
        register_source(self)

    def metrics(self) -> Iterator[Metric]:
        """Yield the metrics of hits and misses."""
        return self._counts.metrics(self.name, "stored_features")

    def lookup(self, ids: Ids, *, now: float, dense_version: int) -> tuple[FeatureReply, Hits]:
        """Return features and hits; one read of the store. Raises StoreUnavailable, StateDamaged."""
        records, foreign = self._decoded(self._store.read(ids))
        versions, times = records["version"].copy(), records["time"].copy()
        with self._lock:
            judged = self._counts.judge(None, versions, times, now, dense_version)
            self._foreign += foreign
        return _found(records["vector"].copy(), versions, times, dense_version), judged.hits

    def insert(self, ids: Ids, features: FeatureReply) -> None:
        """Store features. Raises StoreUnavailable, StateFailed."""
        records = np.empty(len(ids), self._record)
        records["version"], records["time"] = features.versions, features.times
        records["vector"] = features.vectors_KD
        data, size = records.tobytes(), self._record.itemsize
        self._store.write(ids, [data[start : start + size] for start in range(0, len(data), size)])

    def report(self) -> dict[str, Any]:
        """Return hits, misses, histograms of the hits' age and version lag, records of another width, store counts."""
        with self._lock:
            return {**self._counts.report(), "foreign": self._foreign, "store": vars(self._store.counts())}

    def _decoded(self, values: list[bytes | None]) -> tuple[npt.NDArray[Any], int]:
        """Return the records [N], and the number of those of another size, which count as misses."""
        size = self._record.itemsize
        whole = [value for value in values if value is not None and len(value) == size]
        found = np.frombuffer(b"".join(whole), self._record)
        if len(whole) == len(values):
            return found, 0
        records = np.repeat(self._absent, len(values))
        records[[value is not None and len(value) == size for value in values]] = found
        return records, len(values) - len(whole) - values.count(None)


def _found(
    vectors: Features, versions: npt.NDArray[np.int64], times: npt.NDArray[np.float64], dense_version: int
) -> FeatureReply:
    return FeatureReply(vectors_KD=vectors, versions=versions, times=times, failures={}, dense_version=dense_version)


def _checked_dim(dim: int) -> int:
    if dim < 1:
        raise InvalidArgument(f"dim is {dim}; it must be at least 1")
    return dim
