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
_SIDE, _MARGIN, _DOT = 560, 72, 5
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
    """What to say of a model whose log loss (of :func:`measured`) is above that of the mean click rate, else None."""
    if found["log_loss"] <= found["log_loss_of_the_mean"]:
        return None
    return (
        "That is worse than saying the mean click rate of every sample: the model knows its samples by heart, or its "
        "steps are too large. Try fewer epochs, lower lr and row_lr, or row_weight_decay (--set KEY=VALUE)"
    )
