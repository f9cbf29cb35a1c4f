"""Thread pool for chunks of rows, one thread a chunk.

A chunk takes some twenty tensor operations. Spread over all threads, each would end in a barrier, and one core busy
elsewhere would delay all others twenty times a chunk. A whole chunk per thread has no barrier, keeps each core's chunk
in its own cache, and measures faster even on an idle machine.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch
from torch.profiler import record_function

from geartrain.bridge.placements.workspace import Scratch

B = TypeVar("B")
T = TypeVar("T")
R = TypeVar("R")

_TRACED_AS = "geartrain::row_chunks"
"""Name of this work in PyTorch's profiler, which does not see the pool's threads."""


class RunningChunks(Generic[R]):
    """Chunks in work."""

    def __init__(self, futures: list[Future[R]]) -> None:
        self._futures = futures

    def wait(self) -> list[R]:
        """Return results in order once all chunks are done; raises the first error."""
        wait(self._futures)
        return [future.result() for future in self._futures]


class Session:
    """Period in which chunks may run, made by :meth:`ChunkPool.session`."""

    def __init__(self, executor: ThreadPoolExecutor | None) -> None:
        self._executor = executor

    def start(self, function: Callable[[Scratch, T], R], items: Sequence[T]) -> RunningChunks[R]:
        """Start ``function(scratch, item)`` for all items, without gradients or autocast.

        Items start in order, those of an earlier call before those of a later one.
        """
        if self._executor is None:
            return RunningChunks([_done(_alone, function, item) for item in items])
        return RunningChunks([self._executor.submit(_alone, function, item) for item in items])


class ChunkPool:
    """Pool of ``torch.get_num_threads()`` threads, each with one operation at a time and its own scratch.
    Thread-safe."""

    def __init__(self) -> None:
        self.forget_threads()

    def forget_threads(self) -> None:
        """Drop threads and sessions. In a forked child they stayed with the parent, and so did the memory they held."""
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._executor_threads = 0
        self._num_open = 0
        self._num_threads = 0
        """PyTorch's number of threads when the first of the open sessions started."""

    def map(
        self,
        function: Callable[[Scratch, T], R],
        items: Sequence[T],
        device: torch.device,
        *,
        spreads_operations: bool = True,
    ) -> list[R]:
        """Return results of ``function(scratch, item)`` in order, as :meth:`Session.start`; one item runs in this
        thread."""
        with record_function(_TRACED_AS):
            if len(items) == 1:
                return [_alone(function, items[0])]
            with self.session(device, spreads_operations=spreads_operations) as session:
                return session.start(function, items).wait()

    def over_blocks(
        self,
        blocks: Iterable[B],
        chunks: Callable[[B], Sequence[T]],
        function: Callable[[Scratch, B, T], R],
        device: torch.device,
        *,
        spreads_operations: bool = True,
    ) -> Generator[tuple[B, list[R]]]:
        """Yield (block, results of ``function(scratch, block, chunk)`` for each of its ``chunks``), block by block.

        If blocks come one by one, the next is started before the results of the last are waited for.
        """

        def run(scratch: Scratch, item: tuple[B, T]) -> R:
            return function(scratch, *item)

        if isinstance(blocks, list):  # all blocks exist
            for block in blocks:
                items = [(block, chunk) for chunk in chunks(block)]
                yield block, self.map(run, items, device, spreads_operations=spreads_operations)
            return
        with self.session(device, spreads_operations=spreads_operations) as session:
            before: tuple[B, RunningChunks[R]] | None = None
            for block in blocks:
                running = session.start(run, [(block, chunk) for chunk in chunks(block)])
                if before is not None:
                    yield before[0], before[1].wait()
                before = block, running
            if before is not None:
                yield before[0], before[1].wait()

    @property
    def num_threads(self) -> int:
        """PyTorch's number of threads per operation, also while it is lowered."""
        with self._lock:
            return self._num_threads if self._num_open > 0 else torch.get_num_threads()

    def apart(self, function: Callable[[], R], device: torch.device) -> R:
        """Return ``function()`` with no operation spread over threads: for many small ones between two large works.

        A BLAS library wakes a thread even for the logarithms of 128 numbers, and that one then spins for
        milliseconds on a core which the next piece of work needs. On a GPU the function runs here, and so it does on a
        thread of the pool, which computes alone anyway.
        """
        if device.type != "cpu" or getattr(_own, "is_of_pool", False):
            return function()
        with self._lock:
            executor = self._executor_of(self._num_threads if self._num_open else torch.get_num_threads())
            made = executor.submit(_without_gradients, function)
        return made.result()

    @contextmanager
    def session(self, device: torch.device, *, spreads_operations: bool = True) -> Iterator[Session]:
        """Let chunks run side by side until the end of the ``with`` block; on a GPU they run one after the other, here.

        Meanwhile the calling thread's number of threads per operation is lowered, if the work consists of operations
        that PyTorch would spread over its threads. Sessions of several threads may overlap; each thread afterwards has
        the number of the first of them.
        """
        if device.type != "cpu":
            yield Session(None)
            return
        with self._lock:
            if self._num_open == 0:
                self._num_threads = torch.get_num_threads()
            executor = self._executor_of(self._num_threads)
            self._num_open += 1
            num_threads, lock = self._num_threads, self._lock
        lowers = spreads_operations and not getattr(_own, "is_lowered", False)
        if lowers:  # OpenMP counts for each thread, so each sets its own, here and when it leaves
            _own.is_lowered = True
            torch.set_num_threads(1)
        try:
            yield Session(executor)
        finally:
            if lowers:
                _own.is_lowered = False
                torch.set_num_threads(num_threads)
            with self._lock:
                if self._lock is lock:  # else this is a child that was forked meanwhile
                    self._num_open -= 1

    def _executor_of(self, threads: int) -> ThreadPoolExecutor:
        if self._executor is None or self._executor_threads != threads:
            if self._executor is not None:
                self._executor.shutdown(wait=False)
            # BLAS, unlike PyTorch, has a number of threads for each calling thread: each sets its own, and the effect
            # on PyTorch's own number is undone once all have.
            told = threading.Barrier(threads + 1)

            def notify() -> None:
                _own.is_of_pool = True
                torch.set_num_threads(1)
                told.wait()

            self._executor = ThreadPoolExecutor(threads, thread_name_prefix="geartrain-head", initializer=notify)
            for _ in range(threads):
                self._executor.submit(_nothing)
            told.wait()
            torch.set_num_threads(threads)
            self._executor_threads = threads
        return self._executor


def _nothing() -> None:
    """Do nothing, so that a thread starts."""


_own = threading.local()


def _alone(function: Callable[[Scratch, T], R], item: T) -> R:
    if not hasattr(_own, "scratch"):
        _own.scratch = Scratch()
    with torch.inference_mode(False), torch.no_grad():
        return function(_own.scratch, item)


def _without_gradients(function: Callable[[], R]) -> R:
    with torch.inference_mode(False), torch.no_grad():
        return function()


def _done(function: Callable[..., R], *arguments: object) -> Future[R]:
    future: Future[R] = Future()
    future.set_result(function(*arguments))
    return future


CHUNKS = ChunkPool()
"""Pool of the process: heads take turns, except for rows that compiled code processes on its own threads."""
os.register_at_fork(after_in_child=CHUNKS.forget_threads)
