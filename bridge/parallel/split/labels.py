"""Labels of a softmax that is split over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from geartrain.ams.values.errors import InvalidArgument, InvalidIds
from geartrain.ams.values.text import quoted


def check_labels(labels: Any, num_samples: int | None, num_classes: int, ignore_index: int) -> None:
    """Raise InvalidIds or InvalidArgument unless ``labels`` are [S] int64 in [0, C), or ``ignore_index``.

    Those on a device are not looked at, which would stall it: a label outside makes the loss NaN.
    """
    if not isinstance(labels, Tensor) or labels.ndim != 1 or labels.dtype != torch.int64:
        given = f"{tuple(labels.shape)} {labels.dtype}" if isinstance(labels, Tensor) else quoted(labels)
        raise InvalidArgument(f"labels are {given}; they must be a tensor [S] of int64, a class for each sample")
    if num_samples is not None and len(labels) != num_samples:
        raise InvalidArgument(f"there are {len(labels)} labels and logits of {num_samples} samples; give one for each")
    if labels.device.type == "cpu":
        wrong = labels[((labels < 0) | (labels >= num_classes)) & (labels != ignore_index)]
        if len(wrong):
            raise InvalidIds(
                f"label {int(wrong[0])} is no class: they are 0 to {num_classes - 1}, or ignore_index={ignore_index}"
            )
