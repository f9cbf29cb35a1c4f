"""What a finished run says of itself: accuracy on images it never saw, hard mistakes, times and versions."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch

from geartrain.ams.values.text import counted
from geartrain.bridge.head.class_head import ClassHead
from geartrain.bridge.rows.native_types import has_fast_bfloat16
from geartrain.workers.atomic import write_json
from geartrain.workers.data.images import ImageSet
from geartrain.workers.job.live import Events
from geartrain.workers.models.backbones import StrokeNet
from geartrain.workers.models.evaluate import Answers, answer, every_nth
from geartrain.workers.models.mistakes import draw_mistakes

_QUICK_LOOK_IMAGES = 2000


class Evaluation:
    """Asks a model about the held-out images of a job."""

    def __init__(
        self,
        held_out: dict[str, ImageSet],
        backbone: StrokeNet,
        head: ClassHead,
        device: torch.device,
        events: Events,
        say: Callable[[str], None],
    ) -> None:
        self._held_out = held_out
        self._backbone = backbone
        self._head = head
        self._device = device
        self._events = events
        self._say = say

    def quick_look(self) -> None:
        """Accuracy before the first step, on a part of each test."""
        for name, images in self._held_out.items():
            result = answer(self._backbone, self._head, every_nth(images, _QUICK_LOOK_IMAGES), self._device)
            self._events.scalars(f"held_out/{name}", {"top1": result.top1, "top5": result.top5}, 0)
            self._say(f"before the first step: {name} top-1 {result.top1:.3f} (of every n-th image)")

    def answers(self, step: int) -> dict[str, Answers]:
        """The answers to every test."""
        answers: dict[str, Answers] = {}
        for name, images in self._held_out.items():
            answers[name] = answer(self._backbone, self._head, images, self._device)
            summary = answers[name].summary()
            self._events.scalars(f"held_out/{name}", {k: summary[k] for k in ("top1", "top5")}, step)
            images_text = counted(summary["images"], "image")
            self._say(f"{name}: top-1 {summary['top1']:.4f}, top-5 {summary['top5']:.4f}, {images_text}")
        return answers


def write_report(
    out: Path,
    answers: dict[str, Answers],
    train: ImageSet,
    class_names: list[str],
    *,
    ink: bool,
    started: float,
    train_seconds: float,
    samples_per_second: float,
    phases: dict[str, float],
    device: torch.device,
) -> dict[str, Any]:
    """Write ``report.json`` and ``mistakes.png``; return the report. The evaluation began at ``started``."""
    report = {
        "held_out": {name: result.summary() for name, result in answers.items()},
        "train_seconds": train_seconds,
        "samples_per_second": samples_per_second,
        "phases": {**phases, "evaluation": time.perf_counter() - started},
        "versions": versions(device),
    }
    draw_mistakes(out / "mistakes.png", answers, train, class_names, ink=ink)
    write_json(out / "report.json", report)
    return report


def versions(device: torch.device) -> dict[str, str]:
    """What a figure depends on."""
    return {
        "geartrain": importlib.metadata.version("geartrain"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "pillow": PIL.__version__,
        "device": str(device),
        "threads": str(torch.get_num_threads()),
        "precision": "bfloat16 autocast" if has_fast_bfloat16(device) else "float32",
    }
