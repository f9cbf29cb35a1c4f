"""Chunks of rows worked on side by side, one thread a chunk.

A chunk takes some twenty tensor operations. Were each of them spread over all threads, every one would end in a
barrier, and one core busy elsewhere would hold all of them up twenty times a chunk. A whole chunk per thread has no
barrier, keeps each core's chunk in its own cache, and measures faster even on an idle machine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

from geartrain.bridge.heads.scratch import Scratch

T = TypeVar("T")
R = TypeVar("R")


class ChunkPool:
    """``torch.get_num_threads()`` threads, each of which computes alone and has scratch of its own. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._own = threading.local()
        self._executor: ThreadPoolExecutor | None = None
        self._num_threads = 0

    def map(self, function: Callable[[Scratch, T], R], items: Sequence[T], device: torch.device) -> list[R]:
        """Results of ``function(scratch, item)`` in order, without gradients or autocast; the first error is raised.

        On a GPU, with one thread or for one item it simply runs here.
        """
        threads = torch.get_num_threads()
        if device.type != "cpu" or threads == 1 or len(items) == 1:
            return [self._alone(function, item) for item in items]
        futures = [self._started(threads).submit(self._alone, function, item) for item in items]
        wait(futures)
        return [future.result() for future in futures]

    def _alone(self, function: Callable[[Scratch, T], R], item: T) -> R:
        if not hasattr(self._own, "scratch"):
            self._own.scratch = Scratch()
        with torch.inference_mode(False), torch.no_grad():
            return function(self._own.scratch, item)

    def _started(self, threads: int) -> ThreadPoolExecutor:
        with self._lock:
            if self._executor is None or self._num_threads != threads:
                if self._executor is not None:
                    self._executor.shutdown(wait=False)
                self._executor = _single_threaded_executor(threads)
                self._num_threads = threads
            return self._executor


def _single_threaded_executor(threads: int) -> ThreadPoolExecutor:
    all_started = threading.Barrier(threads + 1)

    def compute_alone() -> None:
        torch.set_num_threads(1)
        all_started.wait()

    executor = ThreadPoolExecutor(threads, thread_name_prefix="geartrain-head", initializer=compute_alone)
    for _ in range(threads):
        executor.submit(lambda: None)
    all_started.wait()
    # The setting is each thread's own, but PyTorch also keeps the last one for threads that it has yet to start.
    torch.set_num_threads(threads)
    return executor


CHUNKS = ChunkPool()
"""The process's pool: heads take turns."""
