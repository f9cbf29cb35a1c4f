"""Recipes of models with embeddings, among them click models: values only."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from geartrain.ams.values.errors import ConfigError
from geartrain.ams.values.text import quoted
from geartrain.workers.ctr.samples.click_samples import SPLITS
from geartrain.workers.ctr.samples.settings import FeatureSettings, FileSettings, KafkaSettings
from geartrain.workers.job.keys import recipe_of
from geartrain.workers.job.options import ENDLESS, SnapshotSettings

MODELS = ("deepfm", "wide_deep", "mlp", "dssm", "din", "dien", "crossmedia")


@dataclass(frozen=True, kw_only=True)
class EmbeddingRecipe:
    """Training settings of a network with embeddings, without the cluster's."""

    split: str = "random"
    dim: int = 16
    """Width of embeddings."""
    hidden: tuple[int, ...] = (64, 32)
    dropout: float = 0.2
    history: int = 0
    """Number of latest events of a sample's user before it, or of the lists that ``features`` call histories; 0: no
    history, or the whole lists."""
    batch_size: int = 500
    row_lr: float = 0.003
    """Peak learning rate of the rows, by Adam."""
    row_weight_decay: float = 0.001
    """Weight decay of the rows that a step touches, added to their gradient."""
    lr: float = 0.003
    """Peak learning rate of the network, by Adam."""
    seed: int = 0
    files: FileSettings = field(default_factory=FileSettings)
    """Format of one's own CSV files."""
    fold: tuple[str, ...] = ()
    """Fields of one's own samples with any 64-bit integers, such as hashes; see ``gt.fold_ids``."""
    private: tuple[str, ...] = ()
    """Fields without examples on the page to try the model; see :mod:`.samples.examples`."""
    snapshots: SnapshotSettings = field(default_factory=SnapshotSettings)
    least: ClassVar[Mapping[str, int]] = {"dim": 2, "history": 0, "batch_size": 1, "steps": 1}

    def __post_init__(self) -> None:
        """Raises ConfigError that names the value."""
        if self.split not in SPLITS:
            raise ConfigError(f"split is {quoted(self.split)}; it must be one of {', '.join(SPLITS)}")
        for name, least in self.least.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value!r}; it must be at least {least}")
        for name in ("lr", "row_lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be > 0")
        if not 0 <= self.row_weight_decay < math.inf:
            raise ConfigError(f"row_weight_decay is {self.row_weight_decay!r}; it must be >= 0")
        if not 0 <= self.seed < 2**31:
            raise ConfigError(f"seed is {self.seed!r}; it must lie in [0, 2^31)")

    def rate_factor(self, step: int, steps: int) -> float:
        """Return the factor of both learning rates at ``step`` (from 0) of a stage of ``steps``: half a cosine."""
        return 0.5 * (1 + math.cos(math.pi * step / steps))


@dataclass(frozen=True, kw_only=True)
class CtrRecipe(EmbeddingRecipe):
    """Training settings of a click model."""

    model: str = "deepfm"
    mode: str = "sync"
    """"sync": one worker. "async": several workers share the samples without waiting for each other, and all parameters
    are in the cluster. "ssp:N": as async, but a worker waits for those more than N steps behind."""
    epochs: float = 3.0
    """Passes over the training samples in a stage."""
    steps: int | None = None
    """Most steps of a stage; None: by ``epochs``."""
    patience: int = 3
    """Validations in a row, of ten in a stage, without a better one, after which the stage ends early; 0: never."""
    validation: bool = False
    """Test on a fifth of the training samples, split off in the same way, and ignore those held out: to choose settings
    by."""
    fresh: bool = False
    """Whether histories of samples held out by time include earlier samples that are held out, too."""
    negatives: float = 1.0
    """Part of the samples without a click to train on, chosen by a hash of the sample; scores correct for it."""
    progressive: int = 0
    """Number of latest samples, scored before they are trained on, that measure the model; 0: none."""
    features: Mapping[str, FeatureSettings] = field(default_factory=dict)
    """Settings of columns of one's own samples, by name; the others are inferred."""
    kafka: KafkaSettings = field(default_factory=KafkaSettings)
    """Settings of reading a topic."""
    prefetch: int = 0
    """Batches that are read, and their rows pulled, during the training of the one before. It pays where cores are idle
    or the shards are on other machines; 0: none."""
    held_out: int = 160_000
    """Most of one's own samples that are held out; a fifth if there are fewer than five times as many."""
    window_rows: int = 65_536
    """Size of the windows in which one's own samples are shuffled."""
    least: ClassVar[Mapping[str, int]] = {
        **EmbeddingRecipe.least,
        "held_out": 1,
        "window_rows": 1,
        "progressive": 0,
        "prefetch": 0,
    }

    def __post_init__(self) -> None:
        """Raises ConfigError that names the value."""
        if self.model not in MODELS:
            raise ConfigError(f"model is {quoted(self.model)}; it must be one of {', '.join(MODELS)}")
        if not re.fullmatch(r"sync|async|ssp:\d{1,9}", self.mode):
            raise ConfigError(f"mode is {quoted(self.mode)}; it must be sync, async, or ssp:N, such as ssp:3")
        if not 0 < self.epochs < math.inf:
            raise ConfigError(f"epochs is {self.epochs!r}; it must be > 0")
        if not 0 < self.negatives <= 1:
            raise ConfigError(f"negatives is {self.negatives!r}; it must lie in (0, 1], as 0.1 for every tenth")
        if self.patience < 0:
            raise ConfigError(f"patience is {self.patience!r}; it must be >= 0")
        super().__post_init__()
        if self.prefetch and self.shares:
            raise ConfigError(
                f"prefetch is {self.prefetch} and mode is {self.mode}, in which idle cores are for further workers "
                "(--join RUN): leave prefetch out, or take mode=sync"
            )

    @property
    def history_columns(self) -> dict[str, str]:
        """Columns whose lists are histories, with the field of each."""
        return {name: said.history_of for name, said in self.features.items() if said.history_of is not None}

    @property
    def reads_events(self) -> bool:
        """Whether histories are built from the samples themselves."""
        return self.history > 0 and not self.history_columns

    @property
    def shares(self) -> bool:
        """Whether further workers may join."""
        return self.mode != "sync"

    def rate_factor(self, step: int, steps: int) -> float:
        """Return 1 if workers share the samples, as their number of steps is unknown; otherwise half a cosine."""
        return 1.0 if self.shares else super().rate_factor(step, steps)

    def stage_steps(self) -> int:
        """Return the steps of one stage; 0: by ``epochs``."""
        return self.steps or (ENDLESS if self.shares else 0)


_Choice = Mapping[str, object]
_PRESETS: tuple[tuple[_Choice, Mapping[str, Any]], ...] = (
    ({"model": "din"}, {"history": 100}),
    ({"model": "dien"}, {"history": 20}),
    ({"model": "crossmedia"}, {"history": 10}),
    ({"data": "movielens"}, {"epochs": 6.0}),
    # Chosen with validation=true, not by the samples held out.
    (
        {"data": "movielens", "model": "deepfm", "split": "random"},
        {"dim": 32, "history": 300, "row_weight_decay": 0.0003, "row_lr": 0.005},
    ),
    ({"data": "movielens", "model": "deepfm", "split": "time"}, {"dim": 32, "row_lr": 0.01}),
    (
        {"data": "movielens", "model": "deepfm", "split": "time", "fresh": True},
        {"history": 300, "row_weight_decay": 0.0003, "row_lr": 0.005},
    ),
    ({"data": "flights"}, {"batch_size": 4096, "epochs": 12.0, "dropout": 0.0}),
)
"""Conditions, and the settings that differ from the recipe's where they all hold; later entries take precedence."""


def usual_for(data: str | None, stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from the recipe's for a model on ``data``, given what is ``stated``."""
    usual: dict[str, Any] = {"model": CtrRecipe.model, "split": "time" if data == "flights" else CtrRecipe.split}
    known = {**usual, **stated, "data": data}
    for where, differs in _PRESETS:
        if all(known.get(name) == value for name, value in where.items()):
            usual.update(differs)
    return usual


def recipe_for(data: str | None, **stated: Any) -> CtrRecipe:
    """Return the recipe of a model on ``data``, with the ``stated`` settings. Raises ConfigError."""
    return recipe_of(CtrRecipe, {**usual_for(data, stated), **stated})
