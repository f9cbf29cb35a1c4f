"""Builder of the exact table of nearest neighbours: fast recall, then acceptance by error bound or recomputation.

A row's neighbours are the k other classes of largest cosine, ties by ascending class id, where a cosine is the exact
product of the float32 unit rows, summed in double in a fixed order. The table depends on the rows and k alone: not on
threads, blocks, memory, engine or instruction set. Source: the 100-million-class paper, section 3.2.2; the acceptance
test makes its recall of k' > k exact.

Cost: C² · D operations (each pair once) while the running best of all rows fits into memory, else up to twice that;
recomputed rows cost 2 · C · D each, in double where exact ties (copies of one row) leave no other way.

Legend: C classes, D width, k neighbours, K = k' candidates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.graph.building.acceptance import Refiner
from geartrain.ams.graph.building.build_progress import PartFolder
from geartrain.ams.graph.building.neighbours import NeighbourTable
from geartrain.ams.graph.building.recall import BlockProducts, CoreProducts, Recall
from geartrain.ams.graph.building.rows import Floats, RowSource, UnitBlocks, check_size
from geartrain.ams.observe import failpoints
from geartrain.ams.values.errors import Cancelled, InvalidArgument

DEFAULT_MEMORY_BYTES = 8 << 30
SAVE_SECONDS = 30.0
"""Interval at which a part under way is saved to the resume folder."""
_BLOCK_ROWS = 8192
_FEWEST_ROWS = 64
_BLOCKS_AT_ONCE = 4

OnPairs = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class BuiltGraph:
    """Table of neighbours with its origin."""

    table: NeighbourTable
    fingerprint: str
    """XXH3 of the unit rows of the first read."""
    resumed_pairs: int
    """Pairs of rows that were saved in the folder, and not compared again."""


def build_neighbours(source: RowSource, k: int, **settings: Any) -> NeighbourTable:
    """Return the table of :func:`build_graph`, with the same settings."""
    return build_graph(source, k, **settings).table


def build_graph(
    source: RowSource,
    k: int,
    *,
    products: BlockProducts | None = None,
    num_threads: int | None = None,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: OnPairs | None = None,
    cancelled: Callable[[], bool] = lambda: False,
    resume: Path | None = None,
) -> BuiltGraph:
    """Build the exact table of the k nearest neighbours of every row by cosine.

    Args:
        source: The rows. They are read once if they fit into memory, otherwise again for each part. Rows may change
            during the build. If they fit, the graph is exact for one read of all rows. Otherwise the parts of the
            build may have read different versions of a row; a list's cosines are exact for the rows as last read.
        k: Neighbours a class, at least 1; a class has min(k, C - 1). A row of zeros has cosine 0 with every other.
        products: The engine of the recall; None: float32 on ``num_threads`` cores. Any engine gives the same table.
        num_threads: None: all cores this process may use.
        memory_bytes: Memory for rows and running best lists, in addition to the table itself. All rows fit with
            4·D + 2·16·K bytes a row. With less the table is built in parts. If the rows do not fit either, they are
            read again for each part.
        progress: Called as (compared pairs of rows, all pairs) after each block; resumed pairs count.
        cancelled: Called after each block; true ends the build.
        resume: Folder to which the build is saved every 30 s, fsynced, and from which it resumes after a kill. Parts
            of other rows (by fingerprint), another k, engine or partition are ignored. It is never emptied.

    Returns:
        The table, with ids of int32, and its origin.

    Raises:
        InvalidArgument: k < 1, no rows, or too little memory (names the least).
        NonFinite: A row holds NaN or infinity (names the class).
        InvalidRows: The source returned another shape.
        Cancelled: ``cancelled`` was true; finished work is in ``resume``.
        ConfigError, StateFailed: The folder cannot be used or written.
    """
    check_size(source)
    if k < 1:
        raise InvalidArgument(f"k is {k}; it must be at least 1")
    num_threads = CoreProducts(num_threads).num_threads
    engine = CoreProducts(num_threads) if products is None else products
    num_classes, wanted = source.num_rows, min(k, source.num_rows - 1)
    if wanted == 0:
        alone = UnitBlocks(source, block_rows=1, num_threads=1, held=False)  # not finite is an error here too
        return BuiltGraph(
            NeighbourTable(np.zeros(num_classes + 1, np.int64), np.empty(0, np.int32), k), alone.fingerprint, 0
        )
    plan = _Plan.of(source, wanted, engine, memory_bytes, saves=resume is not None)
    blocks = UnitBlocks(source, block_rows=plan.block_rows, num_threads=num_threads, held=plan.held)
    watch = _Watch(plan, progress, cancelled)
    watch.check()
    build = _Build(blocks, wanted, plan, engine, num_threads, watch)
    if resume is not None:
        build.folder = PartFolder(resume, plan.facts(blocks, wanted, engine))
    neighbours = build.run()
    table = NeighbourTable(np.arange(num_classes + 1, dtype=np.int64) * wanted, neighbours.reshape(-1), k)
    return BuiltGraph(table, blocks.fingerprint, watch.resumed_pairs)


@dataclass(frozen=True)
class _Plan:
    """Division of the rows into parts: the running best of one part is in memory at a time."""

    num_rows: int
    keep: int
    part_rows: int
    block_rows: int
    held: bool

    @classmethod
    def of(cls, source: RowSource, k: int, engine: BlockProducts, memory_bytes: int, *, saves: bool) -> _Plan:
        num_rows, row_bytes = source.num_rows, 4 * source.dim
        # All of a small table: then nothing is left out, and there is nothing to prove.
        keep = min(max(engine.num_candidates(k), k), num_rows)
        # A saved state is in memory twice; exact scores and lists of a block of rows come on top.
        state_bytes = engine.row_bytes(keep) * (2 if saves else 1) + 16 * keep
        if num_rows * (row_bytes + state_bytes) <= memory_bytes:
            return cls(num_rows, keep, num_rows, min(_BLOCK_ROWS, num_rows), held=True)
        left = memory_bytes - num_rows * row_bytes
        if left >= state_bytes * max(num_rows // 8, _FEWEST_ROWS):
            part_rows = left // state_bytes
            return cls(num_rows, keep, part_rows, min(_BLOCK_ROWS, part_rows), held=True)
        # Beside the part's rows: a block, the next one, and what the source reads it from.
        block_rows = min(_BLOCK_ROWS, max(_FEWEST_ROWS, memory_bytes // (16 * row_bytes)))
        part_rows = (memory_bytes - _BLOCKS_AT_ONCE * block_rows * row_bytes) // (state_bytes + row_bytes)
        if part_rows < _FEWEST_ROWS:
            least = _FEWEST_ROWS * (state_bytes + (1 + _BLOCKS_AT_ONCE) * row_bytes)
            raise InvalidArgument(
                f"memory_bytes is {memory_bytes}; rows of dim {source.dim} with k {k} need at least {least}"
            )
        blocks = -(-part_rows // block_rows)
        block_rows = part_rows // blocks
        return cls(num_rows, keep, blocks * block_rows, block_rows, held=False)  # parts are of whole blocks

    def parts(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self.num_rows, self.part_rows):
            yield start, min(start + self.part_rows, self.num_rows)

    def pairs(self) -> int:
        """Return the number of pairs of rows to compare."""
        return sum(_pairs_of(stop - start, self.num_rows) for start, stop in self.parts())

    def facts(self, blocks: UnitBlocks, k: int, engine: BlockProducts) -> dict[str, Any]:
        """Return the facts that a saved part must match."""
        sizes = {"rows": self.num_rows, "dim": blocks.dim, "k": k, "keep": self.keep}
        partition = {"part_rows": self.part_rows, "block_rows": self.block_rows}
        return {"fingerprint": blocks.fingerprint, "engine": engine.name, **sizes, **partition}


def _pairs_of(part_rows: int, num_rows: int) -> int:
    return part_rows * (part_rows - 1) // 2 + part_rows * (num_rows - part_rows)


class _Watch:
    """Progress of a build, and check for cancellation."""

    def __init__(self, plan: _Plan, progress: OnPairs | None, cancelled: Callable[[], bool]) -> None:
        self._done, self._all = 0, plan.pairs()
        self._progress, self._cancelled = progress, cancelled
        self.resumed_pairs = 0

    def advance(self, pairs: int, *, resumed: bool = False) -> None:
        self._done += pairs
        self.resumed_pairs += pairs if resumed else 0
        if self._progress is not None and self._done < self._all:
            self._progress(self._done, self._all)

    def finish(self) -> None:
        """Report completion, once the last lists are made, which takes a while."""
        if self._progress is not None:
            self._progress(self._all, self._all)

    def check(self) -> None:
        if self._cancelled():
            raise Cancelled(f"building the graph was cancelled after {self._done} of {self._all} pairs of rows")


@dataclass(frozen=True)
class _Step:
    """Comparison of two blocks, for the part that holds at least the first of them."""

    a: tuple[int, int]
    b: tuple[int, int]
    inside: bool

    def pairs(self) -> int:
        rows, others = self.a[1] - self.a[0], self.b[1] - self.b[0]
        return rows * (rows - 1) // 2 if self.a == self.b else rows * others


@dataclass
class _Build:
    blocks: UnitBlocks
    k: int
    plan: _Plan
    engine: BlockProducts
    num_threads: int
    watch: _Watch
    folder: PartFolder | None = None

    def run(self) -> npt.NDArray[np.int32]:
        """Return the lists [C, k] of all parts."""
        lists = np.empty((self.plan.num_rows, self.k), np.int32)
        for part, (start, stop) in enumerate(self.plan.parts()):
            kept = None if self.folder is None else self.folder.finished(part)
            if kept is not None:
                lists[start:stop] = kept
                self.watch.advance(_pairs_of(stop - start, self.plan.num_rows), resumed=True)
                continue
            self._part(part, start, stop, lists[start:stop])
            if (folder := self._saving()) is not None:
                folder.save_finished(part, lists[start:stop])
            failpoints.reach("graph.part.after")
        self.watch.finish()
        return lists

    def _part(self, part: int, start: int, stop: int, lists: npt.NDArray[np.int32]) -> None:
        rows = self.blocks.read(start, stop)
        recall = self.engine.start(start, stop - start, self.plan.keep)
        skipped = self._resume(part, recall)
        saved_at = time.monotonic()
        loaded: dict[tuple[int, int], Any] = {}
        for number, step in enumerate(self._steps(start, stop)):
            if number >= skipped:
                self.watch.check()
                self._compare(recall, step, rows, start, loaded)
            self.watch.advance(step.pairs(), resumed=number < skipped)
            due = number >= skipped and time.monotonic() - saved_at >= SAVE_SECONDS
            if due and (folder := self._saving()) is not None:
                folder.save_running(part, number + 1, recall.arrays())
                saved_at = time.monotonic()
        self.watch.check()
        bound = self.engine.error_bound(self.blocks.dim)
        refiner = Refiner(self.blocks, self.k, num_threads=self.num_threads, check=self.watch.check)
        refiner.finish(rows, start, recall.candidates(), bound, lists)

    def _saving(self) -> PartFolder | None:
        """Return the folder, unless rows have changed: the results no longer match the fingerprint."""
        return None if self.blocks.changed else self.folder

    def _resume(self, part: int, recall: Recall) -> int:
        found = None if self.folder is None else self.folder.running(part)
        if found is None:
            return 0
        recall.restore(found[1])
        return found[0]

    def _steps(self, start: int, stop: int) -> Iterator[_Step]:
        """Yield each pair of blocks of the part once, then every block of the part with those outside."""
        inside = [(at, min(at + self.plan.block_rows, stop)) for at in range(start, stop, self.plan.block_rows)]
        for i, a in enumerate(inside):
            for b in inside[i:]:
                yield _Step(a, b, inside=True)
        for begin, end in self.blocks.ranges():
            for other in ((begin, min(end, start)), (max(begin, stop), end)):
                if other[0] < other[1]:
                    for a in inside:
                        yield _Step(a, other, inside=False)

    def _compare(
        self, recall: Recall, step: _Step, rows: Floats, start: int, loaded: dict[tuple[int, int], Any]
    ) -> None:
        a = self._loaded(step.a, rows[step.a[0] - start : step.a[1] - start], loaded)
        if step.inside:
            b = self._loaded(step.b, rows[step.b[0] - start : step.b[1] - start], loaded)
            recall.compare_inside(a, a if step.b == step.a else b)
            return
        if step.b not in loaded and not self.blocks.held:
            for old in [key for key in loaded if not start <= key[0] < start + len(rows)]:
                del loaded[old]  # one block from outside at a time
        others = loaded.get(step.b)
        recall.compare_outside(a, self._loaded(step.b, None, loaded) if others is None else others)

    def _loaded(self, place: tuple[int, int], rows: Floats | None, loaded: dict[tuple[int, int], Any]) -> Any:
        if place not in loaded:
            loaded[place] = self.engine.load(self.blocks.read(*place) if rows is None else rows, place[0])
        return loaded[place]
