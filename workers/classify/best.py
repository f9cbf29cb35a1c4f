"""Choice of the best model of a run by its validation; that one is written.

Training may make a model worse: on easy problems, with a learning rate too high, or by overfitting. So the run is
validated at its start and then ten times a stage, and the folder ``model`` holds the model of the best validation. The
validations are a function of the step alone, as everything else of a run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from geartrain.ams.values.errors import ConfigError
from geartrain.workers.job.best import BestValidation
from geartrain.workers.models.saved_model import read_training

START, TRAINED, IMPRINTED = "start", "trained", "imprinted"

ADVICE = (
    "Try: more images of each class, and --set KEY=VALUE with a lower lr, less augmentation, margin=none, a larger "
    "look.size, or, for characters and signs, look.kind=ink"
)


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Validation of the model at a step."""

    step: int
    centers: str
    """``start`` (the means that training begins at), ``trained``, or ``imprinted`` (means of the trained features)."""
    validation_top1: float
    images: int
    """Number of validation images."""


class BestModel(BestValidation[Validation]):
    """Stores the best model of a run in its folder. For the first rank."""

    def __init__(
        self,
        folder: Path,
        job: str,
        look: Callable[[int, str], tuple[float, int]],
        write: Callable[..., None],
        tell: Callable[[bool], object] = bool,
    ) -> None:
        """``look(step, centers)`` returns (top-1, number of images) of the present model.

        ``tell(is_better)`` is called after each validation, for ranks that must take part in writing.
        ``write(training=...)`` writes the model to ``folder`` with its validation. A model there already, if of
        ``job``, is the best so far.
        """
        self._job = job
        self._look = look
        self._write = write
        self._tell = tell
        found = read_training(folder)
        is_ours = found.get("job") == job
        super().__init__(
            attrgetter("validation_top1"),
            best=Validation(**found["best"]) if is_ours else None,
            start=Validation(**found["start"]) if is_ours else None,
        )

    def consider(self, step: int, centers: str) -> Validation:
        """Validate the present model, and store it if none was better; it replaces an equal one."""
        top1, images = self._look(step, centers)
        look = Validation(step=step, centers=centers, validation_top1=top1, images=images)
        is_better = self.compare(look)
        self._tell(is_better)
        if is_better:
            self._write(training=self.training())
        return look

    def training(self) -> dict[str, Any]:
        """Return the entry about training of the model's folder and the report."""
        if self.best is None or self.start is None:
            raise ConfigError("no model was validated yet")
        return {"job": self._job, "best": asdict(self.best), "start": asdict(self.start)}

    def verdict(self) -> list[str]:
        """Return lines for the person: which model is written, and a remedy if training was of no use."""
        best, start = self.best, self.start
        if best is None or start is None:
            return []
        if start.centers != START:  # the validation of the start was lost with its model
            return [f"The model is that of step {best.step}: top-1 {best.validation_top1:.4f}"]
        if best.centers != START:
            what = ", centers imprinted anew" if best.centers == IMPRINTED else ""
            gain = f"top-1 {best.validation_top1:.4f}, at the start {start.validation_top1:.4f}"
            lines = [f"The model is that of step {best.step}{what}: {gain}"]
            return (
                lines
                if best.validation_top1 > start.validation_top1 or start.validation_top1 == 1
                else [
                    *lines,
                    f"Training did not help: it named no more validation images than the start did. {ADVICE}",
                ]
            )
        return [
            f"Training did not help: at no step were more validation images named than at the start (top-1 "
            f"{start.validation_top1:.4f}), whose model is the one written. {ADVICE}"
        ]
