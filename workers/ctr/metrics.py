"""How good predicted probabilities of clicks are: AUC, log loss and calibration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from geartrain.workers.atomic import replacing

Floats = npt.NDArray[np.float64]

BINS = 10
_SIDE, _MARGIN, _DOT = 480, 56, 5
_PAPER, _PEN, _FAINT, _COLOUR = (255, 255, 255), (20, 20, 20), (200, 200, 200), (0, 90, 160)


def auc(scores: npt.ArrayLike, clicks: npt.ArrayLike) -> float:
    """The probability that a clicked sample has a higher score than another; ties count half.

    NaN if all were clicked, or none.
    """
    scores_N, clicked_N = np.asarray(scores, np.float64), np.asarray(clicks) > 0
    _, place, counts = np.unique(scores_N, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]  # the mean of those of equal scores, from 1
    clicked = int(clicked_N.sum())
    pairs = clicked * (len(clicked_N) - clicked)
    return float((ranks[clicked_N].sum() - clicked * (clicked + 1) / 2) / pairs) if pairs else float("nan")


def log_loss(probabilities: npt.ArrayLike, clicks: npt.ArrayLike) -> float:
    """Mean of -log of the probability given to what happened, in nats."""
    sure = np.clip(np.asarray(probabilities, np.float64), 1e-12, 1 - 1e-12)
    return float(-np.where(np.asarray(clicks) > 0, np.log(sure), np.log1p(-sure)).mean())


def calibration(probabilities: npt.ArrayLike, clicks: npt.ArrayLike) -> list[dict[str, float]]:
    """Of samples by rising probability, in :data:`BINS` equal parts: the mean predicted, and the part clicked."""
    predicted, clicked = np.asarray(probabilities, np.float64), np.asarray(clicks, np.float64)
    parts = [part for part in np.array_split(np.argsort(predicted, kind="stable"), BINS) if len(part)]
    return [
        {"predicted": float(predicted[part].mean()), "clicked": float(clicked[part].mean()), "samples": len(part)}
        for part in parts
    ]


def measured(probabilities: npt.ArrayLike, clicks: npt.ArrayLike) -> dict[str, Any]:
    """All of them, and the log loss of saying the mean click rate to every sample."""
    rate = float(np.mean(np.asarray(clicks, np.float64)))
    return {
        "auc": auc(probabilities, clicks),
        "log_loss": log_loss(probabilities, clicks),
        "log_loss_of_the_mean": log_loss(np.full(np.shape(clicks), rate), clicks),
        "samples": len(np.asarray(clicks)),
        "calibration": calibration(probabilities, clicks),
    }


def draw_calibration(path: Path, parts: list[dict[str, float]], title: str) -> None:
    """Draw what was clicked over what was predicted; the diagonal is perfect."""
    sheet = Image.new("RGB", (_SIDE, _SIDE), _PAPER)
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=12)

    def at(predicted: float, clicked: float) -> tuple[float, float]:
        width = _SIDE - 2 * _MARGIN
        return _MARGIN + predicted * width, _SIDE - _MARGIN - clicked * width

    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        pen.line([at(tick, 0), at(tick, 1)], _FAINT)
        pen.line([at(0, tick), at(1, tick)], _FAINT)
        pen.text(at(tick - 0.02, -0.02), f"{tick:g}", _PEN, font)
        pen.text(at(-0.09, tick + 0.015), f"{tick:g}", _PEN, font)
    pen.line([at(0, 0), at(1, 1)], _PEN)
    points = [at(part["predicted"], part["clicked"]) for part in parts]
    pen.line(points, _COLOUR, width=2)
    for x, y in points:
        pen.ellipse((x - _DOT, y - _DOT, x + _DOT, y + _DOT), _COLOUR)
    pen.text((_MARGIN, 8), title, _PEN, font)
    pen.text((_MARGIN, 26), "part clicked, over mean predicted probability", _PEN, font)
    with replacing(path) as temporary:
        sheet.save(temporary, format="PNG")


def worse_than_guessing(found: Mapping[str, Any]) -> str | None:
    """What to say of a model whose log loss (of :func:`measured`) is above that of the mean click rate, else None."""
    if found["log_loss"] <= found["log_loss_of_the_mean"]:
        return None
    return (
        "That is worse than saying the mean click rate of every sample: the model knows its samples by heart, or its "
        "steps are too large. Try fewer epochs, lower lr and row_lr, or row_weight_decay (--set KEY=VALUE)"
    )
