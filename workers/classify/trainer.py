"""Training of an image classifier: a replicated backbone in this process, class centers in the AMS or on the ranks.

For glyphs, folders and synchronous ranks alike. Legend: B images of this rank's batch, K channels, S side.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from geartrain.ams.values.errors import ConfigError
from geartrain.ams.values.text import counted
from geartrain.bridge.head.class_head import ClassHead
from geartrain.bridge.parallel.overlap.micro_batches import MicroBatches
from geartrain.bridge.rows.native_types import has_fast_bfloat16
from geartrain.bridge.rows.optimizer import RowOptimizer
from geartrain.workers.classify.float16 import LossScaler, to_float16
from geartrain.workers.data.images import Images, ReadAhead
from geartrain.workers.devices import images_at_once
from geartrain.workers.job.ranks import JobRanks
from geartrain.workers.job.state import JobProgress, JobState
from geartrain.workers.job.trainer import Trainer
from geartrain.workers.loopback import BACKEND
from geartrain.workers.models.backbones import ProjectedFeatures, StrokeNet
from geartrain.workers.models.discriminants import fit_projection
from geartrain.workers.recipes.recipe import Recipe, optimizer_of, sparsifier_of

_GRAPH = "graph.safetensors"
"""File of the graph, if the job selects by one."""
_PRODUCTS = {"bfloat16": torch.bfloat16, "float16_masters": torch.float16}
"""Product type of autocast, by the recipe's ``dtype``."""


class _Features(nn.Module):
    """Features of a network in float32, whatever the type of its products."""

    def __init__(self, network: nn.Module, device: torch.device, products: torch.dtype | None) -> None:
        super().__init__()
        self.network, self._device, self._products = network, device, products

    def forward(self, images: Tensor) -> Tensor:
        """Return the features [B, D] of images [B, K, S, S]."""
        with torch.autocast(self._device.type, dtype=self._products, enabled=self._products is not None):
            features: Tensor = self.network(images)
        return features.float()


class ImageTrainer(Trainer):
    """Trains a backbone and the centers of a head on an :class:`Images`."""

    recipe: Recipe

    def __init__(
        self,
        *,
        backbone: nn.Module,
        head: ClassHead,
        recipe: Recipe,
        images: Images,
        progress: JobProgress,
        ranks: JobRanks,
        device: torch.device,
    ) -> None:
        if recipe.batch_size % ranks.world_size:
            raise ConfigError(
                f"batch_size is {recipe.batch_size}; it must be a multiple of the {ranks.world_size} ranks"
            )
        of_rank = recipe.batch_size // ranks.world_size
        if recipe.micro_batches > of_rank:
            raise ConfigError(
                f"micro_batches is {recipe.micro_batches}, and a rank has {counted(of_rank, 'image')} of a batch; give "
                f"micro_batches={of_rank} at most, or batch_size={recipe.micro_batches * ranks.world_size} at least"
                + ", or start fewer processes"
                * (ranks.world_size > 1)
            )
        self.backbone = backbone.to(device)
        self.head = head
        super().__init__(
            recipe,
            len(images),
            optimizer_of(recipe, self.backbone.parameters()),
            RowOptimizer(head),
            progress,
            ranks=ranks,
            device=device,
        )
        self.images = images
        self._batches = ReadAhead(images, self._own_indices)
        fastest = "bfloat16" if has_fast_bfloat16(device) else "float32"
        self._dtype = fastest if recipe.dtype == "auto" else recipe.dtype
        self._scaler = LossScaler(device.type, enabled=self._dtype.startswith("float16"))
        # GradScaler looks at the gradients of rows before they are written.
        self.steps_in_backward = ranks.world_size > 1 and not self._scaler.is_enabled()
        self.precision = self._dtype.removesuffix("_masters") + " autocast" * (self._dtype in _PRODUCTS)
        """Types in which the backbone is trained, for reports."""
        self._train_by(self.backbone)
        self._sparsifier = sparsifier_of(recipe)
        if self._sparsifier is not None and ranks.world_size == 1:
            raise ConfigError(
                f"sparsity is {recipe.sparsity!r}, and one process sends no gradients; start several, to go on with a "
                f"run, too (torchrun --rdzv-backend {BACKEND} --nproc-per-node 2 -m geartrain worker ...), or begin "
                "one without sparsity"
            )

    def modules(self) -> dict[str, Any]:
        """Return the backbone."""
        return {"backbone": self.backbone}

    def tables(self) -> list[str]:
        """Return the table of the class centers."""
        return [self.head.name]

    def files(self) -> dict[str, bytes]:
        """Return the graph by which the head selects, so that a resumed job continues with it."""
        graph = self.head.select.graph_to_bytes()
        return {} if graph is None else {_GRAPH: graph}

    def state(self, options: Any) -> JobState:
        """Return the state with the head's own, and the momentum and residuals of sparsified gradients of all ranks.

        Reading those gives each rank the mean of all, so two runs are equal to the bit if both take snapshots at the
        same steps.
        """
        state = super().state(options)
        state.data["head"] = self.head.get_extra_state()
        state.tensors["scaler"] = self._scaler.state_dict()
        if self._sparsifier is not None:
            self._sparsifier.merge()
            state.tensors["gradients"] = self._sparsifier.state_dict()
        return state

    def initialize(self) -> None:
        """Initialize before the first step: solve the projection of a backbone that has one, and put each class center
        at the mean feature of its images if the recipe says so."""
        features = self.backbone
        if isinstance(self.backbone, StrokeNet):
            if self.ranks.is_first:
                with self.phases.measured("projection"):
                    batches = self.images.batches(images_at_once(self.device), self.device)
                    fit_projection(self.backbone, batches, self.head.num_classes)
            # The trunk adds nothing yet, so the projection alone gives the same features, five times faster.
            features = ProjectedFeatures(self.backbone)
        if self._dtype == "float16":
            to_float16(self.backbone)
            features = self.backbone
        self._replicate()
        if self.recipe.imprint:
            self.imprint(features)

    def restore(self, state: JobState) -> None:
        """Restore a state whose rows are in place already."""
        if self._dtype == "float16":
            to_float16(self.backbone)
        super().restore(state)
        self._scaler.load_state_dict(state.tensors.get("scaler", {}))
        if _GRAPH in state.files:
            self.head.select.graph_from_bytes(state.files[_GRAPH])
        self.head.set_extra_state(state.data["head"])
        self._replicate()
        gradients: Mapping[str, Any] | None = state.tensors.get("gradients")
        if self._sparsifier is not None and gradients is not None:
            self._sparsifier.load_state_dict(gradients)

    def imprint(self, features: nn.Module) -> None:
        """Put each class center at the mean of the features of its images."""
        part = self.images.part(self.ranks.rank, self.ranks.world_size)
        with self.phases.measured("imprint"):
            self.head.imprint(part.batches(images_at_once(self.device), self.device), features)

    def run(self, **settings: Any) -> bool:
        """Run as :meth:`Trainer.run`; a graph build in progress ends with it."""
        self._replica.train()
        self.head.train()
        try:
            return super().run(**settings)
        finally:
            self.head.select.cancel()

    def batches_before(self, step: int) -> int:
        """Return the recipe's number, a function of the step, so that a resumed run continues with its batches."""
        return self.recipe.batches_before(step)

    def loss(self, step: int) -> Tensor:
        """Return the loss of a step of one batch."""
        self._select(step)
        images, labels_B = self._batch(self.batches_before(step))
        loss: Tensor = self.head(self._features(images), labels_B)
        return loss

    def backward(self, step: int) -> Tensor:
        """Make the gradients batch after batch if there are several, each in its micro-batches."""
        count = self.recipe.batches(step)
        if count == 1 and self.recipe.micro_batches == 1 and not self._scaler.is_enabled():
            return super().backward(step)
        self._select(step)
        self.optimizer.zero_grad()
        self.rows.zero_grad()
        first, losses = self.batches_before(step), list[Tensor]()

        def scale(loss: Tensor) -> Tensor:
            scaled: Tensor = self._scaler.scale(loss / count)
            return scaled

        for number in range(first, first + count):
            images, labels_B = self._batch(number)
            is_last = number == first + count - 1
            backward = partial(self._micro_batches.backward, images, labels_B, scale=scale, ended=self._timer.ended)
            losses.append(backward(reduces=is_last, rows=self.rows if self.steps_in_backward else None))
        return torch.stack(losses).mean()

    def update(self) -> None:
        """Update; gradients of a scaled loss are unscaled, or skipped where they overflowed."""
        self._scaler.step(self.optimizer)
        if not self.steps_in_backward:
            self._scaler.step(self.rows)
        self._scaler.update()

    def _select(self, step: int) -> None:
        """Start a new epoch of the selection, and let it prepare."""
        first, before = self.batches_before(step), self.batches_before(max(0, step - 1))
        if self.order.epoch(first) != self.order.epoch(before):
            self.head.next_epoch()  # decided by the step alone: a resumed run builds its graph at the same step
        if self.head.select.has_graph:
            with self.phases.measured("graph"):
                self.head.select.prepare()  # the head finds it done

    def _batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Return this rank's distorted images [B, K, S, S] in [0, 1] on the device, and labels [B]."""
        bitmaps, labels = self._batches.take(number)
        images, joint = bitmaps.to(self.device).float().div_(255), self.recipe.batch_size
        first = self.ranks.rank * len(labels)
        return self.recipe.augmentation.distort(images, first, joint, self.recipe.seed, number), labels

    def _own_indices(self, number: int) -> Tensor:
        """Return the indices of this rank's images in a batch."""
        own = self.recipe.batch_size // self.ranks.world_size
        return self.order.indices(number)[self.ranks.rank * own : (self.ranks.rank + 1) * own]

    def _replicate(self) -> None:
        """Make the ranks' backbones equal to rank 0's, from now on."""
        if self.ranks.world_size == 1:
            return
        self._train_by(DistributedDataParallel(self.backbone))
        if self._sparsifier is not None:
            self._sparsifier.attach(self._replica, self.optimizer, grad_scaler=self._scaler)

    def _train_by(self, replica: nn.Module) -> None:
        self._replica = replica
        self._features = _Features(replica, self.device, _PRODUCTS.get(self._dtype))
        self._micro_batches = MicroBatches(self._features, self.head, self.recipe.micro_batches)
