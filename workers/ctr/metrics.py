"""Quality of predicted click probabilities: AUC, also by user, log loss and calibration."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from geartrain.ams.values.specs import Ids
from geartrain.workers.atomic import replacing

Floats = npt.NDArray[np.float64]

BINS = 10
_SIDE, _MARGIN, _DOT = 560, 72, 5
_PAPER, _PEN, _FAINT, _COLOUR = (255, 255, 255), (20, 20, 20), (200, 200, 200), (0, 90, 160)


class Scores(NamedTuple):
    """Predictions for N samples, and their clicks."""

    probabilities: Floats
    """[N], predicted probability of a click."""
    clicks: Floats
    """[N], 0 or 1."""
    users: Ids | None
    """[N]; None: the samples have no field of users."""

    @classmethod
    def joined(cls, parts: Iterable[Scores]) -> Scores:
        """Return the scores of all parts, at least one, together."""
        probabilities, clicks, users = zip(*parts, strict=True)
        return cls(
            np.concatenate(probabilities), np.concatenate(clicks), None if users[0] is None else np.concatenate(users)
        )


def auc(scores: npt.ArrayLike, clicks: npt.ArrayLike) -> float:
    """Return the probability that a clicked sample has a higher score than another; ties count half.

    NaN if all samples were clicked, or none.
    """
    return grouped_auc(scores, clicks, np.zeros(np.shape(clicks), np.int64))


def grouped_auc(
    scores: npt.ArrayLike, clicks: npt.ArrayLike, groups: Ids, weights: npt.ArrayLike | None = None
) -> float:
    """Return the mean AUC of groups, such as users, weighted by their samples (GAUC).

    Zhu et al. 2017, "Optimized Cost per Click in Taobao Display Advertising", section 4.1. Groups in which all or no
    samples were clicked are left out; NaN if all groups are. ``weights``: how many samples of its kind in its group
    each sample stands for; None: 1.
    """
    scores_N, clicked_N = np.asarray(scores, np.float64), np.asarray(clicks) > 0
    _, group_N, size_G = np.unique(groups, return_inverse=True, return_counts=True)
    weight_G = size_G if weights is None else np.bincount(group_N, weights)
    order = np.lexsort((scores_N, group_N))
    scores_N, clicked_N, group_N = scores_N[order], clicked_N[order], group_N[order]
    is_first = np.append(True, (np.diff(group_N) != 0) | (np.diff(scores_N) != 0))[: len(group_N)]
    starts = np.flatnonzero(is_first)
    counts = np.diff(np.append(starts, len(group_N)))
    ranks = np.repeat(starts + (counts + 1) / 2, counts)  # equal scores share their mean rank, from 1
    ranks -= (np.cumsum(size_G) - size_G)[group_N]
    clicked_G = np.bincount(group_N, clicked_N, len(size_G))
    pairs_G = clicked_G * (size_G - clicked_G)
    above_G = np.bincount(group_N, ranks * clicked_N, len(size_G)) - clicked_G * (clicked_G + 1) / 2
    has_pairs = pairs_G > 0
    if not has_pairs.any():
        return float("nan")
    return float(np.average(above_G[has_pairs] / pairs_G[has_pairs], weights=weight_G[has_pairs]))


def log_loss(probabilities: npt.ArrayLike, clicks: npt.ArrayLike, weights: Floats | None = None) -> float:
    """Return the mean of −log of the probability given to the outcome, in nats."""
    sure = np.clip(np.asarray(probabilities, np.float64), 1e-12, 1 - 1e-12)
    return float(np.average(-np.where(np.asarray(clicks) > 0, np.log(sure), np.log1p(-sure)), weights=weights))


def calibration(
    probabilities: npt.ArrayLike, clicks: npt.ArrayLike, weights: npt.ArrayLike | None = None
) -> list[dict[str, float]]:
    """Return mean prediction and click rate of :data:`BINS` equal parts of the samples, by ascending probability.

    A sample counts ``weights`` times (None: once).
    """
    counts = np.ones(np.shape(clicks)) if weights is None else np.asarray(weights, np.float64)
    predicted, clicked = np.asarray(probabilities, np.float64), np.asarray(clicks, np.float64)
    parts = [part for part in np.array_split(np.argsort(predicted, kind="stable"), BINS) if len(part)]
    return [
        {
            "predicted": float(np.average(predicted[part], weights=counts[part])),
            "clicked": float(np.average(clicked[part], weights=counts[part])),
            "samples": len(part),
        }
        for part in parts
    ]


def measured(scores: Scores, negatives: float = 1.0) -> dict[str, Any]:
    """Return all measures, and the log loss of predicting the mean click rate for every sample.

    ``predicted_per_clicked`` is the mean probability over the click rate, 1 for a calibrated model ("the ratio of the
    average estimated CTR and empirical CTR", He et al. 2014, section 3); None if nothing was clicked. ``negatives``:
    the part of the samples without a click that is among them; each stands for 1 / part.
    """
    probabilities, clicks, users = scores
    weights = np.where(clicks > 0, 1.0, 1 / negatives)
    by_user = float("nan") if users is None else grouped_auc(probabilities, clicks, users, weights)
    rate, mean = (float(np.average(of, weights=weights)) for of in (clicks, probabilities))
    return {
        "auc": auc(probabilities, clicks),
        **({} if np.isnan(by_user) else {"grouped_auc": by_user}),
        "log_loss": log_loss(probabilities, clicks, weights),
        "log_loss_of_the_mean": log_loss(np.full(np.shape(clicks), rate), clicks, weights),
        "predicted_per_clicked": mean / rate if rate else None,
        "samples": len(clicks),
        "calibration": calibration(probabilities, clicks, weights),
    }


class LatestScores:
    """Scores of the latest samples, in the order in which they came. Memory: the window, and one part."""

    def __init__(self, window: int) -> None:
        """``window``: number of samples."""
        self._window = window
        self._parts: deque[Scores] = deque()
        self._samples = 0

    def add(self, scores: Scores) -> None:
        """Add the scores of the next samples."""
        self._parts.append(scores)
        self._samples += len(scores.clicks)
        while self._samples - len(self._parts[0].clicks) >= self._window:
            self._samples -= len(self._parts.popleft().clicks)

    def joined(self) -> Scores | None:
        """Return all scores; None: not both clicked and other samples are there."""
        if not self._parts:
            return None
        probabilities, clicks, users = Scores.joined(self._parts)
        last = slice(-self._window, None)
        found = Scores(probabilities[last], clicks[last], None if users is None else users[last])
        return found if 0 < found.clicks.sum() < len(found.clicks) else None


def figures(found: Mapping[str, Any]) -> dict[str, float]:
    """Return the measures that are drawn over the steps, from the result of :func:`measured`."""
    names = ("auc", "grouped_auc", "log_loss", "predicted_per_clicked")
    return {name: found[name] for name in names if found.get(name) is not None}


def in_words(found: Mapping[str, Any]) -> str:
    """Return the measures as a line for people."""
    by_user, ratio = found.get("grouped_auc"), found["predicted_per_clicked"]
    return (
        f"AUC {found['auc']:.4f}{'' if by_user is None else f', by user {by_user:.4f}'}, log loss "
        f"{found['log_loss']:.4f}{'' if ratio is None else f', predicted per clicked {ratio:.3f}'}"
    )


def draw_calibration(path: Path, parts: list[dict[str, float]], title: str) -> None:
    """Draw the click rate over the predicted probability; the diagonal is perfect calibration."""
    sheet = Image.new("RGB", (_SIDE, _SIDE), _PAPER)
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=14)
    highest = max(max(part["predicted"], part["clicked"]) for part in parts)
    end = next((end for end in (0.1, 0.2, 0.5) if end >= highest), 1.0)
    width, low = _SIDE - 2 * _MARGIN, _SIDE - _MARGIN

    def at(predicted: float, clicked: float) -> tuple[float, float]:
        return _MARGIN + predicted / end * width, low - clicked / end * width

    for tick in np.linspace(0, end, 6):
        pen.line([at(tick, 0), at(tick, end)], _FAINT)
        pen.line([at(0, tick), at(end, tick)], _FAINT)
        pen.text((at(tick, 0)[0], low + 8), f"{tick:.2g}", _PEN, font, anchor="mt")
        pen.text((_MARGIN - 8, at(0, tick)[1]), f"{tick:.2g}", _PEN, font, anchor="rm")
    pen.line([at(0, 0), at(end, end)], _PEN)
    points = [at(part["predicted"], part["clicked"]) for part in parts]
    pen.line(points, _COLOUR, width=2)
    for x, y in points:
        pen.ellipse((x - _DOT, y - _DOT, x + _DOT, y + _DOT), _COLOUR)
    total = int(sum(part["samples"] for part in parts))
    counts = f"{total:,} samples; a dot is about {total // len(parts):,}"
    for y, text in ((10, title), (32, counts), (low + 32, "mean predicted probability")):
        pen.text((_SIDE // 2, y), text, _PEN, font, anchor="mt")
    name = Image.new("L", (width, 20))
    ImageDraw.Draw(name).text((width // 2, 2), "part that was clicked", 255, font, anchor="mt")
    sheet.paste(_PEN, (6, _MARGIN), name.rotate(90, expand=True))
    with replacing(path) as temporary:
        sheet.save(temporary, format="PNG")


def worse_than_guessing(found: Mapping[str, Any]) -> str | None:
    """Return a warning if the log loss (of :func:`measured`) is above that of the mean click rate, or if all samples
    have one outcome, else None.
    """
    if math.isnan(found["auc"]):
        return (
            "Of the held-out samples all are clicked or none is: there is no AUC, and a log loss tells nothing. Give "
            "samples of both kinds; the column click says 0 for those that were shown and not clicked"
        )
    if found["log_loss"] <= found["log_loss_of_the_mean"]:
        return None
    return (
        "That is worse than saying the mean click rate of every sample: the model knows its samples by heart, or its "
        "steps are too large. Try fewer epochs, lower lr and row_lr, or row_weight_decay (--set KEY=VALUE)"
    )
