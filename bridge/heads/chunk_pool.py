"""Chunks of rows worked on side by side, one thread a chunk.

A chunk takes some twenty tensor operations. Were each of them spread over all threads, every one would end in a
barrier, and one core busy elsewhere would hold all of them up twenty times a chunk. A whole chunk per thread has no
barrier, keeps each core's chunk in its own cache, and measures faster even on an idle machine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

import torch

from geartrain.bridge.heads.scratch import Scratch

T = TypeVar("T")
R = TypeVar("R")


class ChunkPool:
    """``torch.get_num_threads()`` threads, each of which computes alone and has scratch of its own. Thread-safe."""

    def __init__(self) -> None:
        self._own = threading.local()
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._executor_threads = 0
        self._running = 0
        self._num_threads = 0

    def map(self, function: Callable[[Scratch, T], R], items: Sequence[T], device: torch.device) -> list[R]:
        """Results of ``function(scratch, item)`` in order, without gradients or autocast; the first error is raised.

        On a GPU, with one thread or for one item it simply runs here.
        """
        if device.type != "cpu" or len(items) == 1:
            return [self._alone(function, item) for item in items]
        with self._one_thread_per_operation() as executor:
            futures = [executor.submit(self._alone, function, item) for item in items]
            wait(futures)
        return [future.result() for future in futures]

    def _alone(self, function: Callable[[Scratch, T], R], item: T) -> R:
        if not hasattr(self._own, "scratch"):
            self._own.scratch = Scratch()
        with torch.inference_mode(False), torch.no_grad():
            return function(self._own.scratch, item)

    @contextmanager
    def _one_thread_per_operation(self) -> Iterator[ThreadPoolExecutor]:
        """PyTorch's own number of threads is one for the whole process, so it is lowered only while chunks run."""
        with self._lock:
            if self._running == 0:
                self._num_threads = torch.get_num_threads()
                self._executor = self._executor_of(self._num_threads)
                torch.set_num_threads(1)
            executor = self._executor
            assert executor is not None
            self._running += 1
        try:
            yield executor
        finally:
            with self._lock:
                self._running -= 1
                if self._running == 0:
                    torch.set_num_threads(self._num_threads)

    def _executor_of(self, threads: int) -> ThreadPoolExecutor:
        if self._executor is None or self._executor_threads != threads:
            if self._executor is not None:
                self._executor.shutdown(wait=False)
            # BLAS, unlike PyTorch, counts its threads for each calling thread: each has to be told.
            self._executor = ThreadPoolExecutor(
                threads, thread_name_prefix="geartrain-head", initializer=torch.set_num_threads, initargs=(1,)
            )
            self._executor_threads = threads
        return self._executor


CHUNKS = ChunkPool()
"""The process's pool: heads take turns."""
