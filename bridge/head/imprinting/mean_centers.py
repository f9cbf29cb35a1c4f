"""Class centers made of mean features, placed on their own or among existing centers.

The direction that all means share distinguishes no class: centers that contain it are nearly equal and match every
feature (cosines of 0.97 for an untrained backbone). Where most classes are made at once it is subtracted, also from
later ones. Trained centers have moved away from the means since: a new center is placed where it scores a little more
on its own mean than the best existing one, or it would win their features, too.

Legend: S classes to make, M centers that are there, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from geartrain.ams.values.specs import Ids
from geartrain.bridge.head.backends.backend import Imprinted, RowBackend
from geartrain.bridge.head.loss.margins.margin import NORM_FLOOR
from geartrain.bridge.rows.tables import TORCH_DTYPES, as_numpy

_SHARED_COSINE = 0.5
"""Average cosine of the means to each other above which they share a direction."""
_MIN_OWN = 1e-4
"""Least part of a mean's length that may be its own direction: less is rounding."""
_SAMPLE_BYTES = 32 << 20
"""Bytes of existing centers that are sampled."""
_COSINE_GAIN, _MIN_COSINE = 1.25, 0.8
"""Factor between a new center's cosine and the best other one under a margin, measured in docs/how-to/new-classes.md;
and the least cosine."""


@dataclass(frozen=True)
class CenterMaker:
    """Maker of the centers of some classes."""

    imprinted: Imprinted | None
    """Record of the head for when the centers are written."""
    others_MD: Tensor | None
    """Existing centers, float64, with their biases; None: the new ones are placed on their own."""
    has_margin: bool
    spread: float
    """Ratio of the examples' mean length to that of their means: a mean's best score is lower by it than an
    example's."""

    @staticmethod
    def of(
        backend: RowBackend,
        sums: Iterable[Tensor],
        lengths: float,
        num_live_classes: int,
        are_made: Callable[[Ids], npt.NDArray[np.bool_]],
    ) -> CenterMaker:
        """Return a maker for classes with these ``sums`` [S, D] of features; every rank gives the same ones.

        ``lengths`` is the sum of the lengths of all these features, ``num_live_classes`` counts the classes that live
        when they are written, ``are_made`` says which ids are among them. Pulls up to 32 MiB of the other rows,
        unless these are at least half of all classes, or the rows have not moved since such a half was made.
        """
        num, total_D, of_sums = 0, torch.zeros((), device="cpu"), 0.0
        for sums_SD in sums:
            units_SD = normalize(sums_SD.double(), eps=NORM_FLOOR)
            num, total_D = num + len(units_SD), total_D + units_SD.sum(0)
            of_sums += float(torch.linalg.vector_norm(sums_SD.double(), dim=1).sum())
        spread = lengths / max(of_sums, NORM_FLOOR)
        imprinted, step, has_margin = backend.imprinted, backend.update.step, backend.margins.margin is not None
        if num and 2 * num >= num_live_classes:
            return CenterMaker(Imprinted(step, _shared_direction(num, total_D)), None, has_margin, spread)
        if not num or (imprinted is not None and imprinted.step == step):
            return CenterMaker(imprinted, None, has_margin, spread)
        return CenterMaker(imprinted, _sample(backend, are_made), has_margin, spread)

    def rows(self, sums_SD: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows [n, D], float32, of the classes that have a direction of their own, and a mask [S] of these
        classes.

        Rows are [n, D + 1], with biases, where they are placed among others that have them.
        """
        shared_D = None if self.imprinted is None else self.imprinted.shared_D
        own_SD = sums_SD.double()
        lengths_S = torch.linalg.vector_norm(own_SD, dim=1)
        seen_S = lengths_S > NORM_FLOOR
        if shared_D is not None:
            own_SD = _without(own_SD, shared_D)
            seen_S &= torch.linalg.vector_norm(own_SD, dim=1) > _MIN_OWN * lengths_S
        units_SD = normalize(own_SD[seen_S], eps=NORM_FLOOR)
        if self.others_MD is not None and len(units_SD):
            place = _by_direction if self.has_margin else _by_length
            units_SD = place(units_SD, self.others_MD, self.spread)
        return units_SD.float(), seen_S


def _shared_direction(num: int, total_D: Tensor) -> Tensor | None:
    """Return the direction [D] of the sum of ``num`` unit means, if most of them lie along it, or None."""
    if num < 2:
        return None
    cosine = (float(total_D @ total_D) - num) / (num * (num - 1))
    return normalize(total_D, dim=0) if cosine > _SHARED_COSINE else None


def _sample(backend: RowBackend, are_made: Callable[[Ids], npt.NDArray[np.bool_]]) -> Tensor | None:
    """Return centers [M, D], evenly spread over the live classes; where classes have several, all of them."""
    table, live, peers = backend.table, backend.live_classes, backend.peers
    most = max(1, _SAMPLE_BYTES // (4 * table.spec.dim))
    numbers = np.unique(np.linspace(0, live.num_live_classes - 1, min(live.num_live_classes, most)).astype(np.int64))
    ids = live.ids(numbers)
    ids = ids[~are_made(ids)]
    if not len(ids):
        return None
    rows = torch.empty(len(ids), table.spec.dim, dtype=TORCH_DTYPES[table.spec.dtype], device="cpu")

    def pull() -> None:
        table.pull_into(ids, as_numpy(rows))

    if peers is None:
        pull()
    else:
        peers.run_together(pull, f"rows of table {table.spec.name!r} were not read")
    settings = backend.settings
    return rows.double().view(-1, settings.dim + settings.bias)


def _by_direction(units_SD: Tensor, others_MD: Tensor, spread: float) -> Tensor:
    """Turn newcomers away from the mean of the others until their cosine with their own mean exceeds that of their
    examples with the best other center by a quarter."""
    others_MD = normalize(others_MD, eps=NORM_FLOOR)
    gained = _COSINE_GAIN * spread * float(_best_scores(units_SD, others_MD).mean())
    cosine = min(1.0, max(_MIN_COSINE, gained))
    mean_SD = others_MD.mean(0).expand_as(units_SD)
    away_SD = (units_SD * mean_SD).sum(1, keepdim=True) * units_SD - mean_SD
    return normalize(cosine * units_SD + (1 - cosine**2) ** 0.5 * normalize(away_SD, eps=NORM_FLOOR))


def _by_length(units_SD: Tensor, others_MD: Tensor, spread: float) -> Tensor:
    """Return the mean of the others, with its bias, plus as much of a newcomer's own direction as makes its logit that
    of its examples with the best other center; no more than the longest own direction of the others."""
    dim = units_SD.shape[1]
    mean_D = others_MD.mean(0)
    best_S = _best_scores(units_SD, others_MD[:, :dim])
    own_SD = normalize(_without(units_SD, normalize(mean_D[:dim], dim=0, eps=NORM_FLOOR)), eps=NORM_FLOOR)
    wanted_S = best_S + (spread - 1) * best_S.abs() - units_SD @ mean_D[:dim]
    lengths_S = wanted_S / (own_SD * units_SD).sum(1).clamp(min=NORM_FLOOR)
    longest = float(torch.linalg.vector_norm(others_MD[:, :dim], dim=1).max())
    return mean_D + pad(own_SD * lengths_S.clamp(0, longest).unsqueeze(1), (0, len(mean_D) - dim))


def _best_scores(units_SD: Tensor, others_MD: Tensor) -> Tensor:
    """Return the largest product [S] of each with any of the others, some at a time."""
    return torch.cat([(some_SD @ others_MD.T).amax(1) for some_SD in torch.split(units_SD, 64)])


def _without(values_SD: Tensor, direction_D: Tensor) -> Tensor:
    """Return the values without their part along a unit direction."""
    return values_SD - torch.outer(values_SD @ direction_D, direction_D)
