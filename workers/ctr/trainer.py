"""Training of models over embeddings: the network in this process, its rows in a cluster. Here click models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from torch import Tensor

from geartrain.ams.values.text import counted
from geartrain.bridge.embedding.group import EmbeddingGroup
from geartrain.bridge.models.click_model import ClickModel
from geartrain.bridge.rows.optimizer import RowOptimizer
from geartrain.bridge.rows.tables import counted_as
from geartrain.workers.ctr.designs import Design, layout_of
from geartrain.workers.ctr.metrics import draw_calibration, measured
from geartrain.workers.ctr.recipe import CtrRecipe, usual_for
from geartrain.workers.ctr.samples.click_samples import ClickSamples, split
from geartrain.workers.ctr.samples.kinds import kinds_from_json
from geartrain.workers.ctr.samples.sources import found_again, load_samples
from geartrain.workers.job.options import JobOptions
from geartrain.workers.job.state import JobState
from geartrain.workers.job.trainer import Attempt, Trainer

_AT_ONCE = 4096


class EmbeddingTrainer(Trainer):
    """Trains a network and the embeddings before it on samples of users and items."""

    def __init__(
        self, attempt: Attempt, source: str, num_samples: int, network: ClickModel, fields: EmbeddingGroup
    ) -> None:
        self.attempt = attempt
        self.cluster = attempt.cluster
        self.source = source
        self.network = network
        self.fields = fields
        recipe = attempt.options.recipe
        optimizer = torch.optim.Adam(network.parameters(), lr=recipe.lr)
        super().__init__(recipe, num_samples, optimizer, RowOptimizer(fields), attempt.progress)

    @staticmethod
    def load(options: JobOptions, state: JobState | None, console: Console) -> tuple[str, ClickSamples]:
        """The samples, and where they are."""
        source = options.data or (None if state is None else state.data["source"])
        kinds = None if state is None else kinds_from_json(state.data.get("schema", {}).get("kinds"))
        samples = load_samples(source, options.cache, lambda line: console.print(line, highlight=False), kinds)
        return found_again(str(source)), samples

    def modules(self) -> dict[str, Any]:
        """Network and embeddings."""
        return {"network": self.network, "fields": self.fields}

    def data(self) -> dict[str, Any]:
        """Where the samples are."""
        return {"source": self.source}

    def tables(self) -> list[str]:
        """Those of the embeddings."""
        return [spec.name for part in self.fields.trained for spec in part.row_placement.specs()]

    def rates(self) -> dict[str, float]:
        """Those of network and rows."""
        return {"lr": self.recipe.lr, "row_lr": self.recipe.row_lr}


class ClickTrainer(EmbeddingTrainer):
    """Trains a model of clicks."""

    job = "ctr"
    recipe_class = CtrRecipe

    def __init__(self, attempt: Attempt, data: tuple[str, ClickSamples]) -> None:
        source, samples = data
        recipe: CtrRecipe = attempt.options.recipe
        self.design = design = Design(recipe, layout_of(samples))
        self._train, self.test = split(
            samples,
            recipe.split,
            recipe.seed,
            history=recipe.history,
            fresh=recipe.fresh,
            validation=recipe.validation,
        )
        assert attempt.cluster is not None
        torch.manual_seed(recipe.seed)
        network = design.network()
        fields = design.fields(attempt.cluster, attempt.progress.table, reuse=attempt.state is not None)
        super().__init__(attempt, source, len(self._train), network, fields)

    @classmethod
    def usual_recipe(cls, data: str | None, stated: Mapping[str, Any]) -> dict[str, Any]:
        """What differs for known data and models."""
        return usual_for(data, stated)

    def data(self) -> dict[str, Any]:
        """Where the samples are, and what they have (``SampleLayout``)."""
        return {**super().data(), **self.design.layout.to_json()}

    def start(self, stop: Callable[[], bool]) -> None:
        """Say what begins."""
        del stop
        what = "of the training part are kept to choose by" if self.recipe.validation else "are held out"
        counts = f"{counted(len(self._train), 'sample')}; {len(self.test):,} {what}"
        self.attempt.say(f"Training {self.recipe.model} on {counts} ({self.recipe.split})")

    def run(self, **settings: Any) -> bool:
        self.network.train()
        return super().run(**settings)

    def loss(self, step: int) -> Tensor:
        """The loss of the batch of ``step``."""
        indices = self.order.indices(step).numpy()
        with counted_as("pull"):
            vectors = self.fields(self.design.ids(self._train, indices))
        clicks_B = torch.from_numpy(self._train.clicks[indices])
        loss: Tensor = self.network({**vectors, **self.design.images(self._train, indices)}, clicks_B)
        return loss

    def predict(self) -> npt.NDArray[np.float64]:
        """The probability of a click [N] of the samples held out."""
        return click_probabilities(self.design, self.network, self.fields, self.test)

    def report(self) -> dict[str, Any]:
        """AUC, log loss and calibration on what is held out."""
        recipe, out = self.recipe, self.attempt.options.out
        found = measured(self.predict(), self.test.clicks)
        self.events.scalars("held_out", {name: found[name] for name in ("auc", "log_loss")}, self.progress.step)
        title = f"{recipe.model}, {recipe.split} split: AUC {found['auc']:.4f}, log loss {found['log_loss']:.4f}"
        draw_calibration(out / "calibration.png", found["calibration"], title)
        what = "Validation" if recipe.validation else "Held out"
        self.attempt.say(
            f"{what}: AUC {found['auc']:.4f}, log loss {found['log_loss']:.4f} "
            f"({found['log_loss_of_the_mean']:.4f} for the mean click rate), {counted(found['samples'], 'sample')}"
        )
        return {"held_out": found}

    def conclude(self) -> str:
        """What the run folder has."""
        return "Snapshots, report and calibration.png"


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
    probabilities: npt.NDArray[np.float64] = torch.cat([torch.empty(0), *parts]).double().sigmoid().numpy()
    return probabilities
