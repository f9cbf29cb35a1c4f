"""A collective that goes on beside what is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch.distributed as dist

from geartrain.bridge.collectives.traffic import lost_ranks_named

T = TypeVar("T")


class Pending(Generic[T]):
    """The result of a collective that was begun; every rank asks for it, or none does."""

    def __init__(self, work: dist.Work | None, take: Callable[[], T], operation: str) -> None:
        """``work`` is waited for once, then ``take()`` makes the result. ``operation`` names it in errors."""
        self._work = work
        self._take: Callable[[], T] | None = take
        self._operation = operation
        self._result: list[T] = []

    @staticmethod
    def done(result: T) -> Pending[T]:
        """One that needs no waiting."""
        return Pending(None, lambda: result, "")

    def result(self) -> T:
        """Wait for it (on CUDA: let the current stream wait). Raises RankLost."""
        if self._take is not None:
            if self._work is not None:
                with lost_ranks_named(self._operation):
                    self._work.wait()
            self._result.append(self._take())
            self._work = self._take = None
        return self._result[0]
