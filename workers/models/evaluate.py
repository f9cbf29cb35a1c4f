"""How well a head names images it was not trained on.

Legend: N images, D width, k answers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from geartrain.bridge.head.class_head import ClassHead
from geartrain.workers.data.images import ImageSet
from geartrain.workers.devices import images_at_once
from geartrain.workers.models.backbones import StrokeNet

ANSWERS = 5


@dataclass(frozen=True)
class Answers:
    """The best classes of every image of a set."""

    images: ImageSet
    scores: Tensor
    """[N, k] cosines, best first."""
    classes: Tensor
    """[N, k] int64."""

    @property
    def top1(self) -> float:
        """Part of the images whose best class is theirs."""
        return float((self.classes[:, 0] == self.images.labels).float().mean())

    @property
    def top5(self) -> float:
        """Part of the images whose class is among the best five."""
        return float((self.classes == self.images.labels[:, None]).any(dim=1).float().mean())

    def summary(self) -> dict[str, Any]:
        """What the report says of this set."""
        return {
            "top1": self.top1,
            "top5": self.top5,
            "classes": len(set(self.images.labels.tolist())),
            "images": len(self.images),
        }

    def hardest(self, count: int) -> list[int]:
        """Indices of the wrong answers that were given with the greatest score, greatest first."""
        wrong = (self.classes[:, 0] != self.images.labels).nonzero().squeeze(1)
        order = self.scores[wrong, 0].argsort(descending=True, stable=True)
        return [int(index) for index in wrong[order[:count]]]


@torch.no_grad()
def answer(backbone: StrokeNet, head: ClassHead, images: ImageSet, device: torch.device) -> Answers:
    """The five best classes of each image (fewer if there are fewer classes); see ``ClassHead.predict``."""
    backbone.eval()
    batches = images.batches(images_at_once(device), device)
    features_ND = torch.cat([backbone(bitmaps).float() for bitmaps, _ in batches])
    scores, classes = head.predict(features_ND, min(ANSWERS, head.num_classes))
    return Answers(images, scores.cpu(), classes.cpu())


@torch.no_grad()
def best_centers(features_ND: Tensor, unit_centers_CD: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Cosines [N, k] and classes [N, k] of the centers nearest to each feature; of equal scores the lower class."""
    unit_ND = torch.nn.functional.normalize(features_ND, dim=1)
    scores, order = (unit_ND @ unit_centers_CD.T).sort(dim=1, descending=True, stable=True)
    return scores[:, :k], order[:, :k]


def every_nth(images: ImageSet, count: int) -> ImageSet:
    """About ``count`` images spread evenly over the set."""
    step = max(1, len(images) // count)
    return ImageSet(images.bitmaps[::step], images.labels[::step])


def first_images(images: ImageSet, classes: Iterable[int]) -> dict[int, Tensor]:
    """Class -> its first bitmap [K, S, S], of those classes that have one."""
    found = {}
    for label in classes:
        places = (images.labels == label).nonzero()
        if len(places):
            found[label] = images.bitmaps[int(places[0])]
    return found
