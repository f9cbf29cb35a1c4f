"""Coalescer: requests of several threads in one device batch, of up to ``max_ids`` ids or ``max_wait_seconds``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from geartrain.ams.values.specs import Ids

R = TypeVar("R")


@dataclass(eq=False)
class _Request(Generic[R]):
    ids: Ids
    result: R | None = None
    error: BaseException | None = None
    is_done: bool = False


class Coalescer(Generic[R]):
    """Batches the requests of threads: one of the waiting threads computes for all of them. Thread-safe.

    ``compute`` (distinct ids [K] -> result) is never called twice at a time; ``part`` cuts the answer to one request
    out of the result, by the positions [n] of its ids in the batch.
    """

    def __init__(
        self,
        compute: Callable[[Ids], R],
        part: Callable[[R, Ids, Ids], R],
        *,
        max_ids: int,
        max_wait_seconds: float,
    ) -> None:
        self._compute = compute
        self._part = part
        self._max_ids = max_ids
        self._max_wait_seconds = max_wait_seconds
        self._changed = threading.Condition()
        self._waiting: list[_Request[R]] = []
        self._turn = threading.Lock()

    @property
    def queued_ids(self) -> int:
        """Number of ids that wait for a batch."""
        with self._changed:
            return self._queued()

    def get(self, ids: Ids) -> R:
        """Return the result for distinct ``ids`` [n], in their order; raises what ``compute`` raised."""
        request: _Request[R] = _Request(ids)
        with self._changed:
            self._waiting.append(request)
            self._changed.notify_all()
        try:
            with self._turn:
                if not request.is_done:
                    self._lead(self._gathered(request))
        finally:  # also after Ctrl-C, so that other threads continue
            with self._changed:
                if request in self._waiting:
                    self._waiting.remove(request)
        if request.error is not None:
            raise request.error
        assert request.result is not None
        return request.result

    def _queued(self) -> int:
        return sum(len(request.ids) for request in self._waiting)

    def _gathered(self, leader: _Request[R]) -> list[_Request[R]]:
        """Wait for further requests; return the leader's and those behind it that fit in one batch with it."""
        with self._changed:
            self._changed.wait_for(lambda: self._queued() >= self._max_ids, self._max_wait_seconds)
            self._waiting.remove(leader)
            batch, total = [leader], len(leader.ids)
            while self._waiting and total + len(self._waiting[0].ids) <= self._max_ids:
                batch.append(self._waiting.pop(0))
                total += len(batch[-1].ids)
        return batch

    def _lead(self, batch: list[_Request[R]]) -> None:
        try:
            self._answer(batch)
        except Exception as exc:
            for request in batch:
                request.error = exc
        except BaseException:  # Ctrl-C is for this thread alone: the others' requests stay in the queue
            with self._changed:
                self._waiting[:0] = batch[1:]
            raise
        for request in batch:
            request.is_done = True

    def _answer(self, batch: list[_Request[R]]) -> None:
        if len(batch) == 1:
            batch[0].result = self._compute(batch[0].ids)
            return
        distinct, inverse = np.unique(np.concatenate([request.ids for request in batch]), return_inverse=True)
        result = self._compute(distinct)
        start = 0
        for request in batch:
            positions = inverse[start : start + len(request.ids)]
            request.result = self._part(result, positions, request.ids)
            start += len(request.ids)
