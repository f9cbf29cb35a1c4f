"""Training of a classifier of images: a replicated backbone in this process, class centers in the AMS or on the ranks.

One for glyphs, folders and synchronous ranks. Legend: B images of this rank's batch, K channels, S side.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from geartrain.ams.values.errors import ConfigError
from geartrain.bridge.head.class_head import ClassHead
from geartrain.bridge.rows.optimizer import RowOptimizer
from geartrain.workers.data.images import Images, ReadAhead
from geartrain.workers.devices import images_at_once
from geartrain.workers.job.ranks import JobRanks
from geartrain.workers.job.state import JobProgress, JobState
from geartrain.workers.job.trainer import Trainer
from geartrain.workers.loopback import BACKEND
from geartrain.workers.models.backbones import Projected, StrokeNet
from geartrain.workers.models.discriminants import fit_projection
from geartrain.workers.recipes.recipe import Recipe, optimizer_of, sparsifier_of

_GRAPH = "graph.safetensors"
"""There only if the job selects by a graph, and has one."""


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
        bfloat16: bool = False,
    ) -> None:
        """``bfloat16``: the backbone works under autocast; its features come out in float32."""
        if recipe.batch_size % ranks.world_size:
            raise ConfigError(
                f"batch_size is {recipe.batch_size}; it must be a multiple of the {ranks.world_size} ranks"
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
        self.bfloat16 = bfloat16
        self._replica: nn.Module = self.backbone
        self._sparsifier = sparsifier_of(recipe)
        if self._sparsifier is not None and ranks.world_size == 1:
            raise ConfigError(
                f"sparsity is {recipe.sparsity!r}, and one process sends no gradients; start several, to go on with a "
                f"run, too (torchrun --rdzv-backend {BACKEND} --nproc-per-node 2 -m geartrain worker ...), or begin "
                "one without sparsity"
            )

    def modules(self) -> dict[str, Any]:
        """The backbone."""
        return {"backbone": self.backbone}

    def tables(self) -> list[str]:
        """That of the class centers."""
        return [self.head.name]

    def files(self) -> dict[str, bytes]:
        """The graph that the head selects by, so that a resumed job goes on with the same one."""
        graph = self.head.select.graph_to_bytes()
        return {} if graph is None else {_GRAPH: graph}

    def state(self, options: Any) -> JobState:
        """With the head's own, and momentum of sparsified gradients and what waits to be sent, of all ranks together.

        Taking those gives each rank the mean of all, so a run is that of another to the bit if both take snapshots at
        the same steps.
        """
        state = super().state(options)
        state.data["head"] = self.head.get_extra_state()
        if self._sparsifier is not None:
            self._sparsifier.merge()
            state.tensors["gradients"] = self._sparsifier.state_dict()
        return state

    def initialize(self) -> None:
        """Before the first step: solve the projection of a backbone that has one, and put each class center at its
        images' mean feature if the recipe says so."""
        features = self.backbone
        if isinstance(self.backbone, StrokeNet):
            if self.ranks.is_first:
                with self.phases.measured("projection"):
                    batches = self.images.batches(images_at_once(self.device), self.device)
                    fit_projection(self.backbone, batches, self.head.num_classes)
            # The trunk adds nothing yet, so the projection alone gives the same features, five times faster.
            features = Projected(self.backbone)
        self._replicate()
        if self.recipe.imprint:
            self.imprint(features)

    def restore(self, state: JobState) -> None:
        """Go on from a state whose rows are in place already."""
        super().restore(state)
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
        """See :meth:`Trainer.run`; a graph that is being built ends with it."""
        self._replica.train()
        self.head.train()
        try:
            return super().run(**settings)
        finally:
            self.head.select.cancel()

    def loss(self, step: int) -> Tensor:
        """The loss of the batch of ``step``."""
        if step and self.order.epoch(step) != self.order.epoch(step - 1):
            self.head.next_epoch()  # decided by the step alone: a resumed run builds its graph when it would have
        if self.head.select.has_graph:
            with self.phases.measured("graph"):
                self.head.select.prepare()  # the head finds it done
        images, labels_B = self._batch(step)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bfloat16):
            features_BD = self._replica(images)
        loss: Tensor = self.head(features_BD.float(), labels_B)
        return loss

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        """This rank's distorted images [B, K, S, S] in [0, 1] on the device, and labels [B]."""
        bitmaps, labels = self._batches.take(step)
        images, joint = bitmaps.to(self.device).float().div_(255), self.recipe.batch_size
        first = self.ranks.rank * len(labels)
        return self.recipe.augmentation.distort(images, first, joint, self.recipe.seed, step), labels

    def _own_indices(self, step: int) -> Tensor:
        """Of the images of this rank in the batch of ``step``."""
        own = self.recipe.batch_size // self.ranks.world_size
        return self.order.indices(step)[self.ranks.rank * own : (self.ranks.rank + 1) * own]

    def _replicate(self) -> None:
        """From here on the ranks' backbones are equal (rank 0's) and stay so."""
        if self.ranks.world_size == 1:
            return
        self._replica = DistributedDataParallel(self.backbone)
        if self._sparsifier is not None:
            self._sparsifier.attach(self._replica, self.optimizer)
