"""Best classes of a feature where the rows are on shards that compute beside them: no row travels.

Per call and shard 4·B·D bytes there and 12·B·k back. Legend: B samples, D width, k answers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from geartrain.ams.programs.class_head import TOP
from geartrain.ams.programs.class_lifecycle import LiveClasses
from geartrain.ams.programs.top_classes import MOST_ANSWERS
from geartrain.ams.values.shard_messages import HostedInputs
from geartrain.bridge.head.batch import normalise_
from geartrain.bridge.placements.workspace import Arithmetic
from geartrain.bridge.rows.tables import HeadCalls

_BYTES_PER_ANSWER = 12


def hosted_top_classes(
    calls: HeadCalls, features: Tensor, k: int, *, living: LiveClasses, normalised: bool, centers: int = 1
) -> tuple[Tensor, Tensor]:
    """Scores [B, k] (computed in float32; float64 for float64 features) and class ids [B, k] of the best living
    classes.

    Best first, on the features' device. One call to each shard, more where features or answers exceed ``part_bytes``.
    """
    compute = Arithmetic.of(features).compute
    own_BD = features.detach().to(compute, copy=True)
    if normalised:
        normalise_(own_BD)
    width = max(4 * own_BD.shape[1], _BYTES_PER_ANSWER * k)
    at_once = max(1, min(calls.part_bytes // width, MOST_ANSWERS // k))
    settings = {"normalised": float(normalised), "sub_centers": float(centers), "k": float(k)}
    retired = {} if living.are_all else {"retired_runs": living.retired_runs.ravel()}
    scores, ids = [torch.empty(0, k, dtype=compute)], [torch.empty(0, k, dtype=torch.int64)]
    for part_BD in torch.split(own_BD.float().cpu().contiguous(), at_once) if len(own_BD) else ():
        inputs = (HostedInputs(arrays={"features": part_BD.numpy(), **retired}, settings=settings),)
        answers = calls.compute(TOP, lambda _, inputs=inputs: inputs)  # type: ignore[misc]
        found = torch.cat([torch.tensor(arrays["scores"]) for arrays in answers], dim=1)
        classes = torch.cat([torch.tensor(arrays["ids"]) for arrays in answers], dim=1)
        best, order = found.topk(k, dim=1)
        scores.append(best.to(compute))
        ids.append(classes.gather(1, order))
    return torch.cat(scores).to(features.device), torch.cat(ids).to(features.device)
