"""The training loop: a replicated backbone in this process, class centers in the AMS.

One loop for glyphs, folders and synchronous ranks. Everything random is a function of (seed, step), so that a resumed
run goes on as if it had never stopped.

Legend: B images of this rank's batch, K channels, S side.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from geartrain.ams.values.errors import ConfigError
from geartrain.bridge.head.class_head import ClassHead
from geartrain.bridge.rows.optimizer import RowOptimizer
from geartrain.bridge.rows.state import set_random_state
from geartrain.workers.data.images import Images, ReadAhead
from geartrain.workers.data.streams import JointOrder, ReadingPosition
from geartrain.workers.devices import images_at_once
from geartrain.workers.job.best import LOOKS
from geartrain.workers.job.live import LiveLine
from geartrain.workers.job.ranks import JobRanks
from geartrain.workers.job.row_timing import RowTimes
from geartrain.workers.job.state import JobState, Progress
from geartrain.workers.loggers.protocol import Loggers
from geartrain.workers.loopback import BACKEND
from geartrain.workers.models.backbones import Projected, StrokeNet
from geartrain.workers.models.discriminants import fit_projection
from geartrain.workers.recipes.recipe import Recipe, optimizer_of, sparsifier_of

SHOW_EVERY = 10
"""Steps between two readings of the loss, which on an accelerator wait for it."""


@dataclass
class Phases:
    """Seconds of each part of a run, in the order in which they first ended."""

    seconds: dict[str, float] = field(default_factory=dict)

    def measured(self, name: str, work: Callable[[], None]) -> None:
        """Do ``work`` and add its time to ``name``, less that of phases measured within it: their sum is the whole."""
        started, before = time.perf_counter(), sum(self.seconds.values())
        try:
            work()
        finally:
            within = sum(self.seconds.values()) - before
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started - within


class Trainer:
    """Trains a backbone and the centers of a head on an :class:`Images`."""

    def __init__(
        self,
        *,
        backbone: nn.Module,
        head: ClassHead,
        recipe: Recipe,
        images: Images,
        progress: Progress,
        ranks: JobRanks,
        device: torch.device,
        row_times: RowTimes,
        bfloat16: bool = False,
    ) -> None:
        """``bfloat16``: the backbone works under autocast; its features come out in float32."""
        if recipe.batch_size % ranks.world_size:
            raise ConfigError(
                f"batch_size is {recipe.batch_size}; it must be a multiple of the {ranks.world_size} ranks"
            )
        self.backbone = backbone.to(device)
        self.head = head
        self.recipe = recipe
        self.progress = progress
        self.phases = Phases()
        self.samples_per_second = 0.0
        self._images = images
        self._ranks = ranks
        self._device = device
        self._row_times = row_times
        self._order = JointOrder(len(images), recipe.batch_size, recipe.seed)
        self._batches = ReadAhead(images, self._own_indices)
        self._bfloat16 = bfloat16
        self._replica: nn.Module = self.backbone
        self._optimizer = optimizer_of(recipe, self.backbone.parameters())
        self._sparsifier = sparsifier_of(recipe)
        if self._sparsifier is not None and ranks.world_size == 1:
            raise ConfigError(
                f"sparsity is {recipe.sparsity!r}, and one process sends no gradients; start several, to go on with a "
                f"run, too (torchrun --rdzv-backend {BACKEND} --nproc-per-node 2 -m geartrain worker ...), or begin "
                "one without --sparsity"
            )
        self._rows = RowOptimizer(head)
        self._row_lr = self._rows.param_groups[0]["lr"]

    @property
    def train_seconds(self) -> float:
        """Time of all parts so far: projection, imprinting, graphs built between the steps, and steps."""
        return sum(self.phases.seconds.values())

    def start(self) -> None:
        """Before the first step: solve the projection of a backbone that has one, and put each class center at its
        images' mean feature if the recipe says so."""
        features = self.backbone
        if isinstance(self.backbone, StrokeNet):
            if self._ranks.is_first:
                self.phases.measured("projection", partial(self._fit_projection, self.backbone))
            # The trunk adds nothing yet, so the projection alone gives the same features, five times faster.
            features = Projected(self.backbone)
        self._replicate()
        if self.recipe.imprint:
            self._imprint(features)

    def restore(self, state: JobState) -> None:
        """Go on from a state whose parameters and rows are in place already.

        Ranks that did not exist when it was taken begin with random numbers of their own. Raises ConfigError if the
        state is that of other images.
        """
        self._order.require(state.cursor, self.progress.step)
        self._optimizer.load_state_dict(state.optimizer)
        if state.graph is not None:
            self.head.select.graph_from_bytes(state.graph)
        self.head.set_extra_state(state.head)
        self._replicate()
        if self._sparsifier is not None and state.gradients is not None:
            self._sparsifier.load_state_dict(state.gradients)
        if self._ranks.rank < len(state.random):
            set_random_state(state.random[self._ranks.rank], self._device)
        else:
            mixed = np.random.SeedSequence([self.recipe.seed, self.progress.step, self._ranks.rank])
            torch.manual_seed(int(mixed.generate_state(1, np.uint64)[0]) >> 1)

    @property
    def cursor(self) -> ReadingPosition:
        """Which images are consumed."""
        return self._order.cursor(self.progress.step)

    def optimizer_state(self) -> dict[str, Any]:
        """``state_dict`` of the backbone's optimizer."""
        state: dict[str, Any] = self._optimizer.state_dict()
        return state

    def gradient_state(self) -> dict[str, Any] | None:
        """Momentum of sparsified gradients and what waits to be sent, of all ranks together; every rank calls this."""
        if self._sparsifier is None:
            return None
        self._sparsifier.merge()
        return self._sparsifier.state_dict()

    def imprint(self) -> None:
        """Put each class center at the mean feature of its images."""
        self._imprint(self.backbone)

    def run(
        self,
        *,
        stop: Callable[[], bool],
        due: Callable[[], bool],
        save: Callable[[], None],
        look: Callable[[], None],
        line: LiveLine | None,
        events: Loggers,
    ) -> bool:
        """Train to the end of the stage; return False if ``stop`` ended it before.

        ``save`` runs on every rank, every ``recipe.save_every`` steps and after a step before which a rank was ``due``.
        ``look`` runs on every rank :data:`LOOKS` times a stage; the last one is left to the caller.
        """
        before, seconds = self.progress.step, self.train_seconds
        finished = True

        def steps() -> None:
            nonlocal finished
            finished = self._steps(stop, due, save, look, line, events)

        try:
            self.phases.measured("steps", steps)
        finally:
            self.head.select.cancel()
        elapsed = self.train_seconds - seconds
        self.samples_per_second = (self.progress.step - before) * self.recipe.batch_size / max(elapsed, 1e-9)
        return finished

    def _steps(
        self,
        stop: Callable[[], bool],
        due: Callable[[], bool],
        save: Callable[[], None],
        look: Callable[[], None],
        line: LiveLine | None,
        events: Loggers,
    ) -> bool:
        self._replica.train()
        self.head.train()
        look_every = max(1, self.progress.stage_steps // LOOKS)
        window = _Window(self._row_times, self.progress.step)
        while not self.progress.is_complete:
            is_told, is_due = self._ranks.any_of(stop(), due())
            if is_told:
                return False
            loss = self._step(self.progress.step)
            self.progress = replace(self.progress, step=self.progress.step + 1)
            step = self.progress.step
            if step % SHOW_EVERY == 0 or self.progress.is_complete:
                numbers = window.close(step, float(loss), self.recipe.batch_size)
                events.scalars("train", {**numbers, "lr": self._optimizer.param_groups[0]["lr"]}, step)
                if line is not None:
                    line.show(step, numbers)
            if self.progress.is_complete:
                break
            if (step - self.progress.stage_start) % look_every == 0:
                self.phases.measured("looks", look)
                self._replica.train()
            if is_due or step % self.recipe.save_every == 0:
                save()
        return True

    def _step(self, step: int) -> Tensor:
        """One update; return the loss."""
        stage = self.progress
        factor = self.recipe.rate_factor(step - stage.stage_start, stage.stage_steps)
        self._optimizer.param_groups[0]["lr"] = self.recipe.lr * factor
        self._rows.param_groups[0]["lr"] = self._row_lr * factor
        if step and self._order.epoch(step) != self._order.epoch(step - 1):
            self.head.next_epoch()  # decided by the step alone: a resumed run builds its graph when it would have
        if self.head.select.has_graph:
            self.phases.measured("graph", self.head.select.prepare)  # the head finds it done
        images, labels_B = self._batch(step)
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._bfloat16):
            features_BD = self._replica(images)
        loss: Tensor = self.head(features_BD.float(), labels_B)
        self._optimizer.zero_grad()
        self._rows.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._rows.step()
        return loss.detach()

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        """This rank's distorted images [B, K, S, S] in [0, 1] on the device, and labels [B]."""
        bitmaps, labels = self._batches.take(step)
        images, joint = bitmaps.to(self._device).float().div_(255), self.recipe.batch_size
        first = self._ranks.rank * len(labels)
        return self.recipe.augmentation.distort(images, first, joint, self.recipe.seed, step), labels

    def _own_indices(self, step: int) -> Tensor:
        """Of the images of this rank in the batch of ``step``."""
        own = self.recipe.batch_size // self._ranks.world_size
        return self._order.indices(step)[self._ranks.rank * own : (self._ranks.rank + 1) * own]

    def _imprint(self, features: nn.Module) -> None:
        part = self._images.part(self._ranks.rank, self._ranks.world_size)
        batches = part.batches(images_at_once(self._device), self._device)
        self.phases.measured("imprint", lambda: void(self.head.imprint(batches, features)))

    def _fit_projection(self, backbone: StrokeNet) -> None:
        batches = self._images.batches(images_at_once(self._device), self._device)
        fit_projection(backbone, batches, self.head.num_classes)

    def _replicate(self) -> None:
        """From here on the ranks' backbones are equal (rank 0's) and stay so."""
        if self._ranks.world_size == 1:
            return
        self._replica = DistributedDataParallel(self.backbone)
        if self._sparsifier is not None:
            self._sparsifier.attach(self._replica, self._optimizer)


class _Window:
    """The numbers of the steps since the last reading."""

    def __init__(self, row_times: RowTimes, step: int) -> None:
        self._row_times = row_times
        self._step = step
        self._open()

    def _open(self) -> None:
        self._started = time.perf_counter()
        self._pull, self._push = self._row_times.pull_seconds, self._row_times.push_seconds

    def close(self, step: int, loss: float, batch_size: int) -> dict[str, float]:
        """Numbers of the window that ends with ``step``; the next one begins."""
        steps = max(1, step - self._step)
        numbers = {
            "loss": loss,
            "samples_per_second": steps * batch_size / max(time.perf_counter() - self._started, 1e-9),
            "pull_ms": 1e3 * (self._row_times.pull_seconds - self._pull) / steps,
            "push_ms": 1e3 * (self._row_times.push_seconds - self._push) / steps,
        }
        self._step = step
        self._open()
        return numbers


def void(_: object) -> None:
    """Drop a result."""
