"""Top-k classes of features over all rows: streamed to this process, computed by the shards, or on the ranks.

Legend: B samples (of all ranks), S of this rank or centers of a chunk's rows, D width, k answers, N rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from geartrain.ams.client.hosted_calls import HostedCalls
from geartrain.ams.client.table import Table
from geartrain.ams.programs.class_head import TOP
from geartrain.ams.programs.class_lifecycle import LiveClasses
from geartrain.ams.programs.hosted import chunk_bounds
from geartrain.ams.programs.selection import ActiveClasses, FullSoftmax
from geartrain.ams.programs.top_classes import MAX_ANSWERS, SearchedRows, best_of
from geartrain.ams.values.shard_messages import HostedInputs
from geartrain.bridge.head.backends.active_rows import HostActive
from geartrain.bridge.head.backends.row_stream import Block, RowStream
from geartrain.bridge.head.loss.batch import chunk_rows_for, normalise_
from geartrain.bridge.head.loss.chunk_pool import CHUNKS
from geartrain.bridge.head.loss.sub_centers import scores_of_classes
from geartrain.bridge.placements.device_rows import DeviceRows
from geartrain.bridge.placements.workspace import Arithmetic, BufferPool, Scratch, Workspace
from geartrain.bridge.rows.tables import TORCH_DTYPES, ReadableTable, as_numpy

SAMPLES_AT_ONCE = 1024
_MIN_ROWS = 1024
_BYTES_PER_ANSWER = 12

TopK = tuple[Tensor, Tensor]
"""Scores [B, k] in the compute dtype, and ids [B, k] int64 of the best classes, best first."""


class TopOfPulled:
    """Top-k search over pulled rows, on the features' device.

    On a CPU rows are coded and searched, as many at a time as fit in ``kept_bytes`` with their codes; if all fit, they
    are cached until they change: each batch of an evaluation needs the same ones. Elsewhere, and for features in
    float64, matrix products are computed, and rows streamed once for every 1,024 samples.
    """

    def __init__(self, table: ReadableTable, pool: BufferPool, *, centers: int, kept_bytes: int) -> None:
        self._table, self._pool, self._centers, self._kept_bytes = table, pool, centers, kept_bytes
        self._kept: tuple[object, Any] = (None, None)
        """Key of the cached rows, and the rows."""

    def __call__(self, live: LiveClasses, features_BD: Tensor, k: int, *, normalised: bool) -> TopK:
        """Return scores and ids of the best existing classes."""
        arithmetic = Arithmetic.of(features_BD)
        query_BD = _queries(features_BD, arithmetic, normalised)
        active = live.select(FullSoftmax(), np.empty(0, np.int64), 0)
        if arithmetic.device.type == "cpu" and arithmetic.compute == torch.float32 and len(features_BD):
            queries, threads = query_BD.contiguous().numpy(), torch.get_num_threads()
            found = [rows.best(queries, k, threads=threads) for rows in self._rows(live, active, normalised)]
            scores, ids = best_of(found, k)
            return torch.from_numpy(scores), torch.from_numpy(ids)
        none = _nothing(query_BD[:0], arithmetic, k)
        some = torch.split(query_BD, SAMPLES_AT_ONCE) if len(query_BD) else ()
        parts = [self._top_of_stream(active, part_BD, k, normalised, arithmetic) for part_BD in some]
        return torch.cat([none[0], *(scores for scores, _ in parts)]), torch.cat([none[1], *(ids for _, ids in parts)])

    def _rows(self, live: LiveClasses, active: ActiveClasses, normalised: bool) -> Iterator[SearchedRows]:
        """Yield all rows, some at a time."""
        table, threads = self._table, torch.get_num_threads()
        at_once = max(_MIN_ROWS, self._kept_bytes // (5 * table.spec.dim))
        now = None
        if isinstance(table, Table) and active.num <= at_once:  # the version is asked for before rows are read
            now = (table.incarnation, table.versions(), live.fingerprint)
        if now is not None and now == self._kept[0]:
            yield self._kept[1]
            return
        for start, stop in chunk_bounds(active.num, at_once):
            ids = active.range(start, stop)
            rows_ND = torch.empty(len(ids), table.spec.dim, dtype=TORCH_DTYPES[table.spec.dtype], device="cpu")
            table.pull_into(ids, as_numpy(rows_ND))
            rows_SD = rows_ND.float().numpy().reshape(-1, table.spec.dim // self._centers)
            found = SearchedRows.of(rows_SD, ids, self._centers, normalised=normalised, threads=threads)
            if now is not None:
                self._kept = now, found
            yield found

    def _top_of_stream(
        self, active: ActiveClasses, query_BD: Tensor, k: int, normalised: bool, arithmetic: Arithmetic
    ) -> TopK:
        stream = RowStream(self._table, active, self._pool, arithmetic.device)
        chunk_rows = chunk_rows_for(len(query_BD), self._table.spec.dim, arithmetic.device)

        def chunks(block: Block) -> list[tuple[int, int]]:
            return chunk_bounds(block.stop - block.start, chunk_rows)

        def top_of_chunk(scratch: Scratch, block: Block, chunk: tuple[int, int]) -> TopK:
            work = Workspace(arithmetic, scratch)
            start, stop = block.start + chunk[0], block.start + chunk[1]
            scores, columns = _top_of_rows(work, block.load(work, start, stop), query_BD, k, normalised, self._centers)
            return scores, columns + start

        best = _nothing(query_BD, arithmetic, 0)
        for _, found in CHUNKS.over_blocks(stream.blocks(), chunks, top_of_chunk, arithmetic.device):
            best = _best_of([best, *found], k)
        stream.close()
        if active.sorted_ids is None:
            return best
        # these were positions so far
        return best[0], torch.from_numpy(active.sorted_ids).to(arithmetic.device)[best[1]]


def top_of_hosted(
    calls: HostedCalls, features: Tensor, k: int, *, live_classes: LiveClasses, normalised: bool, centers: int = 1
) -> TopK:
    """Return the best live classes, computed in float32 by the shards, on the features' device. No row is sent.

    One call to each shard, more where features or answers exceed ``part_bytes``: 4·B·D bytes there and 12·B·k back.
    """
    arithmetic = Arithmetic.of(features)
    own_BD = _queries(features, arithmetic, normalised).float().cpu().contiguous()
    width = max(4 * own_BD.shape[1], _BYTES_PER_ANSWER * k)
    at_once = max(1, min(calls.part_bytes // width, MAX_ANSWERS // k))
    settings = {"normalised": float(normalised), "sub_centers": float(centers), "k": float(k)}
    retired = {} if live_classes.are_all else {"retired_runs": live_classes.retired_runs.ravel()}
    scores, ids = ([part] for part in _nothing(own_BD[:0], Arithmetic.of(own_BD), k))
    for part_BD in torch.split(own_BD, at_once) if len(own_BD) else ():
        inputs = (HostedInputs(arrays={"features": part_BD.numpy(), **retired}, settings=settings),)
        answers = calls.compute(TOP, lambda _, inputs=inputs: inputs)  # type: ignore[misc]
        found = _best_of(
            [(torch.tensor(part["scores"], device="cpu"), torch.tensor(part["ids"], device="cpu")) for part in answers],
            k,
        )
        scores.append(found[0])
        ids.append(found[1])
    return torch.cat(scores).to(features.device, arithmetic.compute), torch.cat(ids).to(features.device)


def top_on_ranks(
    table: DeviceRows, active: ActiveClasses, features_SD: Tensor, k: int, *, normalised: bool, centers: int
) -> TopK:
    """Return the best ``active`` rows of all ranks, for the rank's own samples [S].

    Every rank calls it, with any number of samples. Collectives: an exchange of one integer, all-gathers of the
    features and of 16 · k bytes a sample and rank.
    """
    link, arithmetic = table.link, Arithmetic.of(features_SD)
    sizes = [size for (size,) in link.exchange([len(features_SD)])]
    joint_BD = link.gather(features_SD.detach().to(arithmetic.compute).contiguous(), sizes)
    here = _top_of_device(table, HostActive.of(active, table.first, table.stop), joint_BD, k, normalised, centers)
    first = sum(sizes[: link.rank])
    own = slice(first, first + sizes[link.rank])
    parts = [link.gather(part, [len(joint_BD)] * link.world_size).view(link.world_size, -1, k)[:, own] for part in here]
    return _best_of(list(zip(*parts, strict=True)), k)


def _top_of_device(
    table: DeviceRows, active: HostActive, joint_BD: Tensor, k: int, normalised: bool, centers: int
) -> TopK:
    """Return the best rows of this rank, filled up to k with scores of −inf."""
    arithmetic, places = Arithmetic.of(joint_BD), active.places(table.device)
    query_BD = _queries(joint_BD, arithmetic, normalised)

    def top_of_chunk(scratch: Scratch, chunk: tuple[int, int]) -> TopK:
        work = Workspace(arithmetic, scratch)
        place = places.chunk(*chunk)
        rows_ND = table.load(work, place, name="rows")
        scores, columns = _top_of_rows(work, rows_ND, query_BD, k, normalised, centers)
        numbers = columns + place.start if isinstance(place, slice) else place[columns]
        return scores, numbers + table.first

    chunks = chunk_bounds(active.num, chunk_rows_for(len(query_BD), table.spec.dim, arithmetic.device))
    found = CHUNKS.map(top_of_chunk, chunks, arithmetic.device) if chunks else []
    return _best_of([_nothing(query_BD, arithmetic, k), *found], k)


def _queries(features_BD: Tensor, arithmetic: Arithmetic, normalised: bool) -> Tensor:
    """Return a copy of the features as they are multiplied with rows."""
    own_BD = features_BD.detach().to(arithmetic.compute, copy=True)
    if normalised:
        normalise_(own_BD)
    return own_BD


def _nothing(query_BD: Tensor, arithmetic: Arithmetic, k: int) -> TopK:
    scores = torch.full((len(query_BD), k), -torch.inf, dtype=arithmetic.compute, device=arithmetic.device)
    return scores, torch.zeros_like(scores, dtype=torch.int64)


def _top_of_rows(work: Workspace, rows_ND: Tensor, query_BD: Tensor, k: int, normalised: bool, centers: int) -> TopK:
    """Return scores and row numbers of the best of a chunk, which is overwritten."""
    unit_SD = rows_ND.view(-1, query_BD.shape[1])
    if normalised:
        normalise_(unit_SD)
    scores_BN = scores_of_classes(work.product("logits", query_BD, unit_SD.t()), centers)
    scores, columns = scores_BN.topk(min(k, scores_BN.shape[1]), dim=1)
    return scores, columns


def _best_of(found: Sequence[TopK], k: int) -> TopK:
    scores, ids = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
    best, order = scores.topk(min(k, scores.shape[1]), dim=1)
    return best, ids.gather(1, order)
