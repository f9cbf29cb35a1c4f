"""What :mod:`geartrain.ams.kernels.embedding` computes, in plain numpy and float64. Nothing here is fast."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels.embedding import FeatureIds

Doubles = npt.NDArray[np.float64]


def bounds_of(feature: FeatureIds) -> list[tuple[int, int]]:
    """Where each bag begins and ends among the ids; without pooling each id is one."""
    bags = 1 if feature.pooling is None else feature.bags
    if isinstance(bags, int):
        return [(begin, begin + bags) for begin in range(0, len(feature.ids), bags)]
    return list(zip(bags[:-1].tolist(), bags[1:].tolist(), strict=True))


def shares_of(feature: FeatureIds, begin: int, end: int) -> dict[int, float]:
    """What the value of each id of a bag that counts is multiplied by in the pooled vector (not for max)."""
    counted = [i for i in range(begin, end) if feature.ids[i] != feature.padding_id]
    weights = {i: 1.0 if feature.weights is None else float(feature.weights[i]) for i in counted}
    total = {
        "sum": 1.0,
        "mean": sum(weights.values()),
        "sqrtn": sum(weight * weight for weight in weights.values()) ** 0.5,
    }[feature.pooling or "sum"]
    return {i: weight / total if total else 0.0 for i, weight in weights.items()}


def pooled(feature: FeatureIds, row_of: dict[int, Doubles], dim: int) -> Doubles:
    """The vectors [V, D]."""
    bounds = bounds_of(feature)
    vectors = np.zeros((len(bounds), dim))
    for bag, (begin, end) in enumerate(bounds):
        if feature.pooling == "max":
            rows = [row_of[int(row_id)] for row_id in feature.ids[begin:end] if row_id != feature.padding_id]
            vectors[bag] = np.max(rows, axis=0) if rows else 0.0
        else:
            for i, share in shares_of(feature, begin, end).items():
                vectors[bag] += share * row_of[int(feature.ids[i])]
    return vectors


def row_gradients(feature: FeatureIds, row_of: dict[int, Doubles], vectors: Doubles) -> dict[int, Doubles]:
    """The gradient [D] of each row, from those of the vectors [V, D]. Of equal maxima the first id has it."""
    dim = vectors.shape[1]
    sums: dict[int, Doubles] = {int(row_id): np.zeros(dim) for row_id in feature.ids if row_id != feature.padding_id}
    bounds = bounds_of(feature)
    for bag, (begin, end) in enumerate(bounds):
        if feature.pooling == "max":
            counted = [int(row_id) for row_id in feature.ids[begin:end] if row_id != feature.padding_id]
            if counted:
                winners = np.argmax([row_of[row_id] for row_id in counted], axis=0)
                for d, winner in enumerate(winners):
                    sums[counted[winner]][d] += vectors[bag, d]
        else:
            for i, share in shares_of(feature, begin, end).items():
                sums[int(feature.ids[i])] += share * vectors[bag]
    return sums


def bag_matrix(
    places: npt.NDArray[np.int32], counts: npt.NDArray[np.int32], weights: npt.NDArray[np.float32] | None, num_rows: int
) -> Doubles:
    """The matrix [B, U] of the weight of each row in each bag: ``_core.pool_bags`` is its product with the rows [U, D],
    ``_core.spread_bags`` that of its transpose with the vectors [B, D]."""
    matrix = np.zeros((len(counts), num_rows))
    for i, bag in enumerate(np.repeat(np.arange(len(counts)), counts)):
        matrix[bag, places[i]] += 1.0 if weights is None else float(weights[i])
    return matrix
