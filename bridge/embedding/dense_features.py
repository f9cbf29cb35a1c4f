"""Fields whose vectors are no rows of a table: dense features by id, as a slow gear computes them from images.

Legend: N ids of a field that are no padding, B bags, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from geartrain.bridge.embedding.field import Field
from geartrain.bridge.embedding.ids import BatchIds


def distinct_features(fields: Sequence[Field]) -> list[Any]:
    """The modules that fields have their vectors from, each once."""
    return list({id(one.features): one.features for one in fields if one.features is not None}.values())


def feature_vectors(fields: Sequence[Field], given: Sequence[BatchIds], device: torch.device) -> list[Tensor]:
    """The vectors of each field as the others have them, [B, D], or [N, D] of ids that are not pooled, padding
    included. Each module is asked once, for the ids of all its fields.
    """
    counted = [_counted(field, ids) for field, ids in zip(fields, given, strict=True)]
    found: dict[int, Tensor] = {}
    for features in distinct_features(fields):
        own = [number for number, field in enumerate(fields) if field.features is features]
        ids = torch.cat([torch.from_numpy(given[number].values)[counted[number]] for number in own]).to(device)
        vectors_ND = features(ids) if len(ids) else torch.zeros(0, features.dim, device=device)
        found.update(zip(own, vectors_ND.split([len(counted[number]) for number in own]), strict=True))
    return [
        _pooled(field, ids, found[number], counted[number])
        for number, (field, ids) in enumerate(zip(fields, given, strict=True))
    ]


def _counted(field: Field, ids: BatchIds) -> Tensor:
    """The places of ids that are no padding."""
    values = torch.from_numpy(ids.values)
    return torch.arange(len(values)) if field.padding_id is None else (values != field.padding_id).nonzero().squeeze(1)


def _pooled(field: Field, ids: BatchIds, vectors_ND: Tensor, counted: Tensor) -> Tensor:
    device, places = vectors_ND.device, counted.to(vectors_ND.device)
    weights = None if ids.weights is None else torch.from_numpy(ids.weights)
    weights = ids.given_weights if ids.given_weights is not None else weights
    weights_N = None if weights is None else weights.to(device, torch.float32)[places]
    weighted_ND = vectors_ND if weights_N is None else vectors_ND * weights_N[:, None]
    if field.pooling is None:
        return weighted_ND.new_zeros(len(ids.values), vectors_ND.shape[1]).index_copy(0, places, weighted_ND)
    lengths = torch.full((ids.num_bags,), ids.bags) if isinstance(ids.bags, int) else torch.from_numpy(ids.bags).diff()
    bag_N = torch.repeat_interleave(torch.arange(ids.num_bags), lengths)[counted].to(device)
    none_BD = weighted_ND.new_zeros(ids.num_bags, vectors_ND.shape[1])
    if field.pooling == "max":
        return none_BD.scatter_reduce(0, bag_N[:, None].expand_as(vectors_ND), vectors_ND, "amax", include_self=False)
    sums_BD = none_BD.index_add(0, bag_N, weighted_ND)
    if field.pooling == "sum":
        return sums_BD
    ones_N = torch.ones(len(counted), device=device) if weights_N is None else weights_N
    totals_B = sums_BD.new_zeros(ids.num_bags).index_add(0, bag_N, ones_N if field.pooling == "mean" else ones_N**2)
    is_none = totals_B == 0
    by_B = torch.where(is_none, 1.0, totals_B)
    return torch.where(is_none[:, None], 0.0, sums_BD / (by_B if field.pooling == "mean" else by_B.sqrt())[:, None])
