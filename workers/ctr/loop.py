"""The training loop of a click model: its network in this process, its rows in a cluster.

Everything random is a function of (seed, step), so that a resumed run goes on as if it had never stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from geartrain.bridge.embedding.group import EmbeddingGroup
from geartrain.bridge.models.click_model import ClickModel
from geartrain.bridge.rows.optimizer import RowOptimizer
from geartrain.bridge.rows.state import random_state, set_random_state
from geartrain.workers.ctr.designs import Design
from geartrain.workers.ctr.samples.click_samples import ClickSamples
from geartrain.workers.ctr.state import CtrState
from geartrain.workers.data.streams import JointOrder
from geartrain.workers.job.live import LiveLine
from geartrain.workers.job.state import Progress
from geartrain.workers.loggers.protocol import Loggers

SHOW_EVERY = 20
"""Steps between two lines of numbers."""
_AT_ONCE = 4096
_HOST = torch.device("cpu")


class CtrTrainer:
    """Trains a network and the embeddings before it on click samples."""

    def __init__(
        self, design: Design, network: ClickModel, fields: EmbeddingGroup, train: ClickSamples, progress: Progress
    ) -> None:
        self.recipe = recipe = design.recipe
        self.design = design
        self.network = network
        self.fields = fields
        self.progress = progress
        self.train_seconds = 0.0
        self._train = train
        self._order = JointOrder(len(train), recipe.batch_size, recipe.seed)
        self._optimizer = torch.optim.Adam(network.parameters(), lr=recipe.lr)
        self._rows = RowOptimizer(fields)
        self._pull_seconds = self._push_seconds = 0.0

    def restore(self, state: CtrState) -> None:
        """Go on from a state whose rows are in place already. Raises ConfigError if it is that of other samples."""
        self._order.require(state.cursor, state.progress.step)
        self.network.load_state_dict(state.network)
        self._optimizer.load_state_dict(state.optimizer)
        self.fields.load_state_dict(state.fields)
        set_random_state(state.random, _HOST)

    def state(self, data: dict[str, object]) -> CtrState:
        """Everything but the rows, between two steps."""
        return CtrState(
            recipe=self.recipe,
            progress=self.progress,
            cursor=self._order.cursor(self.progress.step),
            data=data,
            network=self.network.state_dict(),
            optimizer=self._optimizer.state_dict(),
            fields=self.fields.state_dict(),
            random=random_state(_HOST),
        )

    def run(
        self,
        *,
        stop: Callable[[], bool],
        due: Callable[[], bool],
        save: Callable[[], None],
        line: LiveLine,
        events: Loggers,
    ) -> bool:
        """Train to the end of the stage; return False if ``stop`` ended it before.

        ``save`` runs between steps: every ``recipe.save_every``, and when one is ``due``.
        """
        self.network.train()
        window, since = time.perf_counter(), self.progress.step
        while not self.progress.is_complete:
            if stop():
                return False
            started = time.perf_counter()
            loss = self._step(self.progress.step)
            self.train_seconds += time.perf_counter() - started
            self.progress = replace(self.progress, step=self.progress.step + 1)
            step = self.progress.step
            if step % SHOW_EVERY == 0 or self.progress.is_complete:
                steps, seconds = step - since, max(time.perf_counter() - window, 1e-9)
                numbers = {
                    "loss": float(loss),
                    "samples_per_second": steps * self.recipe.batch_size / seconds,
                    "pull_ms": 1e3 * self._pull_seconds / steps,
                    "push_ms": 1e3 * self._push_seconds / steps,
                }
                events.scalars("train", {**numbers, "lr": self._optimizer.param_groups[0]["lr"]}, step)
                line.show(step, numbers)
                window, since = time.perf_counter(), step
                self._pull_seconds = self._push_seconds = 0.0
            if (step % self.recipe.save_every == 0 or due()) and not self.progress.is_complete:
                save()
        return True

    def _step(self, step: int) -> Tensor:
        """One update; return the loss."""
        factor = self.recipe.rate_factor(step - self.progress.stage_start, self.progress.stage_steps)
        self._optimizer.param_groups[0]["lr"] = self.recipe.lr * factor
        for group in self._rows.param_groups:
            group["lr"] = self.recipe.row_lr * factor
        indices = self._order.indices(step).numpy()
        started = time.perf_counter()
        vectors = self.fields(self.design.ids(self._train, indices))
        self._pull_seconds += time.perf_counter() - started
        clicks_B = torch.from_numpy(self._train.clicks[indices])
        loss: Tensor = self.network({**vectors, **self.design.images(self._train, indices)}, clicks_B)
        self._optimizer.zero_grad()
        self._rows.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        started = time.perf_counter()
        self._rows.step()
        self._push_seconds += time.perf_counter() - started
        return loss.detach()

    def predict(self, samples: ClickSamples) -> npt.NDArray[np.float64]:
        """The probability of a click [N]."""
        return click_probabilities(self.design, self.network, self.fields, samples)


def click_probabilities(
    design: Design, network: ClickModel, fields: EmbeddingGroup, samples: ClickSamples
) -> npt.NDArray[np.float64]:
    """The probability of a click [N], float64. The network stays in the mode it was in."""
    was_training = network.training
    network.eval()
    parts = []
    try:
        with torch.no_grad():
            for first in range(0, len(samples), _AT_ONCE):
                indices = np.arange(first, min(first + _AT_ONCE, len(samples)))
                parts.append(network({**fields(design.ids(samples, indices)), **design.images(samples, indices)}))
    finally:
        network.train(was_training)
    probabilities: npt.NDArray[np.float64] = torch.cat(parts).double().sigmoid().numpy()
    return probabilities
