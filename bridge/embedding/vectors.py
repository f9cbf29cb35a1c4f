"""Vectors of a field from those of its ids, in tensor operations: pooled, shaped for the caller, or computed by a
module in place of a table (a slow gear, from images).

Legend: N ids of a field except padding, B bags, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from geartrain.ams.kernels.embedding import BadId, FeatureIds, Lookup
from geartrain.ams.values.arrays import FOLD
from geartrain.ams.values.errors import InvalidArgument, InvalidIds
from geartrain.ams.values.specs import Ids
from geartrain.bridge.embedding.field import Field
from geartrain.bridge.embedding.ids import FieldIds
from geartrain.bridge.embedding.levels import jagged_tensor
from geartrain.bridge.kernels.lookup import FieldShape, RowSpan, index_fields, pool
from geartrain.bridge.rows.transfers import upload_together


def shaped(field: Field, ids: FieldIds, vectors: Tensor, *, per_node: bool = False) -> Tensor:
    """Return vectors [V, D] of a field as [B, D], [B, L, D], or jagged [B, ?, D] where its ids are not pooled. For a
    batch with levels they are the samples', with ``per_node`` the nodes'.
    """
    found = _shaped(field, ids, vectors)
    return found if ids.nodes is None or per_node else ids.nodes.expand(found)


def _shaped(field: Field, ids: FieldIds, vectors: Tensor) -> Tensor:
    if field.pooling is not None or ids.is_vector:
        return vectors
    if isinstance(ids.bags, int):
        return vectors.view(-1, ids.bags, vectors.shape[1])
    return jagged_tensor(vectors, torch.as_tensor(ids.bags).to(vectors.device))


def out_of_range(field: Field, feature: FeatureIds, place: int, num_rows: int | None) -> InvalidIds:
    """Return the error for the id at ``place`` among those of a field, whose table takes ids below ``num_rows``."""
    if isinstance(feature.bags, int):
        row = place // feature.bags
    else:
        row = int(np.searchsorted(feature.bags, place, side="right")) - 1
    hint = (
        "" if feature.padding_id is not None else f"; if it stands for no id, say so: padding_id={feature.ids[place]}"
    )
    return InvalidIds(
        f"id {feature.ids[place]} of field {field.name!r} in row {row} is out of range; ids lie in "
        f"[0, {2**63 if num_rows is None else num_rows}){hint}{FOLD if num_rows is None else ''}"
    )


def merged_ids(fields: Sequence[Field], features: Sequence[FeatureIds], num_rows: Sequence[int | None]) -> Lookup:
    """Return the ids of ``fields``, merged by table, with each table's number of rows. Raises InvalidIds."""
    try:
        return Lookup(features, num_rows, torch.get_num_threads())
    except BadId as bad:
        number, place = bad.args
        raise out_of_range(fields[number], features[number], place, num_rows[features[number].table]) from None


def require_no_max_weights(field: Field, ids: FieldIds) -> None:
    """Raise InvalidArgument for weights that the pooling does not support."""
    if field.pooling == "max" and ids.weights is not None:
        raise InvalidArgument(
            f"field {field.name!r} has weights and pooling 'max', which takes none; leave the weights out, or choose "
            "'sum', 'mean' or 'sqrtn'"
        )


def distinct_features(fields: Sequence[Field]) -> list[Any]:
    """Return the modules that compute vectors of fields, each once."""
    return list({id(field.features): field.features for field in fields if field.features is not None}.values())


def feature_vectors(fields: Sequence[Field], given: Sequence[FieldIds], device: torch.device) -> list[Tensor]:
    """Return the vectors of each field in the common form, [B, D], or [N, D] for ids that are not pooled, with padding.
    Each module is called once, for the ids of all its fields.
    """
    counted = [counted_places(field, ids) for field, ids in zip(fields, given, strict=True)]
    found: dict[int, Tensor] = {}
    for features in distinct_features(fields):
        own = [number for number, field in enumerate(fields) if field.features is features]
        ids = torch.cat([torch.as_tensor(given[number].values)[counted[number]] for number in own]).to(device)
        vectors_ND = features(ids) if len(ids) else torch.zeros(0, features.dim, dtype=torch.float32, device=device)
        found.update(zip(own, vectors_ND.split([len(counted[number]) for number in own]), strict=True))
    for number, field in enumerate(fields):
        if field.padding_id is not None:
            vectors_ND = found[number]
            none_ND = vectors_ND.new_zeros(len(given[number].values), vectors_ND.shape[1])
            found[number] = none_ND.index_copy(0, counted[number].to(device), vectors_ND)
    return [pooled(field, ids, found[number]) for number, (field, ids) in enumerate(zip(fields, given, strict=True))]


def counted_places(field: Field, ids: FieldIds) -> Tensor:
    """Return the places of ids that are not padding."""
    values = torch.as_tensor(ids.values)
    if field.padding_id is None:
        return torch.arange(len(values), device=values.device)
    return (values != field.padding_id).nonzero().squeeze(1)


def pooled_on_device(
    features: Sequence[FeatureIds], places: Sequence[npt.NDArray[np.int32]], tables: Sequence[Tensor]
) -> list[Tensor]:
    """Return the vectors [V, D] of features, float32, from the rows [U, D] of the distinct ids of each table; not for
    pooling "max". ``places`` [N] are those of each feature's ids among the rows; -1: padding. Few kernels for all
    features.
    """
    shapes: list[FieldShape] = []
    bounds: list[Ids] = []
    for feature in features:
        length = 1 if feature.pooling is None else feature.bags if isinstance(feature.bags, int) else 0
        pooling = feature.pooling or "sum"
        shapes.append(FieldShape(feature.table, len(feature.ids), feature.num_vectors, length, pooling, -1))
        if feature.pooling is not None and not isinstance(feature.bags, int):
            bounds.append(feature.bags)
    sent = [np.concatenate([*places, *bounds], dtype=np.int64)]
    if any(feature.weights is not None for feature in features):
        every = [np.ones(len(f.ids), np.float32) if f.weights is None else f.weights for f in features]
        sent.append(np.concatenate(every))
    numbers, *weights = upload_together([torch.from_numpy(array) for array in sent], tables[0].device)
    num_ids = sum(map(len, places))
    offsets, weights_N = numbers[num_ids:] if bounds else None, weights[0] if weights else None
    entries, _ = index_fields(shapes, numbers[:num_ids], offsets, weights_N, [len(rows) for rows in tables])
    return pool(entries, [RowSpan(rows, 0) for rows in tables])


def pooled(field: Field, ids: FieldIds, vectors_ND: Tensor) -> Tensor:
    """Return the vectors of a field from those of its ids; padding's are 0. No host wait if the ids are on the
    device."""
    device, num_ids = vectors_ND.device, len(ids.values)
    weights = ids.weights if ids.given_weights is None else ids.given_weights
    weights_N = None if weights is None else torch.as_tensor(weights).to(device, torch.float32)
    if weights_N is not None:
        vectors_ND = vectors_ND * weights_N[:, None]
    if field.pooling is None:
        return vectors_ND
    at_N = torch.arange(num_ids, device=device)
    if isinstance(ids.bags, int):
        bag_N = at_N // ids.bags
    else:
        ends_B = torch.as_tensor(ids.bags)[1:].to(device)
        bag_N = torch.searchsorted(ends_B, at_N, right=True).clamp(max=max(0, ids.num_bags - 1))
    counts_N = None if field.padding_id is None else (torch.as_tensor(ids.values) != field.padding_id).to(device)
    if field.pooling == "max":
        return maxima(vectors_ND, bag_N, ids.num_bags, counts_N)
    sums_BD = vectors_ND.new_zeros(ids.num_bags, vectors_ND.shape[1]).index_add(0, bag_N, vectors_ND)
    if field.pooling == "sum":
        return sums_BD
    weights_N = torch.ones(num_ids, dtype=torch.float32, device=device) if weights_N is None else weights_N
    weights_N = weights_N if counts_N is None else torch.where(counts_N, weights_N, 0.0)
    return sums_BD * pooling_factors(field, ids.num_bags, bag_N, weights_N)[:, None]


def maxima(vectors_ND: Tensor, bag_N: Tensor, num_bags: int, counts_N: Tensor | None = None) -> Tensor:
    """Return the largest numbers [V, D] of each bag's vectors, without those that do not count; 0 for an empty bag. The
    gradient goes to the first of equal ones, as with ``nn.EmbeddingBag``; ``scatter_reduce`` would divide it, and lose
    some where the largest number is 0.
    """
    num, dim = vectors_ND.shape
    device, values_ND, index_ND = vectors_ND.device, vectors_ND.detach(), bag_N[:, None].expand(num, dim)
    if counts_N is not None:
        values_ND = torch.where(counts_N[:, None], values_ND, -torch.inf)
    max_BD = values_ND.new_full((num_bags, dim), -torch.inf).scatter_reduce(0, index_ND, values_ND, "amax")
    is_most_ND = (values_ND == max_BD[bag_N]) & (values_ND > -torch.inf)
    at_ND = torch.where(is_most_ND, torch.arange(num, dtype=torch.int32, device=device)[:, None], num)
    first_BD = at_ND.new_full((num_bags, dim), num).scatter_reduce(0, index_ND, at_ND, "amin")
    return torch.cat([vectors_ND, vectors_ND.new_zeros(1, dim)]).gather(0, first_BD.long())


def pooling_factors(field: Field, num_bags: int, bag_N: Tensor, weights_N: Tensor) -> Tensor:
    """Return the factor of each bag's sum for pooling "mean" and "sqrtn" [B]: 1 / Σ w or 1 / √Σ w²; 0 for 0."""
    totals_B = weights_N.new_zeros(num_bags).index_add(0, bag_N, weights_N if field.pooling == "mean" else weights_N**2)
    is_none = totals_B == 0
    by_B = torch.where(is_none, 1.0, totals_B)
    return torch.where(is_none, 0.0, 1.0 / (by_B if field.pooling == "mean" else by_B.sqrt()))


def feature_ids(table: int, field: Field, ids: FieldIds) -> FeatureIds:
    """Return the input of compiled code: pooled, or each id by itself where :func:`weighted` pools the vectors."""
    if ids.given_weights is not None:
        return FeatureIds(table, ids.values, ids.bags, None, None, field.padding_id)
    return FeatureIds(table, ids.values, ids.bags, ids.weights, field.pooling, field.padding_id)


def weighted(field: Field, ids: FieldIds, vectors: Tensor) -> Tensor:
    """Return the vectors of a field, pooled here in tensor operations where the weights need a gradient."""
    return vectors if ids.given_weights is None else pooled(field, ids, vectors)
