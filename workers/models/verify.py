"""Verification of pairs of pictures: accuracy by ten folds, and true accept rates at false accept rates.

Legend: N pairs, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from geartrain.ams.values.errors import InvalidArgument, NonFinite
from geartrain.workers.data.pairs import Pairs, read_pairs
from geartrain.workers.models.trained_model import AT_ONCE, TrainedModel

FOLDS = 10
FALSE_ACCEPT_RATES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
_THRESHOLDS = np.arange(0, 4, 0.01)
"""Thresholds of the squared distance between two unit vectors: those that InsightFace tries."""


@dataclass(frozen=True)
class Verification:
    """Accuracy of deciding whether pairs of pictures show the same person."""

    pairs: int
    accuracy: float
    """Mean over the folds."""
    accuracy_std: float
    """Standard deviation over the folds."""
    threshold: float
    """Squared distance below which a pair counts as the same, as the mean over the folds."""
    true_accepts: dict[float, float]
    """Share of the same pairs that are accepted, by false accept rate; without rates that need more different pairs."""


def verify_file(model: TrainedModel, path: Path, *, mirror: bool) -> Verification:
    """Verify the pairs of a ``.bin`` file with :func:`verify` and :func:`embed`. Raises InvalidArgument."""
    pairs = read_pairs(path)
    require_folds(pairs.same, str(path))
    return verify(distances(embed(model, pairs, mirror=mirror)), pairs.same)


@torch.no_grad()
def embed(model: TrainedModel, pairs: Pairs, *, mirror: bool) -> Tensor:
    """Return unit features [2·N, D]; ``mirror``: of the sum of a picture's feature and its mirror image's, as
    InsightFace does."""
    features = []
    for start in range(0, len(pairs.images), AT_ONCE):
        indices = range(start, min(start + AT_ONCE, len(pairs.images)))
        bitmaps = torch.from_numpy(
            np.stack([model.bitmap(pairs.picture(index), f"{pairs.path}, picture {index}") for index in indices])
        )
        features.append(unit_features(model, bitmaps, mirror))
    return torch.cat(features)


@torch.no_grad()
def unit_features(model: TrainedModel, bitmaps: Tensor, mirror: bool) -> Tensor:
    """Return unit features [B, D] of bitmaps [B, K, S, S]; ``mirror``: of the sum with the mirror images' features."""
    found = model.backbone(bitmaps)
    features = found + model.backbone(bitmaps.flip(3)) if mirror else found
    return functional.normalize(features.float(), dim=1)


def distances(unit_features: Tensor) -> npt.NDArray[np.float64]:
    """Return the squared distances [N] between rows 2·i and 2·i + 1 of [2·N, D]; 2 − 2 cos for unit rows."""
    gap = unit_features[0::2].double() - unit_features[1::2].double()
    return np.asarray(gap.square().sum(1).numpy())


def verify(distances_N: npt.NDArray[np.float64], same_N: npt.NDArray[np.bool_]) -> Verification:
    """Return the accuracy for pairs with these squared distances [N], of which ``same_N`` show the same person.

    Accuracy (Huang and Learned-Miller 2014, as InsightFace computes it): ten folds, in the order of the file; each is
    measured with the threshold that is best on the nine others. TAR@FAR: over all pairs, with the largest threshold
    that accepts at most the share FAR of the different pairs. Raises InvalidArgument for fewer pairs than folds, or
    pairs of only one kind; NonFinite.
    """
    require_folds(same_N, "the pairs")
    require_finite(distances_N, "distance")
    right = (distances_N[:, None] < _THRESHOLDS) == same_N[:, None]  # [N, thresholds]
    folds = np.array_split(np.arange(len(same_N)), FOLDS)
    accuracies, thresholds = [], []
    for fold in folds:
        others = np.ones(len(same_N), np.bool_)
        others[fold] = False
        best = int(right[others].mean(axis=0).argmax())
        accuracies.append(float(right[fold, best].mean()))
        thresholds.append(float(_THRESHOLDS[best]))
    return Verification(
        pairs=len(same_N),
        accuracy=float(np.mean(accuracies)),
        accuracy_std=float(np.std(accuracies)),
        threshold=float(np.mean(thresholds)),
        true_accepts=true_accept_rates(distances_N, same_N),
    )


def require_finite(values_N: npt.NDArray[np.float64], what: str) -> None:
    """Raise NonFinite if a pair's value is NaN or infinite."""
    if len(wrong := np.flatnonzero(~np.isfinite(values_N))):
        raise NonFinite(
            f"the {what} of pair {int(wrong[0])} is {values_N[wrong[0]]}; {len(wrong)} of {len(values_N)} are not "
            "finite, because the model's features are not: go back to a snapshot whose features are"
        )


def true_accept_rates(distances_N: npt.NDArray[np.float64], same_N: npt.NDArray[np.bool_]) -> dict[float, float]:
    """Return, by false accept rate, the share of the same pairs below the largest threshold that keeps the rate.

    The threshold is the distance of a different pair, without interpolation; at most that share of the different pairs
    lies below it. Rates below 1 / (number of different pairs) are left out.
    """
    different = np.sort(distances_N[~same_N])
    rates = {}
    for rate in FALSE_ACCEPT_RATES:
        allowed = int(rate * len(different) + 1e-9)
        if allowed >= 1:
            rates[rate] = float((distances_N[same_N] < different[allowed]).mean())
    return rates


def require_folds(same_N: npt.NDArray[np.bool_], what: str) -> None:
    """Raise InvalidArgument unless there are pairs of both kinds, at least one for each fold."""
    if len(same_N) < FOLDS or same_N.all() or not same_N.any():
        raise InvalidArgument(
            f"{what}: {int(same_N.sum())} same and {int((~same_N).sum())} different; accuracy by {FOLDS} folds needs "
            f"{FOLDS} pairs at least, some of each kind"
        )
