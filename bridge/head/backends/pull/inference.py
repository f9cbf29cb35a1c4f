"""Best classes of a feature over all rows, streamed.

Legend: B samples, D width, k answers, N rows of a chunk, S centers of theirs, each [D].
"""

from __future__ import annotations

import torch
from torch import Tensor

from geartrain.ams.programs.selection import ActiveClasses
from geartrain.bridge.head.backends.pull.stream import Block, RowStream
from geartrain.bridge.head.batch import chunk_bounds, chunk_rows_for, normalise_
from geartrain.bridge.head.loss.chunk_pool import CHUNKS
from geartrain.bridge.head.sub_centers import scores_of_classes
from geartrain.bridge.placements.workspace import Arithmetic, BufferPool, Scratch, Workspace
from geartrain.bridge.rows.tables import ReadableTable

SAMPLES_AT_ONCE = 1024


def top_classes(
    table: ReadableTable,
    active: ActiveClasses,
    features_BD: Tensor,
    k: int,
    *,
    normalised: bool,
    centers: int,
    arithmetic: Arithmetic,
    pool: BufferPool,
) -> tuple[Tensor, Tensor]:
    """Scores [B, k] (compute dtype) and class ids [B, k] of the best of the ``active`` rows, best first, on the
    features' device."""
    if len(features_BD) == 0:
        empty = torch.empty(0, k, dtype=arithmetic.compute, device=arithmetic.device)
        return empty, empty.to(torch.int64)
    own_BD = features_BD.detach().to(arithmetic.compute, copy=True)
    if normalised:
        normalise_(own_BD)
    parts = [
        _top_of_part(table, active, query_BD, k, normalised, centers, arithmetic, pool)
        for query_BD in torch.split(own_BD, SAMPLES_AT_ONCE)
    ]
    return torch.cat([scores for scores, _ in parts]), torch.cat([ids for _, ids in parts])


def _top_of_part(
    table: ReadableTable,
    active: ActiveClasses,
    query_BD: Tensor,
    k: int,
    normalised: bool,
    centers: int,
    arithmetic: Arithmetic,
    pool: BufferPool,
) -> tuple[Tensor, Tensor]:
    batch = len(query_BD)
    stream = RowStream(table, active, pool, arithmetic.device)
    chunk_rows = chunk_rows_for(batch, table.spec.dim, arithmetic.device)

    def top_of_chunk(scratch: Scratch, item: tuple[Block, tuple[int, int]]) -> tuple[Tensor, Tensor]:
        block, (low, high) = item
        work = Workspace(arithmetic, scratch)
        unit_SD = work.load_rows(block.rows_ND[low:high], blocking=True).view(-1, query_BD.shape[1])
        if normalised:
            normalise_(unit_SD)
        scores_BN = scores_of_classes(work.product("logits", query_BD, unit_SD.t()), centers)
        scores, columns = scores_BN.topk(min(k, high - low), dim=1)
        return scores, columns + (block.start + low)

    best_scores = query_BD.new_empty(batch, 0)
    best_ids = torch.empty(batch, 0, dtype=torch.int64, device=arithmetic.device)
    for block in stream.blocks():
        chunks = [(block, bounds) for bounds in chunk_bounds(len(block.rows_ND), chunk_rows)]
        found = CHUNKS.map(top_of_chunk, chunks, arithmetic.device)
        scores = torch.cat([best_scores, *(scores for scores, _ in found)], dim=1)
        ids = torch.cat([best_ids, *(ids for _, ids in found)], dim=1)
        best_scores, order = scores.topk(min(k, scores.shape[1]), dim=1)
        best_ids = ids.gather(1, order)
    stream.close()
    if active.sorted_ids is not None:  # so far they are positions
        best_ids = torch.from_numpy(active.sorted_ids).to(arithmetic.device)[best_ids]
    return best_scores, best_ids
