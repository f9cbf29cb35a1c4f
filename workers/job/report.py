"""What a finished run says of itself: accuracy on images it never saw, hard mistakes, times and versions."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from torch import nn

from geartrain.ams.values.errors import NonFinite, TrainingDiverged
from geartrain.ams.values.text import counted
from geartrain.bridge.head.class_head import ClassHead
from geartrain.workers.atomic import write_json
from geartrain.workers.data.images import Images
from geartrain.workers.job.best import IMPRINTED
from geartrain.workers.loggers.protocol import Loggers
from geartrain.workers.models.evaluate import Answers, answer, answer_of_model, every_nth
from geartrain.workers.models.mistakes import draw_mistakes
from geartrain.workers.models.saved_model import Model

_QUICK_LOOK_IMAGES = 2000
SWEEP = "sweep.json"
"""The trials of learning rates, in the folder of a run that had any."""


class Evaluation:
    """Asks a model about the held-out images of a job."""

    def __init__(
        self,
        held_out: Mapping[str, Images],
        backbone: nn.Module,
        head: ClassHead,
        device: torch.device,
        events: Loggers,
        say: Callable[[str], None],
    ) -> None:
        self._held_out = held_out
        self._backbone = backbone
        self._head = head
        self._device = device
        self._events = events
        self._say = say
        self._logged: dict[str, int] = {}

    def quick_look(self) -> None:
        """Accuracy before the first step, on a part of each test."""
        for name in self._held_out:
            self._look(name, 0)

    def look(self, step: int, centers: str) -> tuple[float, int]:
        """Top-1 on a part of the first test, the same at every look, and how many images that is."""
        result = self._look(next(iter(self._held_out)), step, centers)
        return result.top1, len(result.images)

    def _look(self, name: str, step: int, centers: str = "") -> Answers:
        images = self._held_out[name]
        result = answer(self._backbone, self._head, every_nth(images, _QUICK_LOOK_IMAGES), self._device)
        if step > self._logged.get(name, -1):  # the centers of one step may be looked at twice
            self._logged[name] = step
            self._events.scalars(f"held_out/{name}", {"top1": result.top1, "top5": result.top5}, step)
        seen, all_of_them = len(result.images), counted(len(images), "image")
        part = f"all {all_of_them}" if seen == len(images) else f"{seen:,} of {all_of_them}"
        when = (
            f"step {step}" + (", centers imprinted anew" if centers == IMPRINTED else "")
            if step
            else ("before the first step")
        )
        self._say(f"{when}: {name} top-1 {result.top1:.3f} ({part})")
        return result

    def answers(self, step: int, model: Model | None = None) -> dict[str, Answers]:
        """The answers to every test: of the saved ``model``, if one is given."""
        answers: dict[str, Answers] = {}
        for name, images in self._held_out.items():
            if model is None:
                answers[name] = answer(self._backbone, self._head, images, self._device)
            else:
                answers[name] = answer_of_model(model, images, self._device)
            summary = answers[name].summary()
            if model is None:
                self._events.scalars(f"held_out/{name}", {k: summary[k] for k in ("top1", "top5")}, step)
            images_text = counted(summary["images"], "image")
            self._say(f"{name}: top-1 {summary['top1']:.4f}, top-5 {summary['top5']:.4f}, {images_text}")
        return answers


def write_report(
    out: Path,
    answers: dict[str, Answers],
    train: Images,
    class_names: list[str],
    *,
    ink: bool,
    started: float,
    train_seconds: float,
    samples_per_second: float,
    phases: dict[str, float],
    device: torch.device,
    model: dict[str, Any],
    unreadable: list[str],
    bfloat16: bool,
    lr: float,
    diverged_at: int | None = None,
) -> dict[str, Any]:
    """Write ``report.json`` and ``mistakes.png``; return the report. The evaluation began at ``started``.

    ``model`` says which model was kept (:meth:`BestModel.training`); empty if there was no validation to choose by.
    ``unreadable`` names the images that were left out, ``lr`` is the peak learning rate,
    ``diverged_at`` the step at which the training ended for want of finite values.
    """
    report = {
        "held_out": {name: result.summary() for name, result in answers.items()},
        "train_seconds": train_seconds,
        "samples_per_second": samples_per_second,
        "phases": {**phases, "evaluation": time.perf_counter() - started},
        "versions": versions(device, bfloat16=bfloat16),
        **({"model": model} if model else {}),
        "lr": lr,
        **({} if diverged_at is None else {"diverged_at": diverged_at}),
        **({"sweep": json.loads((out / SWEEP).read_text(encoding="utf-8"))} if (out / SWEEP).exists() else {}),
        **({"unreadable": unreadable} if unreadable else {}),
    }
    draw_mistakes(out / "mistakes.png", answers, train, class_names, ink=ink)
    write_json(out / "report.json", report)
    return report


def diverged(exc: NonFinite, step: int, kept: str, rates: Mapping[str, float]) -> TrainingDiverged:
    """What a job raises that met NaN at ``step``: ``kept`` says what is left, ``rates`` are those that it had."""
    what, _, _ = str(exc).partition("; ")  # without the remedy: this is one
    lower = " ".join(f"{flag} {float(f'{rate / 3:.1g}'):g}" for flag, rate in rates.items())
    had = ", ".join(f"{rate:g}" for rate in rates.values())
    return TrainingDiverged(
        f"the training diverged at step {step} ({what}){f'; {kept}' if kept else ''}. Start again with a lower rate, "
        f"such as {lower} (it was {had})"
    )


def versions(device: torch.device, *, bfloat16: bool) -> dict[str, str]:
    """What a figure depends on."""
    return {
        "geartrain": importlib.metadata.version("geartrain"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "pillow": PIL.__version__,
        "device": str(device),
        "threads": str(torch.get_num_threads()),
        "precision": "bfloat16 autocast" if bfloat16 else "float32",
    }
