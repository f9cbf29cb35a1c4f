"""What a click model is made of and how it is trained: values only."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from geartrain.ams.kernels.ops import splitmix64
from geartrain.ams.values.errors import ConfigError
from geartrain.ams.values.optimizers.registry import Adam
from geartrain.ams.values.specs import Ids
from geartrain.ams.values.text import quoted
from geartrain.bridge.embedding.field import Field
from geartrain.bridge.embedding.group import EmbeddingGroup
from geartrain.bridge.models.deepfm import DeepFM
from geartrain.bridge.models.wide_deep import WideDeep
from geartrain.workers.ctr.samples import PADDING, SPLITS, ClickSamples

if TYPE_CHECKING:
    from geartrain.ams.client.cluster import Cluster

MODELS: dict[str, Callable[..., nn.Module]] = {"deepfm": DeepFM, "wide_deep": WideDeep}
CROSSES: dict[str, tuple[tuple[str, str], ...]] = {"deepfm": (), "wide_deep": (("occupation", "genres"),)}
"""By model, the pairs of fields that have weights of their own. The second may be a bag."""


@dataclass(frozen=True, kw_only=True)
class CtrRecipe:
    """Settings of a training, all but where it runs."""

    model: str = "deepfm"
    split: str = "random"
    dim: int = 16
    """Width of embeddings."""
    hidden: tuple[int, ...] = (64, 32)
    dropout: float = 0.2
    batch_size: int = 500
    steps: int = 960
    """Of a stage."""
    row_lr: float = 0.003
    """Peak learning rate of the rows, by Adam."""
    row_weight_decay: float = 0.001
    """Of the rows that a step touches, added to their gradient."""
    lr: float = 0.003
    """Peak learning rate of the network, by Adam."""
    seed: int = 0
    save_every: int = 200
    """Steps between snapshots."""

    def __post_init__(self) -> None:
        """Raises ConfigError that names the value."""
        if self.model not in MODELS:
            raise ConfigError(f"model is {quoted(self.model)}; it must be one of {', '.join(MODELS)}")
        if self.split not in SPLITS:
            raise ConfigError(f"split is {quoted(self.split)}; it must be one of {', '.join(SPLITS)}")
        for name, least in {"dim": 2, "batch_size": 1, "steps": 1, "save_every": 1}.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be at least {least}")
        for name in ("lr", "row_lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be > 0")
        if not 0 <= self.seed < 2**31:
            raise ConfigError(f"seed is {self.seed!r}; it must lie in [0, 2^31)")

    def rate_factor(self, step: int, steps: int) -> float:
        """What both learning rates are multiplied by at ``step`` (from 0) of a stage of ``steps``: half a cosine."""
        return 0.5 * (1 + math.cos(math.pi * step / steps))

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "hidden": list(self.hidden)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> CtrRecipe:
        """The recipe that :meth:`to_json` wrote. Raises ConfigError for fields this version does not know."""
        if unknown := set(values) - {known.name for known in fields(cls)}:
            raise ConfigError(
                f"the saved recipe has unknown fields {sorted(unknown)}; was it saved by a newer version?"
            )
        return cls(**{**values, "hidden": tuple(values["hidden"])})


def with_weights(samples: ClickSamples, recipe: CtrRecipe) -> ClickSamples:
    """``samples`` with, for every field and cross of the model, a field that its weight is looked up by."""
    weights = {f"{name}_weight": ids for name, ids in samples.fields.items()}
    for first, second in CROSSES[recipe.model]:
        weights[f"{first}_x_{second}"] = crossed(samples.fields[first], samples.fields[second])
    return ClickSamples({**samples.fields, **weights}, samples.clicks, samples.times)


def crossed(first: Ids, second: Ids) -> Ids:
    """An id below 2^63 for each pair of ``first`` [N] and ``second`` [N] or [N, L]; padding of ``second`` stays."""
    left = first if second.ndim == 1 else first[:, None]
    pairs: Ids = (splitmix64(splitmix64(left) ^ second.view(np.uint64)) >> np.uint64(1)).view(np.int64)
    return np.where(second == PADDING, PADDING, pairs)


def dims_of(recipe: CtrRecipe, names: list[str]) -> dict[str, int]:
    """The width of every field of :func:`with_weights`."""
    return {name: 1 if name.endswith("_weight") or "_x_" in name else recipe.dim for name in names}


def fields_of(recipe: CtrRecipe, names: list[str], cluster: Cluster, job: str, *, reuse: bool) -> EmbeddingGroup:
    """The embeddings, in tables of ``job``."""
    members = [Field(name, dim, pooling="mean", padding_id=PADDING) for name, dim in dims_of(recipe, names).items()]
    optimizer = Adam(recipe.row_lr, weight_decay=recipe.row_weight_decay)
    return EmbeddingGroup(cluster, job, members, optimizer=optimizer, seed=recipe.seed, reuse=reuse)


def network_of(recipe: CtrRecipe, names: list[str]) -> nn.Module:
    """The network over their vectors."""
    return MODELS[recipe.model](dims_of(recipe, names), recipe.hidden, dropout=recipe.dropout)
