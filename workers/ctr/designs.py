"""Inputs of each click model: fields with embeddings, weights, histories and images, made from samples.

An id has a row in a table for each use: ``user`` (its embedding), ``user_weight`` (its weight in the linear part; if
that is a field itself, ``user_weight_``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from geartrain.ams.kernels.embedding import PoolingName
from geartrain.ams.values.errors import ConfigError
from geartrain.ams.values.optimizers.registry import Adam
from geartrain.ams.values.specs import SETTINGS
from geartrain.ams.values.text import quoted
from geartrain.bridge.embedding.field import Field, table_specs
from geartrain.bridge.embedding.group import EmbeddingGroup
from geartrain.bridge.embedding.levels import jagged_tensor
from geartrain.bridge.embedding.modes import SSP, Mode
from geartrain.bridge.models.click_model import ClickModel
from geartrain.bridge.models.crossmedia import CrossMedia
from geartrain.bridge.models.deepfm import DeepFM
from geartrain.bridge.models.dien import DIEN
from geartrain.bridge.models.din import DIN
from geartrain.bridge.models.dssm import DSSM
from geartrain.bridge.models.wide_deep import WideDeep
from geartrain.workers.ctr.recipe import CtrRecipe
from geartrain.workers.ctr.samples.click_samples import PADDING, USER, ClickSamples, SampleSchema, require_free
from geartrain.workers.ctr.samples.features import (
    HISTORY,
    HISTORY_ITEMS,
    HISTORY_OUTCOMES,
    SampleFeature,
    crossed,
    ids_by_feature,
    latest_of_bags,
)
from geartrain.workers.ctr.samples.settings import FeatureSettings
from geartrain.workers.samples.batches import SampleBatch, Values

if TYPE_CHECKING:
    from geartrain.ams.client.cluster import Cluster
    from geartrain.workers.ctr.samples.own import OwnSamples

IMAGE, HISTORY_IMAGES = "image", "history_images"


@dataclass(frozen=True, kw_only=True)
class SampleLayout:
    """Fields, schema and image width of samples: all that a network depends on."""

    fields: tuple[str, ...]
    schema: SampleSchema
    image_dim: int | None
    """Numbers of an item's image; None: no images."""

    def to_json(self) -> dict[str, Any]:
        """Return the layout as plain values."""
        return {"fields": list(self.fields), "schema": self.schema.to_json(), "image_dim": self.image_dim}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SampleLayout:
        """Return the layout of :meth:`to_json`'s values."""
        schema = SampleSchema.from_json(values["schema"])
        return cls(fields=tuple(values["fields"]), schema=schema, image_dim=values["image_dim"])


def layout_of(samples: ClickSamples | OwnSamples) -> SampleLayout:
    """Return the layout of the samples."""
    image_dim = None if samples.images is None else samples.images.dim
    return SampleLayout(fields=tuple(samples.fields), schema=samples.schema, image_dim=image_dim)


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """Inputs of a model, and its network."""

    network: Callable[[CtrRecipe, SampleLayout, dict[str, int]], ClickModel]
    weights: bool = True
    """Whether every field has weights."""
    crosses: bool = False
    """Whether the schema's crosses have weights."""
    events: bool = False
    """Whether a history is a sequence; otherwise it is pooled: the sum of its events over the root of their number."""
    images: bool = False
    unrolled: bool = False
    """Whether the network loops over a history's events: the served graph then has as many steps as the longest one."""


def _plain(model: Callable[..., ClickModel]) -> Callable[[CtrRecipe, SampleLayout, dict[str, int]], ClickModel]:
    return lambda recipe, _, dims: model(dims, recipe.hidden, dropout=recipe.dropout)


def _attentive(model: Callable[..., ClickModel]) -> Callable[[CtrRecipe, SampleLayout, dict[str, int]], ClickModel]:
    def network(recipe: CtrRecipe, layout: SampleLayout, dims: dict[str, int]) -> ClickModel:
        histories = recipe.history_columns or {HISTORY: layout.schema.item[0]}
        return model(dims, histories, recipe.hidden, dropout=recipe.dropout)

    return network


def _two_towers(recipe: CtrRecipe, layout: SampleLayout, dims: dict[str, int]) -> ClickModel:
    item = layout.schema.item
    of_user, of_item = ({name: dim for name, dim in dims.items() if (name in item) == is_} for is_ in (False, True))
    width = recipe.hidden[-1] if recipe.hidden else recipe.dim
    return DSSM(of_user, of_item, recipe.hidden, width=width, dropout=recipe.dropout)


def _with_images(recipe: CtrRecipe, layout: SampleLayout, dims: dict[str, int]) -> ClickModel:
    assert layout.image_dim is not None
    return CrossMedia(
        dims,
        image=IMAGE,
        history=HISTORY_IMAGES,
        image_dim=layout.image_dim,
        query=layout.schema.item[0],
        hidden=recipe.hidden,
        dropout=recipe.dropout,
    )


_KINDS: Mapping[str, _Kind] = {
    "deepfm": _Kind(network=_plain(DeepFM)),
    "wide_deep": _Kind(network=_plain(WideDeep), crosses=True),
    "mlp": _Kind(network=_plain(WideDeep), weights=False),
    "dssm": _Kind(network=_two_towers, weights=False),
    "din": _Kind(network=_attentive(DIN), events=True),
    "dien": _Kind(network=_attentive(DIEN), events=True, unrolled=True),
    "crossmedia": _Kind(network=_with_images, images=True),
}


class Design:
    """Map from samples of one layout to the vectors of one model."""

    def __init__(self, recipe: CtrRecipe, layout: SampleLayout) -> None:
        """Raises ConfigError if the samples lack an input of the model."""
        self.recipe = recipe
        self.layout = layout
        self._kind = kind = _KINDS[recipe.model]
        schema = layout.schema
        columns = recipe.history_columns
        needs_item = (kind.events and not columns) or kind.images or recipe.model == "dssm"
        if needs_item and not schema.item:
            raise ConfigError(f"{recipe.model} needs fields of the item; name them item and item_…, or take deepfm")
        if (kind.events or kind.images) and not recipe.history:
            raise ConfigError(f"history is 0, and {recipe.model} needs one; give --set history=20, or another model")
        if kind.images and layout.image_dim is None:
            raise ConfigError(f"{recipe.model} needs images of the items, and the samples have none; take din")
        self._require_histories(columns)
        if recipe.reads_events:
            require_free(layout.fields, (HISTORY, HISTORY_ITEMS, HISTORY_OUTCOMES))
        events = [HISTORY] if recipe.reads_events else []
        self._sequences = set(columns or events) if kind.events else set()
        names = [name for name in [*layout.fields, *([] if kind.images else events)] if name not in self._sequences]
        embedded = [*names, *(columns or events if kind.events else ())]
        self.features: tuple[SampleFeature, ...] = (
            *(self._feature(name, self._dim(name), (name,)) for name in embedded),
            *(self._feature(_free(f"{name}_weight", embedded), 1, (name,)) for name in names if kind.weights),
            *(self._feature("_x_".join(cross), 1, cross) for cross in schema.crosses if kind.crosses),
        )
        is_bag = USER in schema.kinds and schema.kinds[USER].is_list
        self.user = USER if USER in layout.fields and not is_bag else None
        """Field whose ids are users; None: there is none."""
        self.dims = {feature.name: feature.dim for feature in self.features}
        self.served: tuple[SampleFeature, ...] = (*self.features, *(self._of_images() if kind.images else ()))
        """:attr:`features`, and images: all that a service looks up."""
        self.is_unrolled = kind.unrolled

    def _of_images(self) -> tuple[SampleFeature, ...]:
        dim = self.layout.image_dim
        assert dim is not None
        own = SampleFeature(name=IMAGE, dim=dim, of=self.layout.schema.item[:1], pooling="sum", table=IMAGE)
        return own, SampleFeature(name=HISTORY_IMAGES, dim=dim, of=(HISTORY_ITEMS,), pooling=None, table=IMAGE)

    def _require_histories(self, columns: Mapping[str, str]) -> None:
        kinds = self.layout.schema.kinds
        for name, item in columns.items():
            if item not in kinds or item in columns or kinds[item].is_list:
                known = ", ".join(repr(one) for one, kind in kinds.items() if not kind.is_list) or "none"
                raise ConfigError(
                    f"features.{name}.history_of is {quoted(item)}; it must be a field of one id a sample: {known}"
                )
            own, of_item = kinds[name], kinds[item]
            if not own.is_list or (own.item, own.fold) != (of_item.item, of_item.fold):
                raise ConfigError(
                    f"features.{name}.history_of is {item!r}, whose values are {of_item}{' to fold' * of_item.fold}, "
                    f"and those of {name!r} are {own}{' to fold' * own.fold}; say lists of the same: "
                    f"--set 'features.{name}.kind=list<int64>' (or string), and hash=fold of both or of neither"
                )

    def _said(self, name: str) -> FeatureSettings:
        return self.recipe.features.get(name, FeatureSettings())

    def _dim(self, name: str) -> int:
        return self._said(name).dim or self._said(self._said(name).history_of or name).dim or self.recipe.dim

    def _feature(self, name: str, dim: int, of: tuple[str, ...]) -> SampleFeature:
        said = self._said(of[0]) if len(of) == 1 else FeatureSettings()
        pooling: PoolingName | None = said.pooling
        if of[0] in self._sequences:
            pooling = None
        elif self._is_history(of):
            pooling = "sqrtn"
        shared = said.table or (said.history_of and (self._said(said.history_of).table or said.history_of))
        table = name if shared is None else f"{shared}{name.removeprefix(of[0])}"
        latest = (self.recipe.history or None) if said.history_of else None
        return SampleFeature(name=name, dim=dim, of=of, pooling=pooling, table=table, latest=latest)

    def _is_history(self, of: Sequence[str]) -> bool:
        return self.recipe.reads_events and HISTORY in of  # else it is a field of that name

    def network(self) -> ClickModel:
        """Return the network, with fresh parameters."""
        network = self._kind.network(self.recipe, self.layout, self.dims)
        network.log_odds_shift = math.log(self.recipe.negatives)
        return network

    def fields(
        self, cluster: Cluster, job: str, *, reuse: bool, per_node: bool, altered: Collection[str] = ()
    ) -> EmbeddingGroup:
        """Return the embeddings, in tables of ``job``; ``per_node`` is the network's. With ``reuse`` the tables keep
        their settings, except for those that the ``altered`` keys of the recipe name.
        """
        optimizer = Adam(self.recipe.row_lr, weight_decay=self.recipe.row_weight_decay)
        members = [
            Field(
                one.name,
                one.dim,
                table=one.table,
                pooling=one.pooling,
                padding_id=None if self._is_history(one.of) else PADDING,
                admission=self._said(one.of[0]).admission_rule(),
                expiry=self._said(one.of[0]).expiry_rule(),
                max_bytes=self._said(one.of[0]).max_bytes,
            )
            for one in self.features
        ]
        kind, _, behind = self.recipe.mode.partition(":")
        mode: Mode = SSP(int(behind)) if kind == "ssp" else "async"
        seed = self.recipe.seed
        names = {field.table_name: f"{job}/{field.table_name}" for field in members}
        specs = table_specs(members, names, optimizer, seed)
        for one in self.features if reuse else ():
            keys = [key for key in SETTINGS if len(one.of) == 1 and f"features.{one.of[0]}.{key}" in altered]
            if keys:
                spec = specs[one.table]
                cluster.alter_table(spec.name, **{key: getattr(spec, key) for key in keys})
        return EmbeddingGroup(
            cluster, job, members, optimizer=optimizer, seed=seed, reuse=reuse, mode=mode, per_node=per_node
        )

    def ids(self, samples: ClickSamples, indices: npt.NDArray[np.int64]) -> dict[str, Any]:
        """Return the ids of the samples at ``indices``, as the embeddings take them."""
        ids: dict[str, Any] = samples.ids(indices)
        if self._is_history(tuple(self.dims)):
            assert samples.histories is not None
            places, offsets = samples.histories.take(indices)
            ids[HISTORY] = (crossed(samples.histories.items[places], samples.histories.outcomes[places]), offsets)
        return ids_by_feature(self.features, ids)

    def ids_of(self, batch: SampleBatch) -> SampleBatch:
        """Return the ids of a batch of files, as the embeddings take them."""
        columns = {feature.name: _latest(batch[feature.of[0]], feature.latest) for feature in self.features}
        levels = {feature.name: batch.level_of.get(feature.of[0]) for feature in self.features}
        level_of = {name: level for name, level in levels.items() if level is not None}
        return SampleBatch(columns, batch.num_samples, batch.cursors, level_of, batch.nodes)

    def images(self, samples: ClickSamples, indices: npt.NDArray[np.int64]) -> dict[str, Tensor]:
        """Return the images of the samples at ``indices``, by the network's input; empty if it uses none."""
        if not self._kind.images:
            return {}
        assert samples.images is not None and samples.histories is not None
        places, offsets = samples.histories.take(indices)
        seen = torch.from_numpy(samples.images.of(samples.histories.items[places]))
        return {
            IMAGE: torch.from_numpy(samples.images.of(samples.fields[self.layout.schema.item[0]][indices])),
            HISTORY_IMAGES: jagged_tensor(seen, torch.from_numpy(offsets)),
        }


def _latest(values: Values, count: int | None) -> Values:
    """Return the last ``count`` ids of each list; None: all."""
    if count is None:
        return values
    if isinstance(values, Tensor):  # lists of one length
        values = values.flatten(), torch.arange(len(values) + 1) * values.shape[1]
    ids, offsets = latest_of_bags(values[0].numpy(), values[1].numpy(), count)
    return torch.from_numpy(ids), torch.from_numpy(offsets)


def _free(name: str, taken: Sequence[str]) -> str:
    while name in taken:
        name += "_"
    return name
