"""The exact graph of rows that lie on ranks: their blocks go around a ring (100-million-class paper, section 3.2.2).

Each rank holds its own unit rows and one visiting block, and makes the lists of its own classes; nobody has all rows.
The table is that of ``build_neighbours`` over the rows put together, whatever the number of ranks. A first lap recalls
candidates, the next ones serve the acceptance test of the graph builder: one for exact scores, two for every
8,192 rows whose recall is redone, one for every 256 that are compared exactly. A rank that is done passes blocks on.

Cost per rank, with C classes, L = C / R of them here, width D, k neighbours: 2·C·L·D operations for the recall; a lap
sends 4·(C − L)·D bytes, over gloo. Host memory 8·L·D for the two blocks, ``memory_bytes`` for candidates, and
4·L·k + 8·L for the lists.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from geartrain.ams.graph.building.acceptance import Refiner
from geartrain.ams.graph.building.neighbours import NeighbourTable
from geartrain.ams.graph.building.recall import BlockProducts, CoreProducts, Recall, available_cores
from geartrain.ams.graph.building.rows import Floats
from geartrain.ams.kernels import neighbours as ops
from geartrain.ams.values.errors import Cancelled, InvalidArgument, NonFinite, SyncError
from geartrain.bridge.collectives.communicator import Communicator

__all__ = ["build_on_ring"]

DEFAULT_MEMORY_BYTES = 2 << 30
_BLOCK_ROWS = 8192

OnPairs = Callable[[int, int], None]


def build_on_ring(
    link: Communicator,
    rows_LD: Floats,
    k: int,
    *,
    products: BlockProducts | None = None,
    num_threads: int | None = None,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: OnPairs | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> NeighbourTable:
    """Build the table of the k nearest neighbours of every row; every rank calls it with its own rows, in rank order.

    Args:
        link: The ranks. No other thread uses it meanwhile.
        rows_LD: float32 [L, D] of this rank, L >= 0; overwritten by unit rows.
        k: Neighbours a class, at least 1, the same on every rank; a class has min(k, C - 1).
        products: The engine of the recall; None: float32 on ``num_threads`` cores. Any engine gives the same table.
        num_threads: None: this rank's share of the cores of its host.
        memory_bytes: For candidates on this rank; rows that it is too little for are done later, in laps of their own.
        progress: Called as (pairs of rows compared, pairs in all) of this rank.
        cancelled: Asked after each pair of blocks; true on any rank ends the build on all.

    Returns:
        The lists of this rank's rows: a part of the table, if there are several ranks.

    Raises:
        InvalidArgument: k < 1, or more than 2**31 classes.
        NonFinite: A row holds NaN or infinity (names the class).
        Cancelled: ``cancelled`` was true.
        SyncError: Another rank failed or was cancelled.
    """
    if k < 1:
        raise InvalidArgument(f"k is {k}; it must be at least 1")
    sizes = [size for (size,) in link.exchange([len(rows_LD)])]
    if num_threads is None:
        hosts = link.gather_json(os.uname().nodename)
        num_threads = max(1, available_cores() // hosts.count(os.uname().nodename))
    if sum(sizes) > 2**31:
        raise InvalidArgument(f"the ranks hold {sum(sizes)} rows; an exact graph is built of at most 2**31")
    ring = _Ring(link, rows_LD, sizes)
    lists = np.empty((len(rows_LD), min(k, ring.num_rows - 1)), np.int32)
    work = _Work(
        ring=ring,
        engine=CoreProducts(num_threads) if products is None else products,
        num_threads=num_threads,
        watch=_Watch(ring, progress, cancelled),
        lists=lists,
    )
    try:
        ring.prepare(num_threads)
        if lists.shape[1]:
            work.run(memory_bytes)
        ring.serve()
    except _OfAnother as exc:
        raise SyncError(f"the graph was not built: {exc}") from None
    except Exception:  # of any kind: the others wait for this rank
        ring.tell(failed=True)
        raise
    offsets = np.arange(len(lists) + 1, dtype=np.int64) * lists.shape[1]
    return NeighbourTable(offsets, lists.reshape(-1), k, ring.first, None if link.world_size == 1 else ring.num_rows)


@dataclass(frozen=True, kw_only=True)
class _Work:
    ring: _Ring
    engine: BlockProducts
    num_threads: int
    watch: _Watch
    lists: npt.NDArray[np.int32]
    """[L, k] of this rank, to be filled."""

    def run(self, memory_bytes: int) -> None:
        """Fill the lists, part by part."""
        ring, k = self.ring, self.lists.shape[1]
        # All of a small table: then nothing is left out, and nothing is to be proved.
        keep = min(max(self.engine.keep(k), k), ring.num_rows)
        blocks = memory_bytes // ((self.engine.row_bytes(keep) + 16 * keep) * _BLOCK_ROWS)
        part_rows = max(1, blocks) * _BLOCK_ROWS
        bound = self.engine.error_bound(ring.dim)
        for start in range(0, len(ring.own), part_rows):
            rows = ring.own[start : start + part_rows]
            recall = self.engine.begin(ring.first + start, len(rows), keep)
            self._recall(recall, ring.first + start, ring.first + start + len(rows))
            refiner = Refiner(ring, k, num_threads=self.num_threads, check=self.watch.check)
            refiner.finish(rows, ring.first + start, recall.candidates(), bound, self.lists[start : start + len(rows)])

    def _recall(self, recall: Recall, first: int, end: int) -> None:
        """One lap: the rows of classes ``first`` … ``end`` − 1 meet every other."""
        ring, engine = self.ring, self.engine
        rows = ring.own[first - ring.first : end - ring.first]
        part = [
            (engine.load(rows[at : at + _BLOCK_ROWS], first + at), first + at)
            for at in range(0, len(rows), _BLOCK_ROWS)
        ]
        for start, stop in ring.ranges():
            inside = first <= start < end
            other = next((block for block, at in part if at == start), None)
            if other is None:
                other = engine.load(ring.read(start, stop), start)
            for block, at in part:
                self.watch.check()
                if not inside:
                    recall.compare_outside(block, other)
                elif at <= start:
                    recall.compare_inside(block, other)
            self.watch.advance(len(rows) * (stop - start))


class _OfAnother(Exception):
    """Another rank has failed."""


class _Ring:
    """All rows as the refiner reads them, in laps: the own block, then those of the other ranks as they pass by."""

    held = False

    def __init__(self, link: Communicator, own: Floats, sizes: list[int]) -> None:
        self._link, self.own, self._sizes = link, own, sizes
        self._firsts = np.cumsum([0, *sizes]).tolist()
        self.first: int = self._firsts[link.rank]
        self.num_rows, self.dim = sum(sizes), own.shape[1]
        self._visiting: Floats = own[:0]
        self._here, self._from = own, link.rank

    def prepare(self, num_threads: int) -> None:
        """Make unit rows of the own ones, and room for a visiting block. Raises NonFinite."""
        if self._link.world_size > 1:
            self._visiting = np.empty((max(self._sizes), self.dim), np.float32)
        if len(self.own) and (bad := ops.make_unit_rows(self.own, num_threads)) >= 0:
            raise NonFinite(
                f"the row of class {self.first + bad} holds NaN or infinity; a graph needs finite rows. Restore or "
                "assign it"
            )

    def ranges(self) -> Iterator[tuple[int, int]]:
        """A lap, for which all ranks are asked to pass blocks on."""
        self.tell(wants=True)
        self._here, self._from = self.own, self._link.rank
        yield from self._ranges_here()
        for _ in range(1, self._link.world_size):
            self._pass_on()
            yield from self._ranges_here()

    def _ranges_here(self) -> Iterator[tuple[int, int]]:
        first, stop = self._firsts[self._from], self._firsts[self._from + 1]
        for start in range(first, stop, _BLOCK_ROWS):
            yield start, min(start + _BLOCK_ROWS, stop)

    def read(self, start: int, stop: int) -> Floats:
        """Unit rows of the block that is here."""
        first = self._firsts[self._from]
        return self._here[start - first : stop - first]

    def serve(self) -> None:
        """Pass blocks on until no rank wants them any more."""
        while self.tell():
            self._here, self._from = self.own, self._link.rank
            for _ in range(1, self._link.world_size):
                self._pass_on()

    def tell(self, *, wants: bool = False, failed: bool = False) -> bool:
        """Whether any rank wants a lap. Raises unless all are well; what this rank has failed by is not for here."""
        of_ranks = self._link.exchange([wants, failed])
        bad = [rank for rank, (_, failure) in enumerate(of_ranks) if failure]
        if bad and not failed:
            raise _OfAnother(f"rank {bad[0]} failed or was cancelled; its error tells why")
        return any(wanted for wanted, _ in of_ranks)

    def _pass_on(self) -> None:
        self.tell(wants=True)
        expected = self._sizes[self._from - 1]
        self._link.pass_on(torch.from_numpy(self._here), torch.from_numpy(self._visiting), expected)
        self._here, self._from = self._visiting[:expected], (self._from - 1) % self._link.world_size


class _Watch:
    """Counts what is done; asks whether to go on."""

    def __init__(self, ring: _Ring, progress: OnPairs | None, cancelled: Callable[[], bool]) -> None:
        self._done, self._all = 0, len(ring.own) * ring.num_rows
        self._progress, self._cancelled = progress, cancelled

    def advance(self, pairs: int) -> None:
        self._done += pairs
        if self._progress is not None:
            self._progress(self._done, self._all)

    def check(self) -> None:
        if self._cancelled():
            raise Cancelled(f"building the graph was cancelled after {self._done} of {self._all} pairs of rows")
