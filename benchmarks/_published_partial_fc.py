"""The rival of the head bench: partial FC as published (An et al., InsightFace), in its best shape on a CPU.

Each step draws a random number for every class, sets those of the positives to 2, takes the largest ones as the sample,
gathers their weights and momentum, lets autograd make the dense gradient of the sampled weights, applies SGD with
momentum to them and writes both back. At sample rate 1 everything is used where it lies.

Shapes: B samples, C classes, D width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


class PublishedPartialFC:
    """Class weights [C, D] with their momentum, and one training step over them."""

    def __init__(
        self, num_classes: int, dim: int, sample_rate: float, *, lr: float = 0.1, momentum: float = 0.9
    ) -> None:
        self.weight = torch.empty(num_classes, dim).normal_(0, 0.01)
        self.velocity = torch.zeros(num_classes, dim)
        self.num_sampled = int(num_classes * sample_rate)
        self.lr = lr
        self.momentum = momentum

    def step(self, features: Tensor, labels: Tensor, *, scale: float = 64.0, margin: float = 0.5) -> float:
        """Train on one batch with an ArcFace margin; ``features.grad`` [B, D] is filled in. Returns the loss."""
        if self.num_sampled == len(self.weight):
            return self._train(self.weight, self.velocity, features, labels, scale, margin)
        index = self._sample(labels)
        weight, velocity = self.weight.index_select(0, index), self.velocity.index_select(0, index)
        loss = self._train(weight, velocity, features, torch.searchsorted(index, labels), scale, margin)
        self.weight.index_copy_(0, index, weight)
        self.velocity.index_copy_(0, index, velocity)
        return loss

    def _sample(self, labels: Tensor) -> Tensor:
        priority = torch.rand(len(self.weight))
        priority[labels] = 2.0
        return priority.topk(self.num_sampled, sorted=False).indices.sort().values

    def _train(
        self, weight: Tensor, velocity: Tensor, features: Tensor, targets: Tensor, scale: float, margin: float
    ) -> float:
        weight.requires_grad_()
        logits = F.linear(F.normalize(features), F.normalize(weight))
        samples = torch.arange(len(targets))
        cos = logits[samples, targets]
        sin = torch.sqrt(1.0 - cos * cos)
        logits = logits.index_put((samples, targets), cos * math.cos(margin) - sin * math.sin(margin))
        loss = F.cross_entropy(logits * scale, targets)
        loss.backward()
        gradient = weight.grad
        assert gradient is not None
        with torch.no_grad():
            velocity.mul_(self.momentum).add_(gradient)
            weight.add_(velocity, alpha=-self.lr)
        weight.grad = None
        weight.requires_grad_(False)
        return float(loss.detach())
