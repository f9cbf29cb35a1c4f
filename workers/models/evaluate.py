"""Accuracy of a head on held-out images.

Legend: N images, D width, k answers, K channels, S side of a bitmap.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from geartrain.bridge.head.class_head import ClassHead
from geartrain.workers.data.images import Images
from geartrain.workers.devices import images_at_once
from geartrain.workers.models.trained_model import TrainedModel

ANSWERS = 5


@dataclass(frozen=True)
class Answers:
    """Best classes of each image of a set, with their scores."""

    images: Images
    scores: Tensor
    """[N, k] cosines, best first."""
    classes: Tensor
    """[N, k] int64."""

    @property
    def top1(self) -> float:
        """Share of the images whose best class is theirs."""
        return float((self.classes[:, 0] == self.images.labels).float().mean())

    @property
    def top5(self) -> float:
        """Share of the images whose class is among the best five."""
        return float((self.classes == self.images.labels[:, None]).any(dim=1).float().mean())

    def summary(self) -> dict[str, Any]:
        """Return the report's entries for this set."""
        return {
            "top1": self.top1,
            "top5": self.top5,
            "classes": len(set(self.images.labels.tolist())),
            "images": len(self.images),
        }

    def hardest(self, count: int) -> list[int]:
        """Return the indices of the wrong answers with the highest scores, highest first."""
        wrong = (self.classes[:, 0] != self.images.labels).nonzero().squeeze(1)
        order = self.scores[wrong, 0].argsort(descending=True, stable=True)
        return [int(index) for index in wrong[order[:count]]]


@torch.no_grad()
def answer(backbone: nn.Module, head: ClassHead, images: Images, device: torch.device) -> Answers:
    """Return the five best classes of each image by ``ClassHead.predict``; all, if there are fewer.

    ``images`` are empty on a rank that only takes part in another rank's query.
    """
    backbone.eval()
    batches = images.batches(images_at_once(device), device) if len(images) else ()
    nothing = torch.empty(0, head.dim, device=device)
    features_ND = torch.cat([nothing, *(backbone(bitmaps).float() for bitmaps, _ in batches)])
    scores, classes = head.predict(features_ND, min(ANSWERS, head.num_classes))
    return Answers(images, scores.cpu(), classes.cpu())


@torch.no_grad()
def answer_of_model(model: TrainedModel, images: Images, device: torch.device) -> Answers:
    """Return the answers of a saved model with its centers in memory; holds the scores [B, C] of one batch."""
    there = replace(model, backbone=model.backbone.to(device), centers=model.centers.to(device))
    k = min(ANSWERS, len(model.class_names))
    batches = images.batches(images_at_once(device), device)
    found = [there.best(there.backbone(bitmaps).float(), k) for bitmaps, _ in batches]
    return Answers(images, *(torch.cat(part).cpu() for part in zip(*found, strict=True)))


def every_nth(images: Images, count: int) -> Images:
    """Return about ``count`` images spread evenly over the set."""
    step = max(1, len(images) // count)
    return images.subset(slice(None, None, step))


def first_images(images: Images, classes: Iterable[int]) -> dict[int, Tensor]:
    """Return the first bitmap [K, S, S] of each of the ``classes`` that has one."""
    found = {}
    for label in classes:
        places = (images.labels == label).nonzero()
        if len(places):
            found[label] = images.take(places[0])[0][0]
    return found
