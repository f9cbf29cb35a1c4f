"""A model that is worse than guessing is said to be."""

from __future__ import annotations

import numpy as np
import torch

from geartrain.workers.classify.report import worse_than_guessing as worse_than_the_commonest
from geartrain.workers.ctr.metrics import measured, worse_than_guessing


def test_of_clicks_below_the_mean_click_rate() -> None:
    clicks = np.array([0, 0, 0, 1])
    assert worse_than_guessing(measured(np.array([0.2, 0.2, 0.2, 0.4]), clicks)) is None
    assert "row_lr" in str(worse_than_guessing(measured(np.array([0.9, 0.9, 0.9, 0.1]), clicks)))


def test_of_images_below_the_commonest_class() -> None:
    labels = torch.tensor([3, 3, 3, 5])
    assert worse_than_the_commonest(0.75, labels) is None
    assert "0.7500 of the images" in str(worse_than_the_commonest(0.7, labels))
    assert worse_than_the_commonest(0.0, labels[:0]) is None
