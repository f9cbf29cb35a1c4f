"""The rival of gear training: one model trained conventionally, its dense part forward and backward in every step.

In its best form: an image that occurs several times in a batch goes through the dense part once, all images are in
memory as one tensor, and both parts use PyTorch's fused Adam.
"""

from __future__ import annotations

import torch
from _gear_task import LEARNING_RATE, build_dense, build_fast, test_auc
from gear_data.page_views import PageViews, Views
from torch.nn import functional


class ConventionalTrainer:
    """Ordinary back-propagation through both parts."""

    name = "conventional training, ids deduplicated"

    def __init__(self, data: PageViews, *, blocks: int, seed: int = 0, lr: float = LEARNING_RATE) -> None:
        self._data = data
        self.dense = build_dense(blocks, seed)
        self.fast = build_fast(data, seed)
        parameters = [*self.dense.parameters(), *self.fast.parameters()]
        self._optimizer = torch.optim.Adam(parameters, lr=lr, fused=True)

    def step(self, views: Views) -> None:
        """One update of both parts."""
        ids, places = torch.unique(views.images, return_inverse=True)
        features_KD = self.dense(self._data.pictures[ids])
        loss = functional.binary_cross_entropy_with_logits(self.fast(views, features_KD[places]), views.labels)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()

    def drain(self) -> None:
        """Do nothing: no work is in the background."""

    def auc(self) -> float:
        """Return the AUC on the test views."""
        return test_auc(self._data, self.dense, self.fast)

    def close(self) -> None:
        """Do nothing: no resource is held."""
