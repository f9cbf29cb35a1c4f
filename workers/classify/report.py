"""Evaluation of a classifier on held-out images, during training and at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from rich.text import Text
from torch import Tensor

from geartrain.ams.values.text import counted
from geartrain.workers.classify.best import IMPRINTED
from geartrain.workers.classify.trainer import ImageTrainer
from geartrain.workers.data.images import Images
from geartrain.workers.models.evaluate import Answers, answer, answer_of_model, every_nth
from geartrain.workers.models.trained_model import TrainedModel

_QUICK_LOOK_IMAGES = 2000


class Evaluation:
    """Evaluates a model on the held-out images of a job."""

    def __init__(
        self, held_out: Mapping[str, Images], trainer: ImageTrainer, say: Callable[[str | Text], None]
    ) -> None:
        self._held_out = held_out
        self._trainer = trainer
        self._say = say
        self._logged: dict[str, int] = {}

    def quick_look(self) -> None:
        """Measure the accuracy before the first step, on a part of each test."""
        for name in self._held_out:
            self._test(name, 0)

    def quick_test(self, step: int, centers: str) -> tuple[float, int]:
        """Return top-1 on a part of the first test, the same each time, and the number of images."""
        result = self._test(next(iter(self._held_out)), step, centers)
        self._trainer.metric = "accuracy", result.top1
        return result.top1, len(result.images)

    def _test(self, name: str, step: int, centers: str = "") -> Answers:
        images = self._held_out[name]
        result = self._answer(every_nth(images, _QUICK_LOOK_IMAGES))
        if step > self._logged.get(name, -1):  # the centers of one step may be evaluated twice
            self._logged[name] = step
            self._trainer.events.scalars(f"held_out/{name}", {"top1": result.top1, "top5": result.top5}, step)
        seen, all_of_them = len(result.images), counted(len(images), "image")
        part = f"all {all_of_them}" if seen == len(images) else f"{seen:,} of {all_of_them}"
        when = (
            f"step {step}" + (", centers imprinted anew" if centers == IMPRINTED else "")
            if step
            else ("before the first step")
        )
        self._say(f"{when}: {name} top-1 {result.top1:.3f} ({part})")
        return result

    def answers(self, step: int, model: TrainedModel | None = None) -> dict[str, Answers]:
        """Return the answers to every test: of the saved ``model``, if one is given."""
        answers: dict[str, Answers] = {}
        for name, images in self._held_out.items():
            answers[name] = self._answer(images, model)
            summary = answers[name].summary()
            if model is None:
                self._trainer.events.scalars(f"held_out/{name}", {k: summary[k] for k in ("top1", "top5")}, step)
            images_text = counted(summary["images"], "image")
            self._say(f"{name}: top-1 {summary['top1']:.4f}, top-5 {summary['top5']:.4f}, {images_text}")
            if (worse := worse_than_guessing(summary["top1"], images.labels)) is not None:
                self._say(Text(worse, "yellow"))
        return answers

    def _answer(self, images: Images, model: TrainedModel | None = None) -> Answers:
        trainer = self._trainer
        if model is None:
            return answer(trainer.backbone, trainer.head, images, trainer.device)
        return answer_of_model(model, images, trainer.device)


def worse_than_guessing(top1: float, labels: Tensor) -> str | None:
    """Return a warning for a model that names fewer images with these labels [N] than always guessing their commonest
    class would; None otherwise."""
    known = labels[labels >= 0]
    commonest = int(torch.bincount(known).max()) / len(labels) if len(known) else 0.0
    if top1 >= commonest:
        return None
    return (
        f"That is worse than always naming the commonest class, which {commonest:.4f} of the images have: train for "
        "more steps, set another learning rate (--set lr=RATE), or check that the folders are the classes"
    )
