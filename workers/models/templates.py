"""Verification of templates as in the IJB benchmarks: a template is a set of pictures and video frames of one person.

Two text files, in the form of IJB-B and IJB-C, define the templates and their pairs:

    media    picture template media      "12.jpg 1 69544": a picture, its template, and the video or photo it is from
    pairs    template template same      "1 11065 1": 1 if they show the same person, else 0

Legend: N pictures, M media of templates, T templates, P pairs, D width of a feature.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from geartrain.ams.values.errors import InvalidArgument
from geartrain.workers.models.trained_model import AT_ONCE, TrainedModel
from geartrain.workers.models.verify import require_finite, true_accept_rates, unit_features

_PAIRS_AT_ONCE = 16_384


@dataclass(frozen=True)
class TemplateVerification:
    """Accuracy of comparing templates."""

    pairs: int
    templates: int
    images: int
    true_accepts: dict[float, float]
    """Share of the same pairs that are accepted, by false accept rate; see ``true_accept_rates``."""


@dataclass(frozen=True)
class Media:
    """Pictures of each template."""

    pictures: list[str]
    """[N] names."""
    media_of_picture: npt.NDArray[np.int64]
    """[N] index of each picture's medium within its template, 0 … M − 1."""
    template_of_media: npt.NDArray[np.int64]
    """[M] index of each medium's template, 0 … T − 1."""
    templates: npt.NDArray[np.int64]
    """[T] ids as the file gives them, ascending."""


def verify_templates(
    model: TrainedModel, folder: Path, media: Path, pairs: Path, *, mirror: bool
) -> TemplateVerification:
    """Embed the pictures of ``media`` in ``folder``, pool them by template, and return the accuracy for ``pairs``.

    Unit features are averaged over the pictures of each medium, then over the media of a template, and scaled to length
    1: a video of a thousand frames weighs as much as a photo. The score of a pair is the cosine. Memory: M·D numbers,
    not N·D or P·D. Raises InvalidArgument, which names file and line, and NonFinite.
    """
    found = read_media(media)
    first_P, second_P, same_P = read_template_pairs(pairs, found.templates)
    width = model.centers.shape[-1]
    sums_MD = torch.zeros(len(found.template_of_media), width, dtype=torch.float64)
    for start in range(0, len(found.pictures), AT_ONCE):
        names = found.pictures[start : start + AT_ONCE]
        unit = unit_features(model, torch.from_numpy(np.stack([model.bitmap(folder / n) for n in names])), mirror)
        places = torch.from_numpy(found.media_of_picture[start : start + AT_ONCE])
        sums_MD.index_add_(0, places, unit.double())
    counts = np.bincount(found.media_of_picture, minlength=len(sums_MD))
    pooled_TD = pool(sums_MD / torch.from_numpy(counts)[:, None], found.template_of_media, len(found.templates))
    cosines_P = pair_cosines(pooled_TD, first_P, second_P)
    require_finite(cosines_P, "cosine")
    return TemplateVerification(
        pairs=len(same_P),
        templates=len(found.templates),
        images=len(found.pictures),
        true_accepts=true_accept_rates(2 - 2 * cosines_P, same_P),
    )


def pair_cosines(
    pooled_TD: Tensor, first_P: npt.NDArray[np.int64], second_P: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return the cosine of each pair [P], computed in parts: IJB-C has 15 million pairs."""
    cosines_P = np.empty(len(first_P))
    for start in range(0, len(first_P), _PAIRS_AT_ONCE):
        some = slice(start, start + _PAIRS_AT_ONCE)
        cosines_P[some] = (pooled_TD[first_P[some]] * pooled_TD[second_P[some]]).sum(1).numpy()
    return cosines_P


def pool(media_MD: Tensor, template_of_media: npt.NDArray[np.int64], num_templates: int) -> Tensor:
    """Return the mean of each template's rows [M, D], scaled to length 1: float64 [T, D]."""
    sums_TD = torch.zeros(num_templates, media_MD.shape[1], dtype=torch.float64)
    sums_TD.index_add_(0, torch.from_numpy(template_of_media), media_MD.double())
    return functional.normalize(sums_TD, dim=1)


def read_media(path: Path) -> Media:
    """Read the file of media. Raises InvalidArgument."""
    rows = _read_rows(path, "'picture template media'", numbers_from=1)
    keys = np.array([(int(template), int(medium)) for _, template, medium in rows], dtype=np.int64)
    distinct, media_of_picture = np.unique(keys, axis=0, return_inverse=True)
    templates, template_of_media = np.unique(distinct[:, 0], return_inverse=True)
    return Media([name for name, _, _ in rows], media_of_picture.reshape(-1), template_of_media, templates)


def read_template_pairs(
    path: Path, templates: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return indices [P] and [P] into ``templates`` (ids, ascending), and whether they are the same person [P].

    Raises InvalidArgument.
    """
    values = np.array(_read_rows(path, "'template template same'", numbers_from=0), dtype=np.int64)
    if len(wrong := np.flatnonzero((values[:, 2] != 0) & (values[:, 2] != 1))):
        raise InvalidArgument(
            f"{path}, line {wrong[0] + 1}: the last number is {values[wrong[0], 2]}; it must be 0 or 1"
        )
    same_P = values[:, 2] == 1
    if same_P.all() or not same_P.any():
        raise InvalidArgument(f"{path} has {int(same_P.sum())} same pairs of {len(same_P)}; it needs some of each kind")
    places = np.searchsorted(templates, values[:, :2]).clip(max=len(templates) - 1)
    if len(wrong := np.flatnonzero((templates[places] != values[:, :2]).any(axis=1))):
        ids = values[wrong[0], :2].tolist()
        raise InvalidArgument(f"{path}, line {wrong[0] + 1}: templates {ids}, one of which has no picture")
    return places[:, 0], places[:, 1], same_P


def _read_rows(path: Path, form: str, *, numbers_from: int) -> list[list[str]]:
    """Return the three words of every line; those from ``numbers_from`` on must be numbers. Raises InvalidArgument."""
    if not path.is_file():
        raise InvalidArgument(f"{path} is not a file; give one with lines of {form}")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        words = line.split()
        if len(words) != 3 or not all(
            word.isascii() and word.isdigit() and len(word) < 19 for word in words[numbers_from:]
        ):
            raise InvalidArgument(f"{path}, line {number}, is {line!r:.80}; it must be {form}")
        rows.append(words)
    if not rows:
        raise InvalidArgument(f"{path} is empty; it must have lines of {form}")
    return rows
