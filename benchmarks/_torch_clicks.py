"""A click model in plain torch: the same network, batches and settings over ``nn.EmbeddingBag`` of this process.

Rows are trained by ``torch.optim.SparseAdam``, which moves those of a batch alone, as ours does; it has no weight
decay, so that is added to the gradients. Ids are numbered beforehand, since tables of torch do not grow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from torch import Tensor, nn

import geartrain as gt
from geartrain.workers.ctr.designs import HISTORY, Design, layout_of
from geartrain.workers.ctr.metrics import auc
from geartrain.workers.ctr.recipe import CtrRecipe
from geartrain.workers.ctr.samples.click_samples import PADDING, ClickSamples, part_validation, split
from geartrain.workers.ctr.trainer import ClickTrainer
from geartrain.workers.data.streams import JointOrder
from geartrain.workers.job.options import JobOptions
from geartrain.workers.job.ranks import JobRanks
from geartrain.workers.job.state import JobProgress
from geartrain.workers.job.trainer import Attempt

_AT_ONCE = 4096


def both_aucs(samples: ClickSamples, recipe: CtrRecipe) -> tuple[float, float]:
    """The AUC on what is held out: ours, and that of plain torch."""
    train, held_out = split(samples, recipe.split, recipe.seed, history=recipe.history, fresh=recipe.fresh)
    _, test = part_validation(held_out, recipe.seed)
    steps = recipe.steps or math.ceil(recipe.epochs * len(train) / recipe.batch_size)
    recipe = replace(recipe, steps=steps, patience=0)
    design = Design(recipe, layout_of(samples))
    return _ours(samples, recipe), _torch(design, train, test)


def _ours(samples: ClickSamples, recipe: CtrRecipe) -> float:
    with gt.local() as cluster:
        attempt = Attempt(
            options=JobOptions(job="ctr", out=Path(), recipe=recipe),
            progress=JobProgress(step=0, stage_start=0, stage_steps=recipe.stage_steps(), table="ctr"),
            cluster=cluster,
            ranks=JobRanks(),
            console=Console(quiet=True),
        )
        trainer = ClickTrainer(attempt, ("", samples))
        trainer.run()
        return auc(*trainer.predict()[:2])


class _Bags(nn.Module):
    """The vectors of every field."""

    def __init__(self, design: Design, *parts: ClickSamples) -> None:
        super().__init__()
        self._known: dict[str, npt.NDArray[np.int64]] = {}
        self._design = design
        for part in parts:
            for first in range(0, len(part), 200_000):
                batch = design.ids(part, np.arange(first, min(first + 200_000, len(part))))
                for name in design.dims:
                    ids = batch[name][0] if isinstance(batch[name], tuple) else batch[name]
                    self._known[name] = np.union1d(self._known.get(name, np.empty(0, np.int64)), ids)
        self.bags = nn.ModuleDict(
            {
                name: nn.EmbeddingBag(len(self._known[name]), dim, mode="sum", sparse=True, include_last_offset=True)
                for name, dim in design.dims.items()
            }
        )
        for bag in self.bags.values():
            nn.init.normal_(bag.weight, std=0.01)

    def forward(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        return {name: self._vectors(name, batch[name]) for name in self._design.dims}

    def _vectors(self, name: str, given: Any) -> Tensor:
        if isinstance(given, tuple):
            ids, offsets = given
        else:
            rows = given.reshape(len(given), -1)
            ids, offsets = rows[rows != PADDING], np.concatenate([[0], (rows != PADDING).sum(1).cumsum()])
        places = torch.from_numpy(np.searchsorted(self._known[name], ids))
        sums = self.bags[name](places, torch.from_numpy(offsets))
        counts = torch.from_numpy(np.diff(offsets)).clamp(min=1).unsqueeze(1)
        return sums / (counts.sqrt() if name.startswith(HISTORY) else counts)


def _torch(design: Design, train: ClickSamples, test: ClickSamples) -> float:
    recipe = design.recipe
    torch.manual_seed(recipe.seed)
    network, bags = design.network(), _Bags(design, train, test)
    optimizers = {
        torch.optim.Adam(network.parameters(), lr=recipe.lr): recipe.lr,
        torch.optim.SparseAdam(list(bags.parameters()), lr=recipe.row_lr): recipe.row_lr,
    }
    order = JointOrder(len(train), recipe.batch_size, recipe.seed)
    steps = recipe.stage_steps()
    for step in range(steps):
        for optimizer, peak in optimizers.items():
            optimizer.param_groups[0]["lr"] = peak * recipe.rate_factor(step, steps)
            optimizer.zero_grad()
        indices = order.indices(step).numpy()
        network(bags(design.ids(train, indices)), torch.from_numpy(train.clicks[indices])).backward()
        for rows in bags.parameters():
            gradient = rows.grad.coalesce()
            decayed = gradient.values() + recipe.row_weight_decay * rows.detach()[gradient.indices()[0]]
            rows.grad = torch.sparse_coo_tensor(
                gradient.indices(), decayed, rows.shape, is_coalesced=True, check_invariants=False
            )
        for optimizer in optimizers:
            optimizer.step()
    network.eval()
    with torch.no_grad():
        parts = np.split(np.arange(len(test)), range(_AT_ONCE, len(test), _AT_ONCE))
        scores = torch.cat([network(bags(design.ids(test, part))) for part in parts])
    return auc(scores.double().numpy(), test.clicks)
