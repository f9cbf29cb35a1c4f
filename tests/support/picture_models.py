"""Small models of pictures, as a worker writes them."""

from __future__ import annotations

import torch

from geartrain.workers.data.bitmaps import Preprocessing
from geartrain.workers.models.backbones import build_backbone
from geartrain.workers.models.trained_model import TrainedModel


def picture_model(centers: torch.Tensor, names: list[str], look: Preprocessing) -> TrainedModel:
    """A stroke_net for bitmaps of ``look`` with these class centers."""
    settings = {"channels": look.channels, "image_size": look.size, "dim": centers.shape[-1], "width": 8}
    return TrainedModel(
        backbone=build_backbone("stroke_net", settings).eval(),
        backbone_settings=settings,
        centers=centers,
        class_names=names,
        preprocessing=look,
    )
