"""Loading of a saved model into a module of the same structure (``gt.load``)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from geartrain.ams.storage.snapshot.folder import Snapshot
from geartrain.ams.values.arguments import boolean
from geartrain.ams.values.errors import InvalidArgument, SpecMismatch, TableExists
from geartrain.ams.values.specs import TableSpec
from geartrain.ams.values.text import quoted
from geartrain.bridge.checkpoint.folder import ModelRecord, model_folder, open_rows, read_record, read_state
from geartrain.bridge.checkpoint.modules_with_rows import (
    PlainNames,
    group_of,
    placements_of,
    require_between_steps,
    together,
)
from geartrain.bridge.checkpoint.rank_rows import DividedRows, state_like
from geartrain.bridge.checkpoint.warm_start import CommonParts, adopt_states, common_parts, restore_tables
from geartrain.bridge.placements.placement import Placement
from geartrain.bridge.rows.optimizer import HoldsRows, RowOptimizer
from geartrain.bridge.rows.serialization import ShardedTensorRef

logger = logging.getLogger(__name__)

_REMEDY = "Make the model like the saved one, or take what both have: load(..., strict=False)"


def load(
    model: nn.Module,
    path: str | Path,
    *,
    state: Mapping[str, Any] | None = None,
    replace: bool = False,
    strict: bool = True,
) -> dict[str, Any]:
    """Read what :func:`save` wrote to ``path`` into ``model``; return the plain values of its ``state``.

    ``model`` has the structure of the saved one: the same modules and parameters, tables of the same names and
    settings. Rows, with their slots, go to the model's placement: a cluster of any number of shards, or any number of
    ranks, whether a cluster or ranks saved them. Training continues as without the interruption. A model of
    :func:`geartrain.parallelize` may have other scopes and any number of ranks, or be the plain one; an optimizer's
    state is divided as its parameters are, and each rank reads its own rows. Where ranks train together, every rank
    calls it.

    Args:
        model: A module; wrappers of DistributedDataParallel, torch.compile and geartrain.parallelize are ignored.
        path: The folder.
        state: Objects with ``load_state_dict()``, by the names they were saved under; other names are not loaded.
        replace: True: also load if rows of the model were trained since their tables were created; they are lost.
        strict: False: the model may have other fields and layers than the saved one (a warm start). Tables and tensors
            that both have, tensors of the same shape, are loaded; new ones keep their values, and a warning names them
            and what was left out. ``state`` of an optimizer fits only the parameters that it was saved with.

    Raises:
        ConfigError: No model was saved there.
        ModelDamaged, SnapshotDamaged: A file is missing or changed; the error names it.
        SpecMismatch: The model has other modules, parameters or tables, or an optimizer of ``state`` other groups;
            nothing was changed. If not ``strict``: a table has other settings, or the two have nothing in common.
        TableExists: Rows were trained and ``replace`` is False; nothing was changed.
        InvalidArgument: Gradients wait for a step, ``state`` has a name that was not saved, or an optimizer trains rows
            of other tables. If not ``strict``: tables of two clusters share a name.
        ShardUnavailable, SyncError: A shard was lost, or another rank failed: load again, with ``replace``, as rows may
            have been loaded already.
    """
    folder, placements = model_folder(path), placements_of(model)
    group = group_of(model, placements, state)
    what = f"the model of {folder} was not loaded"
    loading = _Loading(folder, model, placements, state or {}, replace=replace, strict=boolean("strict", strict))
    saved = together(group, loading.read, what)
    for rows in saved.record.rows:
        here = [placements[name] for name in rows.modules if name in placements]
        if saved.common is not None:
            restore_tables(folder / rows.folder, saved.common.tables[rows.folder], placements.values(), group, what)
            continue
        for placement in here:
            if placement.cluster is None:
                placement.restore(folder / rows.folder)
        names = [spec.name for placement in here for spec in placement.specs()]
        restore_tables(folder / rows.folder, names, here, group, what)
    together(group, partial(loading.fill, saved), what)
    for placement in placements.values():
        placement.resume()
    rows_of_ranks = DividedRows(folder, saved.record.pieces)
    for name, item in loading.state.items():
        item.load_state_dict(state_like(item, saved.content["objects"][name], rows_of_ranks))
    values: dict[str, Any] = rows_of_ranks.whole(saved.content["values"])
    return values


class _Saved(NamedTuple):
    record: ModelRecord
    content: Any
    common: CommonParts | None
    """Tables and tensors of both models, in a warm start."""


@dataclass(frozen=True)
class _Loading:
    """One rank's part of a load, without the rows."""

    folder: Path
    model: nn.Module
    placements: Mapping[str, Placement]
    state: Mapping[str, Any]
    replace: bool = field(kw_only=True)
    strict: bool = field(kw_only=True)

    @cached_property
    def _plain(self) -> PlainNames:
        return PlainNames(self.model)

    def read(self) -> _Saved:
        """Read all but the rows and check that it fits; change nothing."""
        require_between_steps(self.model)
        record = read_record(self.folder)
        content = read_state(self.folder, record)
        common = None
        if self.strict:
            self._require_same(record, content["model"])
        else:
            common = common_parts(self.folder, record, content["model"], self.model, self.placements, self._plain)
        _require_objects(self.folder, content, self.state)
        _require_replaceable(self.folder, self.placements, boolean("replace", self.replace))
        return _Saved(record, content, common)

    def _require_same(self, record: ModelRecord, tensors: Mapping[str, Any]) -> None:
        _require_same_modules(self.folder, record, self.placements)
        _require_same_tensors(self.folder, tensors, self.model, self._plain)
        for name, placement in self.placements.items():
            if isinstance(extra := tensors.get(f"{name}._extra_state".removeprefix(".")), Mapping):
                placement.require_state(extra)
        for rows in record.rows:
            _require_same_tables(open_rows(self.folder, rows), [self.placements[name] for name in rows.modules])

    def fill(self, saved: _Saved) -> None:
        """Load graphs and tensors into the model."""
        tensors, common = saved.content["model"], saved.common
        rows_of_ranks = DividedRows(self.folder, saved.record.pieces)
        here = self.model.state_dict(keep_vars=True)
        for name, graph in saved.content["graphs"].items():
            if common is None or name in common.unchanged:
                self.placements[name].load_graph(graph, rows_of_ranks.some)
        if common is None:
            self.model.load_state_dict(
                {name: rows_of_ranks.like(value, tensors[self._plain(name)]) for name, value in here.items()}
            )
            return
        found = {name: rows_of_ranks.like(here[name], value) for name, value in common.tensors.items()}
        self.model.load_state_dict(found, strict=False)
        adopt_states(saved.record, tensors, self.placements, common)
        if common.new or common.left_out:
            logger.warning("of the model in %s: %s", self.folder, common)


def _require_replaceable(folder: Path, placements: Mapping[str, Placement], replace: bool) -> None:
    for name, placement in placements.items():
        placement.require_loadable()
        if not replace and placement.is_trained():
            raise TableExists(
                f"rows of module {name!r} (table {placement.specs()[0].name!r}) were trained here since the table was "
                f"made, and {folder} holds others; load(..., replace=True) puts those in their place"
            )


def _require_same_modules(folder: Path, record: ModelRecord, placements: Mapping[str, Placement]) -> None:
    mine = {name: [spec.name for spec in placement.specs()] for name, placement in placements.items()}
    for name, tables in record.modules.items():
        if name not in mine:
            raise SpecMismatch(
                f"{folder} holds rows of module {name!r} (tables {tables}), which this model has not; its modules with "
                f"rows: {_listed(mine)}. {_REMEDY}"
            )
        if mine[name] != tables:
            raise SpecMismatch(
                f"module {name!r} has tables {mine[name]}, the saved one {tables}; give it the saved name and fields, "
                "or take what both have: load(..., strict=False)"
            )
    for name in mine:
        if name not in record.modules:
            raise SpecMismatch(
                f"{folder} holds no rows of module {name!r} (tables {mine[name]}); it was saved with: "
                f"{_listed(record.modules)}. {_REMEDY}"
            )


def _listed(modules: Mapping[str, list[str]]) -> str:
    return ", ".join(f"{name!r} ({', '.join(tables)})" for name, tables in modules.items()) or "none"


def _require_same_tensors(folder: Path, saved: Mapping[str, Any], model: nn.Module, plain: PlainNames) -> None:
    """Raise SpecMismatch unless ``load_state_dict`` will find all it needs, and nothing else."""
    mine = {plain(name): value for name, value in model.state_dict(keep_vars=True).items()}
    for names, whose in ((set(saved) - set(mine), f"{folder}"), (set(mine) - set(saved), "this model")):
        if names:
            raise SpecMismatch(f"{whose} alone has {', '.join(sorted(names)[:5])}. {_REMEDY}")
    for name, value in saved.items():
        here = mine[name]
        if (
            not isinstance(value, Tensor | ShardedTensorRef)
            or not isinstance(here, Tensor)
            or nn.parameter.is_lazy(here)
        ):
            continue
        if tuple(value.shape) != tuple(here.shape):
            raise SpecMismatch(
                f"{name!r} of {folder} has shape {list(value.shape)}, that of this model {list(here.shape)}. {_REMEDY}"
            )


def _require_objects(folder: Path, content: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    for name, item in state.items():
        if name not in content["objects"]:
            raise InvalidArgument(
                f"{folder} holds no state of {name!r}; it was saved with state of {sorted(content['objects'])} and the "
                f"values {sorted(content['values'])}, which load returns"
            )
        if not hasattr(item, "load_state_dict"):
            raise InvalidArgument(f"state[{name!r}] is {quoted(item)}; it must have load_state_dict()")
        if hasattr(item, "param_groups") and "param_groups" in content["objects"][name]:
            _require_same_groups(f"optimizer {name!r} of {folder}", content["objects"][name]["param_groups"], item)


def _require_same_groups(what: str, saved: list[dict[str, Any]], optimizer: Any) -> None:
    """Raise SpecMismatch or InvalidArgument for groups that ``load_state_dict`` refuses after the rows are loaded."""
    there, here = (sorted(len(group["params"]) for group in groups) for groups in (saved, optimizer.param_groups))
    if there != here:
        raise SpecMismatch(
            f"{what} has param_groups of {there} parameters, the one to load of {here}; make it like the saved one, or "
            "load without its state; nothing was changed"
        )
    rows = optimizer.rows if isinstance(optimizer, HoldsRows) else optimizer
    if isinstance(rows, RowOptimizer):
        rows.split_saved(saved)


def _require_same_tables(snapshot: Snapshot, placements: list[Placement]) -> None:
    saved = {spec.name: spec for spec in map(TableSpec.from_dict, snapshot.manifest.tables)}
    for spec in (spec for placement in placements for spec in placement.specs()):
        found = saved[spec.name]
        if not (other := found.fixed_unlike(spec)):
            continue
        raise SpecMismatch(
            f"table {spec.name!r} of the saved model differs from this one's: {other}. "
            f"{_remedy(found, spec)}; nothing was changed"
        )


def _remedy(saved: TableSpec, mine: TableSpec) -> str:
    """Return the remedy for different specs, in terms of a head's arguments."""
    remedies = ["Make it with the saved settings"]
    if saved.num_rows != mine.num_rows:
        remedies.append(
            "num_rows is a head's num_classes; for more classes than were saved, geartrain.import_class_weights brings "
            "the exported rows into a larger head"
        )
    if saved.dim != mine.dim:
        remedies.append("dim is a head's dim, and one more with bias=True")
    return "; ".join(remedies)
