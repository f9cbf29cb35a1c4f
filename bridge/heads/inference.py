"""Best classes of a feature over all rows, streamed.

Legend: B samples, D width, k answers, N rows of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from geartrain.bridge.heads.scratch import BufferPool
from geartrain.bridge.heads.selection import ActiveClasses
from geartrain.bridge.heads.softmax import Arithmetic, chunk_bounds, chunk_rows_for, logits_into, normalise_
from geartrain.bridge.heads.stream import RowStream
from geartrain.bridge.heads.tables import HeadTable

SAMPLES_AT_ONCE = 1024


def top_classes(
    table: HeadTable, features_BD: Tensor, k: int, normalised: bool, arithmetic: Arithmetic, pool: BufferPool
) -> tuple[Tensor, Tensor]:
    """Scores [B, k] (compute dtype) and class ids [B, k] of the best rows, best first, on the features' device."""
    if len(features_BD) == 0:
        empty = torch.empty(0, k, dtype=arithmetic.compute, device=arithmetic.device)
        return empty, empty.to(torch.int64)
    parts = [
        _top_of_part(table, part, k, normalised, arithmetic, pool) for part in torch.split(features_BD, SAMPLES_AT_ONCE)
    ]
    return torch.cat([scores for scores, _ in parts]), torch.cat([ids for _, ids in parts])


def _top_of_part(
    table: HeadTable, features_BD: Tensor, k: int, normalised: bool, arithmetic: Arithmetic, pool: BufferPool
) -> tuple[Tensor, Tensor]:
    num_classes = table.spec.num_rows or 0
    query_BD = features_BD.detach().to(arithmetic.compute, copy=True)
    if normalised:
        normalise_(query_BD)
    batch = len(query_BD)
    best_scores = torch.empty(batch, 0, dtype=arithmetic.compute, device=arithmetic.device)
    best_ids = torch.empty(batch, 0, dtype=torch.int64, device=arithmetic.device)
    stream = RowStream(table, ActiveClasses(num_classes), pool, arithmetic.device)
    chunk_rows = chunk_rows_for(batch, table.spec.dim, arithmetic.device)
    for block in stream.blocks():
        for low, high in chunk_bounds(len(block.rows_ND), chunk_rows):
            unit_ND = arithmetic.load_rows(block.rows_ND[low:high], blocking=True)
            if normalised:
                normalise_(unit_ND)
            scores_BN = logits_into(query_BD, unit_ND, arithmetic.empty("logits", batch, high - low), arithmetic)
            scores, columns = scores_BN.topk(min(k, high - low), dim=1)
            best_scores = torch.cat([best_scores, scores], dim=1)
            best_ids = torch.cat([best_ids, columns + (block.start + low)], dim=1)
            best_scores, best_ids = _keep_best(best_scores, best_ids, k)
    return best_scores, best_ids


def _keep_best(scores: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    scores, order = scores.topk(min(k, scores.shape[1]), dim=1)
    return scores, ids.gather(1, order)
