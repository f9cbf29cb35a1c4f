"""Best classes of a feature over rows that lie on several ranks.

Legend: B samples of all ranks, S of this one, D width, k answers, N rows of a chunk, S
centers here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from geartrain.ams.programs.selection import ActiveClasses
from geartrain.bridge.head.backends.active_rows import HostActive
from geartrain.bridge.head.batch import chunk_bounds, chunk_rows_for, normalise_
from geartrain.bridge.head.loss.chunk_pool import CHUNKS
from geartrain.bridge.head.sub_centers import scores_of_classes
from geartrain.bridge.placements.device_rows import DeviceRows
from geartrain.bridge.placements.workspace import Arithmetic, Scratch, Workspace


def top_classes_on_ranks(
    table: DeviceRows,
    active: ActiveClasses,
    features_SD: Tensor,
    k: int,
    *,
    normalised: bool,
    centers: int,
    arithmetic: Arithmetic,
) -> tuple[Tensor, Tensor]:
    """Scores [S, k] (compute dtype) and class ids [S, k] of the best ``active`` rows, best first, for the rank's own.

    Every rank calls it, with any number of samples. Collectives: an exchange of one integer, all-gathers of the
    features and of 16 · k bytes a sample and rank.
    """
    link = table.link
    sizes = [size for (size,) in link.exchange([len(features_SD)])]
    own_BD = link.gather(features_SD.detach().to(arithmetic.compute, copy=True).contiguous(), sizes)
    if normalised:
        normalise_(own_BD)
    scores, ids = _top_here(
        table, HostActive.of(active, table.first, table.stop), own_BD, k, normalised, centers, arithmetic
    )
    most = [len(scores)] * link.world_size
    all_scores = link.gather(scores, most).view(link.world_size, -1, k)
    all_ids = link.gather(ids, most).view(link.world_size, -1, k)
    first = sum(sizes[: link.rank])
    own = slice(first, first + sizes[link.rank])
    joint_scores = all_scores[:, own].transpose(0, 1).reshape(-1, link.world_size * k)
    joint_ids = all_ids[:, own].transpose(0, 1).reshape(-1, link.world_size * k)
    best, order = joint_scores.topk(k, dim=1)
    return best, joint_ids.gather(1, order)


def _top_here(
    table: DeviceRows,
    active: HostActive,
    query_BD: Tensor,
    k: int,
    normalised: bool,
    centers: int,
    arithmetic: Arithmetic,
) -> tuple[Tensor, Tensor]:
    """The best of the rows here, filled up to k with scores of −inf."""
    batch, places = len(query_BD), active.places(table.device)

    def top_of_chunk(scratch: Scratch, chunk: tuple[int, int]) -> tuple[Tensor, Tensor]:
        work = Workspace(arithmetic, scratch)
        place = places.chunk(*chunk)
        unit_SD = table.load(work, place, name="rows").view(-1, query_BD.shape[1])
        if normalised:
            normalise_(unit_SD)
        query_NB = work.narrow("narrow queries", query_BD)
        logits_BS = work.product("logits", query_NB, work.narrow("narrow rows", unit_SD).t())
        logits_BN = scores_of_classes(logits_BS, centers)
        scores, columns = logits_BN.topk(min(k, logits_BN.shape[1]), dim=1)
        numbers = columns + place.start if isinstance(place, slice) else place[columns]
        return scores, numbers + table.first

    chunks = chunk_bounds(active.num, chunk_rows_for(batch, table.spec.dim, arithmetic.device))
    found = CHUNKS.map(top_of_chunk, chunks, arithmetic.device) if chunks else []
    nothing = torch.full((batch, k), -torch.inf, dtype=arithmetic.compute, device=arithmetic.device)
    scores = torch.cat([nothing, *(scores for scores, _ in found)], dim=1)
    ids = torch.cat([torch.zeros_like(nothing, dtype=torch.int64), *(ids for _, ids in found)], dim=1)
    best, order = scores.topk(k, dim=1)
    return best, ids.gather(1, order)
