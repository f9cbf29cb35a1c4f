"""Exact graph of rows on ranks, whose blocks are passed around a ring (100-million-class paper, section 3.2.2).

Each rank holds its own unit rows and one visiting block, and makes the lists of its own classes; no rank has all rows.
The table equals that of ``build_neighbours`` over all rows, whatever the number of ranks. A first lap recalls
candidates, later ones serve the acceptance test of the graph builder: one for exact scores, two for every 8,192 rows
whose recall is redone, one for every 256 that are compared exactly. A rank that has finished passes blocks on.

Cost per rank, with C classes, L = C / R of them here, width D, k neighbours: 2·C·L·D operations for the recall; a lap
sends 2·(C − L)·D bytes for the recall of a device, whose products have 16 bits, and for rows of 16 bits; else 4. They
are sent between the devices (NCCL), or in the background between the hosts (gloo), as two NCCL groups might wait for
each other. Host memory 8·L·D for the two blocks, ``memory_bytes`` for candidates, and 4·L·k + 8·L for the lists; device
memory 4·L·D, that of ``RunningNearest`` for a part, 4·D for each of its rows and of 131,072 others, whose exact scores
a device that runs kernels computes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from geartrain.ams.graph.building.acceptance import Refiner
from geartrain.ams.graph.building.neighbours import NeighbourTable
from geartrain.ams.graph.building.recall import BlockProducts, CoreProducts, Recall, available_cores
from geartrain.ams.graph.building.rows import Floats
from geartrain.ams.kernels import neighbours as ops
from geartrain.ams.values.errors import Cancelled, InvalidArgument, NonFinite, SyncError
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.head.selection.graph_products import DeviceBlock, TorchProducts

__all__ = ["build_on_ring"]

DEFAULT_MEMORY_BYTES = 2 << 30
_BLOCK_ROWS = 8192
_OTHERS = 4
"""Blocks compared with the rows of a part at a time on a device: about as many as fit in its cache."""
_UPLOADED = 16
"""Blocks copied to a device at a time."""

OnPairs = Callable[[int, int], None]


def build_on_ring(
    link: Communicator,
    rows_LD: Floats,
    k: int,
    *,
    products: TorchProducts | None = None,
    raw_LD: Tensor | None = None,
    carrier: Communicator | None = None,
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
        products: Makes the recall on its device; None: float32 on ``num_threads`` cores. Both give the same table.
        raw_LD: The same rows in a type of 16 bits, on the host, if they have one: they travel instead of float32.
        carrier: Sends rows from device to device; None: ``link``, which tells numbers alone otherwise.
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
    ring = _Ring(link, rows_LD, sizes, raw=raw_LD, engine=products, carrier=carrier or link, num_threads=num_threads)
    lists = np.empty((len(rows_LD), min(k, ring.num_rows - 1)), np.int32)
    work = _Work(
        ring=ring,
        products=products,
        num_threads=num_threads,
        watch=_Watch(ring, progress, cancelled),
        lists=lists,
    )
    try:
        ring.prepare()
        if lists.shape[1]:
            work.run(memory_bytes)
        ring.serve()
    except _OfAnother as exc:
        raise SyncError(f"the graph was not built: {exc}") from None
    except Exception:  # of any kind: the others wait for this rank
        ring.agree_on_wants(failed=True)
        raise
    offsets = np.arange(len(lists) + 1, dtype=np.int64) * lists.shape[1]
    return NeighbourTable(offsets, lists.reshape(-1), k, ring.first, None if link.world_size == 1 else ring.num_rows)


@dataclass(frozen=True, kw_only=True)
class _Work:
    ring: _Ring
    products: TorchProducts | None
    num_threads: int
    watch: _Watch
    lists: npt.NDArray[np.int32]
    """Lists of this rank [L, k], to be filled."""

    def run(self, memory_bytes: int) -> None:
        """Fill the lists, part by part."""
        ring, k = self.ring, self.lists.shape[1]
        engine: BlockProducts = CoreProducts(self.num_threads) if self.products is None else self.products
        # A small table is taken whole: then nothing is left out or must be proved.
        keep = min(max(engine.num_candidates(k), k), ring.num_rows)
        score_bytes = 8 * keep * (2 if self.products is None else 1)  # the cores keep twice as many candidates
        blocks = memory_bytes // ((engine.row_bytes(keep) + score_bytes) * _BLOCK_ROWS)
        part_rows = max(1, blocks) * _BLOCK_ROWS
        bound = engine.error_bound(ring.dim)
        for start in range(0, len(ring.own), part_rows):
            rows = ring.own[start : start + part_rows]
            if self.products is None:
                recall = engine.start(ring.first + start, len(rows), keep)
                self._recall(engine, recall, ring.first + start, ring.first + start + len(rows))
                found = recall.candidates()
            else:
                on_device = self.products.start(ring.first + start, len(rows), keep)
                self._recall_on_device(on_device, start, len(rows))
                found = on_device.candidates(k, bound)
            begin_scores = None if self.products is None else self.products.exact_scorer
            refiner = Refiner(ring, k, num_threads=self.num_threads, check=self.watch.check, begin_scores=begin_scores)
            refiner.finish(rows, ring.first + start, found, bound, self.lists[start : start + len(rows)])

    def _recall_on_device(self, recall: Recall, start: int, num_rows: int) -> None:
        """Do one lap: all rows of the part are compared with many others at a time."""
        ring = self.ring
        part = DeviceBlock(ring.rounded[start : start + num_rows], ring.first + start)
        for first, rows_LD in ring.blocks():
            for at in range(0, len(rows_LD), _OTHERS * _BLOCK_ROWS):
                self.watch.check()
                others_ND = rows_LD[at : at + _OTHERS * _BLOCK_ROWS]
                recall.compare_outside(part, DeviceBlock(others_ND, first + at))
                self.watch.advance(num_rows * len(others_ND))

    def _recall(self, engine: BlockProducts, recall: Recall, first: int, end: int) -> None:
        """Do one lap: the rows of classes ``first`` … ``end`` − 1 are compared with all others."""
        ring = self.ring
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
    """Failure of another rank."""


_ROUNDED, _EXACT = 1, 2
"""Kinds of rows sent in a lap: rows as products take them, on the device, or the sources of unit rows."""


class _Ring:
    """All rows as the refiner reads them, in laps: the own block, then those of the other ranks in turn."""

    held = False

    def __init__(
        self,
        link: Communicator,
        own: Floats,
        sizes: list[int],
        *,
        raw: Tensor | None,
        engine: TorchProducts | None,
        carrier: Communicator,
        num_threads: int,
    ) -> None:
        self._link, self._carrier, self._threads = link, carrier, num_threads
        self.own, self._sizes, self._engine = own, sizes, engine
        self._firsts = np.cumsum([0, *sizes]).tolist()
        self.first: int = self._firsts[link.rank]
        self.num_rows, self.dim = sum(sizes), own.shape[1]
        self._exact = torch.from_numpy(own) if raw is None else raw
        self._visiting = {_EXACT: self._exact[:0]}
        self._here, self._from = self._exact, link.rank
        self.rounded = torch.empty(0)

    def prepare(self) -> None:
        """Make unit rows of the own ones, and memory for visiting ones. Raises NonFinite."""
        room = max(self._sizes) if self._link.world_size > 1 else 0
        self._visiting[_EXACT] = self._exact.new_empty(room, self.dim)
        if len(self.own) and (bad := ops.make_unit_rows(self.own, self._threads)) >= 0:
            raise NonFinite(
                f"the row of class {self.first + bad} holds NaN or infinity; a graph needs finite rows. Restore or "
                "assign it"
            )
        if self._engine is not None:
            self.rounded = self._engine.load(self.own[:0], 0).rows_ND.new_empty(len(self.own), self.dim)
            self._visiting[_ROUNDED] = self.rounded.new_empty(room, self.dim)
            self._round_to(self.rounded)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield the ranges of a lap, in which all ranks pass blocks on."""
        for _ in self._lap(_EXACT):
            yield from self._ranges_here()

    def _ranges_here(self) -> Iterator[tuple[int, int]]:
        first, stop = self._firsts[self._from], self._firsts[self._from + 1]
        rows = _BLOCK_ROWS * (1 if self._engine is None else _UPLOADED)
        for start in range(first, stop, rows):
            yield start, min(start + rows, stop)

    def read(self, start: int, stop: int) -> Floats:
        """Return unit rows of the present block."""
        first = self._firsts[self._from]
        if self._from == self._link.rank:
            return self.own[start - first : stop - first]
        rows_ND = self._here[start - first : stop - first]
        if rows_ND.dtype == torch.float32:
            return rows_ND.numpy()  # unit rows are sent
        unit_ND: Floats = rows_ND.float().numpy()
        ops.make_unit_rows(unit_ND, self._threads)
        return unit_ND

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield, in a lap, the first class and rows of each rank's block, as products take them."""
        for _ in self._lap(_ROUNDED):
            rows_LD = self.rounded if self._from == self._link.rank else self._here
            if rows_LD.dtype != self.rounded.dtype or rows_LD.device != self.rounded.device:
                rows_LD = self._round_to(self._visiting[_ROUNDED][: len(rows_LD)])
            yield self._firsts[self._from], rows_LD

    def _round_to(self, out_LD: Tensor) -> Tensor:
        assert self._engine is not None
        first = self._firsts[self._from]
        for start, stop in self._ranges_here():
            out_LD[start - first : stop - first] = self._engine.load(self.read(start, stop), start).rows_ND
        return out_LD

    def _lap(self, wants: int) -> Iterator[None]:
        """Yield once for each rank, whose block is present then; if any rank wants exact rows, all get them."""
        kind = self.agree_on_wants(wants)
        if not kind:
            return
        self._from, self._here = self._link.rank, self._exact if kind == _EXACT else self.rounded
        room, via = self._visiting[kind], self._exact.device if self._engine is None else self._engine.device
        yield
        for _ in range(1, self._link.world_size):
            self.agree_on_wants(kind)
            expected = self._sizes[self._from - 1]
            self._carrier.pass_on(self._here, room, expected, via)
            self._from, self._here = (self._from - 1) % self._link.world_size, room[:expected]
            yield

    def serve(self) -> None:
        """Pass blocks on until no rank needs them."""
        while list(self._lap(0)):
            pass

    def agree_on_wants(self, wants: int = 0, *, failed: bool = False) -> int:
        """Return the most that any rank wants. Raises if another rank has failed; this rank's error is raised
        elsewhere."""
        of_ranks = self._link.exchange([wants, failed])
        bad = [rank for rank, (_, failure) in enumerate(of_ranks) if failure]
        if bad and not failed:
            raise _OfAnother(f"rank {bad[0]} failed or was cancelled; its error tells why")
        return max(wanted for wanted, _ in of_ranks)


class _Watch:
    """Counter of the work done; checks for cancellation."""

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
