"""Sources of a slow gear's raw samples: a function, a store of bytes, or one tensor of them all.

Legend: B samples, K ids.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from geartrain.ams.values.errors import InvalidArgument, SampleDamaged, SampleNotFound
from geartrain.ams.values.gear_messages import Failure
from geartrain.ams.values.specs import Ids

Decode = Callable[[bytes], Any]
SHOWN = 200
"""Characters of a user's error that a message repeats."""


class SampleStore(Protocol):
    """Part of :class:`geartrain.ams.storage.features.store.FeatureStore` that is used here."""

    def read(self, ids: Ids) -> list[bytes | None]:
        """Return the bytes of each id; None: no sample."""


DenseSamples = Callable[[int], Any] | SampleStore | Tensor | Any


class Samples:
    """Raw samples by id, as tensors of one shape. Thread-safe.

    The source is a function (id -> tensor, array or bytes; ``None`` or LookupError: no sample), a store of bytes with
    ``read(ids)``, or a tensor [num_ids, ...] whose row i is the sample of id i. ``decode`` makes a tensor of bytes. Up
    to ``cache_bytes`` of the decoded samples last used are cached; a tensor's samples need no cache.
    """

    def __init__(self, source: DenseSamples, decode: Decode | None = None, *, cache_bytes: int = 256 << 20) -> None:
        """Raises InvalidArgument if the source is none of these, or a store of bytes without ``decode``."""
        self._rows = torch.as_tensor(source) if isinstance(source, Tensor | np.ndarray) else None
        self._store: Any = source if self._rows is None and hasattr(source, "read") else None
        if self._rows is None and self._store is None and not callable(source):
            raise InvalidArgument(
                f"samples is {source!r}; it must be a function of an id, a store of bytes, or a tensor of all samples"
            )
        if self._store is not None and decode is None:
            raise InvalidArgument(
                "samples is a store of bytes; pass a function that makes a tensor of a sample's bytes: decode="
            )
        self._function: Any = source
        self._decode = decode
        self._cache = _Kept(cache_bytes)
        self._shape: tuple[int, ...] | None = None
        self._lock = threading.Lock()

    def batch(self, ids: Ids) -> tuple[Tensor | None, dict[int, Failure]]:
        """Return the samples [B, ...] of the ``ids`` [K] that have one, in order, and the failures of the others."""
        if self._rows is not None:
            return self._rows_of(ids)
        with self._lock:
            found = {number: kept for number in ids.tolist() if (kept := self._cache.get(number)) is not None}
        missing = [number for number in ids.tolist() if number not in found]
        failures: dict[int, Failure] = {}
        for number, raw in zip(missing, self._raw(missing, failures), strict=True):
            if number not in failures:
                self._collect(number, raw, found, failures)
        good = [found[number] for number in ids.tolist() if number in found]
        return (torch.stack(good) if good else None), failures

    def _rows_of(self, ids: Ids) -> tuple[Tensor | None, dict[int, Failure]]:
        assert self._rows is not None
        beyond = ids[(ids < 0) | (ids >= len(self._rows))]
        reason = f"there are samples of ids 0 … {len(self._rows) - 1}, not of"
        failures = {number: Failure(SampleNotFound.__name__, f"{reason} {number}") for number in beyond.tolist()}
        if failures:
            ids = ids[(ids >= 0) & (ids < len(self._rows))]
        return (self._rows[torch.from_numpy(ids)] if len(ids) else None), failures

    def _raw(self, ids: Sequence[int], failures: dict[int, Failure]) -> list[Any]:
        if self._store is not None:
            found: list[Any] = self._store.read(np.array(ids, np.int64)) if ids else []
            return found
        return [self._called(number, failures) for number in ids]

    def _called(self, number: int, failures: dict[int, Failure]) -> Any:
        try:
            return self._function(number)
        except LookupError:
            return None
        except (Exception, SystemExit) as exc:  # of any kind, from the user's function: other ids continue
            failures[number] = _damaged(number, exc)
            return None

    def _collect(self, number: int, raw: Any, found: dict[int, Tensor], failures: dict[int, Failure]) -> None:
        if raw is None:
            failures[number] = Failure(SampleNotFound.__name__, f"id {number} has no sample")
            return
        try:
            sample = torch.as_tensor(raw if self._decode is None else self._decode(raw))
        except (Exception, SystemExit) as exc:  # from the user's decoder
            failures[number] = _damaged(number, exc)
            return
        with self._lock:
            self._shape = self._shape or tuple(sample.shape)
            if tuple(sample.shape) != self._shape:
                reason = f"the sample of id {number} has shape {tuple(sample.shape)}, that of others {self._shape}"
                failures[number] = Failure(SampleDamaged.__name__, reason)
                return
            found[number] = sample
            self._cache.add(number, sample)


def _damaged(number: int, exc: BaseException) -> Failure:
    words = f"{type(exc).__name__}: {exc}"[:SHOWN]
    return Failure(SampleDamaged.__name__, f"the sample of id {number} cannot be read: {words}")


class _Kept:
    """LRU cache of samples, up to ``max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._samples: OrderedDict[int, Tensor] = OrderedDict()

    def get(self, number: int) -> Tensor | None:
        sample = self._samples.get(number)
        if sample is not None:
            self._samples.move_to_end(number)
        return sample

    def add(self, number: int, sample: Tensor) -> None:
        if sample.nbytes > self._max_bytes:
            return
        if number not in self._samples:  # two threads may have read it
            self._bytes += sample.nbytes
        self._samples[number] = sample
        while self._bytes > self._max_bytes:
            self._bytes -= self._samples.popitem(last=False)[1].nbytes
