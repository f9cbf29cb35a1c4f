"""Prediction with a saved model, without cluster and training code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from geartrain.ams.values.arguments import integer
from geartrain.ams.values.errors import InvalidArgument
from geartrain.workers.data.bitmaps import IMAGE_SUFFIXES
from geartrain.workers.job.folder import PICTURES, has_run
from geartrain.workers.models.trained_model import AT_ONCE, TrainedModel


@dataclass(frozen=True)
class Prediction:
    """Best classes of one image, or the error of its file."""

    path: Path
    best: list[tuple[str, float]]
    """Class name and score, best first."""
    error: str | None = None


def image_files(paths: Iterable[Path]) -> list[Path]:
    """Return the given files, and the images in given folders, sorted, without the pictures of a run's report. Raises
    InvalidArgument for an empty folder."""
    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        found = (file for file in path.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES)
        inside = sorted(file for file in found if not (file.name in PICTURES and has_run(file.parent)))
        if not inside:
            raise InvalidArgument(
                f"{path} holds no images ({', '.join(sorted(IMAGE_SUFFIXES))}); give images, or folders of them"
            )
        files += inside
    return files


def predict(model: TrainedModel, files: list[Path], k: int) -> Iterator[Prediction]:
    """Yield the ``k`` best classes of each image, in order; for a file that cannot be read, its error."""
    k = integer("k", k, 1, len(model.class_names))
    for start in range(0, len(files), AT_ONCE):
        pictures, errors = {}, {}
        for path in files[start : start + AT_ONCE]:
            try:
                pictures[path] = model.bitmap(path)
            except InvalidArgument as exc:
                errors[path] = str(exc)
        bitmaps = torch.from_numpy(np.stack(list(pictures.values()))) if pictures else None
        answers = {} if bitmaps is None else dict(zip(pictures, model.predict(bitmaps, k), strict=True))
        for path in files[start : start + AT_ONCE]:
            yield Prediction(path, answers.get(path, []), errors.get(path))
