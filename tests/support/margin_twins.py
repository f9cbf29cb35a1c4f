"""Margins as their papers write them, with autograd, every logit written out.

Legend: B samples, A active classes, D width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import geartrain as gt
from geartrain.bridge.head.loss.margins.angular import COS_LIMIT
from geartrain.bridge.head.loss.margins.margin import MarginBatch
from tests.support.reference import sampled_weights


def margin_batch(norms: Tensor, labels: Tensor, *, step: int = 0, training: bool = True, **more: Any) -> MarginBatch:
    """One process's batch, as a head would describe it."""
    settings = {"first_sample": 0, "joint_size": len(labels), "known": {}, **more}
    return MarginBatch(
        step=step,
        training=training,
        norms_B=norms,
        labels_B=labels,
        target_cos=settings.pop("target_cos", lambda: torch.zeros_like(norms)),
        joint_sum=lambda own: own,
        **settings,
    )


class MarginTwin:
    """A margin and what it has learned; numbers are Python's."""

    def __init__(self, margin: Any) -> None:
        self.margin = margin
        self.known: dict[str, float] = {}

    def loss(
        self,
        features: Tensor,
        rows: Tensor,
        targets: Tensor,
        labels: Tensor,
        weights: Tensor | None = None,
        *,
        step: int = 0,
    ) -> Tensor:
        """Mean loss of a training batch; ``targets`` are places of the labels among the active rows [A, D] (or, of K
        centers each, [A, K, D]), ``weights`` [A] multiply the exponentials."""
        margin, above = self.margin, 2.0
        if isinstance(margin, gt.FilteredMargin):
            margin, above = margin.margin, margin.above
        cos = torch.einsum("bd,...d->b...", F.normalize(features), F.normalize(rows, dim=-1))
        cos = cos.amax(2) if rows.ndim == 3 else cos
        is_filtered = (cos.detach() > above).scatter(1, targets[:, None], False)
        own = cos.gather(1, targets[:, None]).squeeze(1)
        theta = torch.acos(own.clamp(-COS_LIMIT, COS_LIMIT))
        norms, penalty = features.norm(dim=1), torch.zeros(())
        match margin:
            case gt.ArcFace():
                own = torch.cos(theta + margin.margin)
            case gt.CosFace():
                own = own - margin.margin
            case gt.AdaFace():
                quality = self._quality(margin, norms.detach())
                angle = (theta - margin.margin * quality).clamp(0, math.pi)
                own = torch.cos(angle) - (margin.margin + margin.margin * quality)
            case gt.MagFace():
                length = norms.clamp(margin.shortest, margin.longest)
                rise = (margin.largest_margin - margin.min_margin) / (margin.longest - margin.shortest)
                own = torch.cos(theta + rise * (length - margin.shortest) + margin.min_margin)
                penalty = margin.regulariser * (length / margin.longest**2 + 1 / length).mean()
            case gt.ElasticArcFace():
                own = torch.cos(theta + margin.for_batch(margin_batch(norms, labels, step=step)).margins_B)
            case gt.ElasticCosFace():
                own = own - margin.for_batch(margin_batch(norms, labels, step=step)).margins_B
            case gt.CurricularFace():
                own, cos = self._curriculum(margin, own, theta, cos)
            case _:
                raise TypeError(f"{margin!r} has no twin")
        logits = margin.scale * cos.scatter(1, targets[:, None], own[:, None])
        logits = logits.masked_fill(is_filtered, -math.inf)
        return F.cross_entropy(logits + (0.0 if weights is None else weights.log()), targets) + penalty

    def _quality(self, margin: gt.AdaFace, norms: Tensor) -> Tensor:
        batches = self.known.get("norm_batches", 0.0)
        share = max(1 - margin.momentum, 1 / (batches + 1))
        mean, std = self.known.get("norm_mean", 0.0), self.known.get("norm_std", 0.0)
        mean += share * (float(norms.mean()) - mean)
        if len(norms) > 1:
            std += share * (float(norms.std()) - std)
        self.known = {"norm_mean": mean, "norm_std": std, "norm_batches": batches + 1}
        return (margin.h * (norms - mean) / (std + 1e-3)).clamp(-1, 1)

    def _curriculum(self, margin: gt.CurricularFace, own: Tensor, theta: Tensor, cos: Tensor) -> tuple[Tensor, Tensor]:
        t = margin.momentum * self.known.get("target_cos_mean", 0.0) + (1 - margin.momentum) * float(
            own.detach().mean()
        )
        self.known = {"target_cos_mean": t}
        target = torch.cos(theta + margin.margin)
        is_hard = cos.detach() > target.detach()[:, None]
        return target, torch.where(is_hard, cos * (t + cos), cos)


def twin_step(
    twin: MarginTwin, select: Any, features: Tensor, labels: Tensor, rows: Tensor, step: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, feature gradient and rows, [C, D] or [C, K, D], after a step of SGD with a learning rate of 0.5."""
    active = select.select(labels.numpy(), len(rows), step)
    ids, targets = torch.from_numpy(active.ids), torch.from_numpy(active.positions(labels.numpy()))
    x, w = features.double().requires_grad_(), rows.clone().requires_grad_()
    weights = sampled_weights(select, twin.margin, active.ids, labels, len(rows))
    loss = twin.loss(x, w[ids], targets, labels, weights, step=step)
    loss.backward()
    assert x.grad is not None and w.grad is not None
    return loss.detach(), x.grad, rows - 0.5 * w.grad
