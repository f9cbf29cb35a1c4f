"""Prediction with a saved model: no cluster, no training code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from geartrain.ams.values.arguments import integer
from geartrain.ams.values.errors import InvalidArgument
from geartrain.workers.data.bitmaps import IMAGE_SUFFIXES, open_picture
from geartrain.workers.models.evaluate import best_classes, scoring_centers
from geartrain.workers.models.saved_model import Model

_AT_ONCE = 256


@dataclass(frozen=True)
class Prediction:
    """The best classes of one image, or why there are none."""

    path: Path
    best: list[tuple[str, float]]
    """Class name and score, best first."""
    error: str | None = None


def image_files(paths: Iterable[Path]) -> list[Path]:
    """Files as given; of a folder, the images in it, sorted. Raises InvalidArgument for one without images."""
    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        inside = sorted(file for file in path.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES)
        if not inside:
            raise InvalidArgument(f"{path} holds no images ({', '.join(sorted(IMAGE_SUFFIXES))})")
        files += inside
    return files


def predict(model: Model, files: list[Path], k: int) -> Iterator[Prediction]:
    """Name each image, in order. A file that cannot be read has an error instead of answers."""
    k = integer("k", k, 1, len(model.class_names))
    centers_CD = scoring_centers(model)
    for start in range(0, len(files), _AT_ONCE):
        bitmaps, errors = {}, {}
        for path in files[start : start + _AT_ONCE]:
            try:
                bitmaps[path] = model.preprocessing.bitmap(open_picture(path))
            except InvalidArgument as exc:
                errors[path] = str(exc) if str(path) in str(exc) else f"{path}: {exc}"
        answers = {}
        if bitmaps:
            with torch.no_grad():
                features_ND = model.backbone(torch.from_numpy(np.stack(list(bitmaps.values()))))
            scores, classes = best_classes(model, features_ND, centers_CD, k)
            for path, row, ids in zip(bitmaps, scores.tolist(), classes.tolist(), strict=True):
                answers[path] = [(model.class_names[label], score) for label, score in zip(ids, row, strict=True)]
        for path in files[start : start + _AT_ONCE]:
            yield Prediction(path, answers.get(path, []), errors.get(path))
