"""What a field's vectors look like to its caller, and what is said of its ids that are out of range."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from geartrain.ams.kernels.embedding import FeatureIds
from geartrain.ams.values.errors import InvalidIds
from geartrain.bridge.embedding.field import Field
from geartrain.bridge.embedding.ids import BatchIds
from geartrain.bridge.embedding.jagged import jagged_tensor


def shaped(field: Field, ids: BatchIds, vectors: Tensor, *, per_node: bool = False) -> Tensor:
    """Vectors [V, D] of a field: [B, D], [B, L, D], or jagged [B, ?, D] where its ids are not pooled. Of a batch with
    levels they are those of the samples, with ``per_node`` those of the nodes.
    """
    found = _shaped(field, ids, vectors)
    return found if ids.nodes is None or per_node else ids.nodes.expand(found)


def _shaped(field: Field, ids: BatchIds, vectors: Tensor) -> Tensor:
    if field.pooling is not None or ids.is_vector:
        return vectors
    if isinstance(ids.bags, int):
        return vectors.view(-1, ids.bags, vectors.shape[1])
    return jagged_tensor(vectors, torch.from_numpy(ids.bags).to(vectors.device))


def out_of_range(field: Field, feature: FeatureIds, place: int, num_rows: int | None) -> InvalidIds:
    """The error for the id at ``place`` among those of a field, whose table takes ids below ``num_rows``."""
    if isinstance(feature.bags, int):
        row = place // feature.bags
    else:
        row = int(np.searchsorted(feature.bags, place, side="right")) - 1
    hint = (
        "" if feature.padding_id is not None else f"; if it stands for no id, say so: padding_id={feature.ids[place]}"
    )
    return InvalidIds(
        f"id {feature.ids[place]} of field {field.name!r} in row {row} is out of range; ids lie in "
        f"[0, {2**63 if num_rows is None else num_rows}){hint}"
    )
