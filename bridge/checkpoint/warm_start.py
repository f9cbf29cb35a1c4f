"""Warm start of a model from a saved one of other fields or layers: loads the tables and tensors of both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from geartrain.ams.values.errors import InvalidArgument, SpecMismatch
from geartrain.ams.values.specs import TableSpec
from geartrain.bridge.checkpoint.folder import ModelRecord, open_rows
from geartrain.bridge.checkpoint.modules_with_rows import PlainNames, on_first, together
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.placements.placement import Placement
from geartrain.bridge.rows.serialization import ShardedTensorRef

if TYPE_CHECKING:
    from geartrain.ams.client.cluster import Cluster

_EXTRA_STATE = "_extra_state"


@dataclass(frozen=True)
class CommonParts:
    """Tables and tensors of both models, and descriptions of those that only one has."""

    unchanged: Collection[str]
    """Modules whose tables equal those of the saved module of the same name."""
    tables: Mapping[str, Sequence[str]]
    """Names of the tables to restore, by the folder of their rows."""
    tensors: Mapping[str, Any]
    """Tensors to load, by their names in this model."""
    new: Sequence[str]
    """Descriptions of what only this model has; it is unchanged."""
    left_out: Sequence[str]
    """Descriptions of what only the saved model has."""

    def __str__(self) -> str:
        new, left_out = (", ".join(item) or "nothing" for item in (self.new, self.left_out))
        return f"new, and as they were made: {new}; left out: {left_out}"


def common_parts(
    folder: Path,
    record: ModelRecord,
    saved: Mapping[str, Any],
    model: nn.Module,
    placements: Mapping[str, Placement],
    plain: PlainNames,
) -> CommonParts:
    """Compare a model with the saved one. Raises SpecMismatch for a table of both that differs, and if there is nothing
    that both have; InvalidArgument where rows of the model are not in a cluster, or tables of two have one name.
    """
    own = {name for name, placement in placements.items() if placement.cluster is None}
    if own:
        raise InvalidArgument(
            f"the rows of module {min(own)!r} are in this process and its peers; strict=False is for rows in a cluster"
        )
    unchanged = {
        name
        for name, placement in placements.items()
        if record.modules.get(name) == [spec.name for spec in placement.specs()]
    }
    for name in unchanged:
        if isinstance(extra := saved.get(_extra_state_of(name)), Mapping):
            placements[name].require_state(extra)
    mine = {spec.name: spec for placement in placements.values() for spec in placement.specs()}
    places = {(id(placement.cluster), spec.name) for placement in placements.values() for spec in placement.specs()}
    names = Counter(name for _, name in places)
    tables: dict[str, list[str]] = {}
    known: dict[str, TableSpec] = {}
    for rows in record.rows:
        found = [TableSpec.from_dict(spec) for spec in open_rows(folder, rows).manifest.tables]
        names.update(spec.name for spec in found if spec.name in known)
        known |= {spec.name: spec for spec in found}
        tables[rows.folder] = [spec.name for spec in found if spec.name in mine]
    for name in known.keys() & mine.keys():
        if names[name] > 1:
            raise InvalidArgument(
                f"tables of two clusters are called {name!r}, and strict=False knows tables by their names: load with "
                "strict=True, or give one of them another name; nothing was changed"
            )
        if unlike := known[name].fixed_unlike(mine[name]):
            raise SpecMismatch(
                f"table {name!r} of {folder} differs from this one's: {unlike}. Make it with "
                "the saved settings, or, to begin it anew, under another name (gt.Field(..., table=)); nothing was "
                "changed"
            )
    apart = {_extra_state_of(name) for name in placements.keys() - unchanged}
    tensors, other = _tensors(saved, model, apart, plain)
    new = [f"table {name}" for name in mine if name not in known]
    left_out = [f"table {name}" for name in known if name not in mine]
    here = {plain(name) for name in model.state_dict(keep_vars=True) if not name.endswith(_EXTRA_STATE)}
    there = {name for name in saved if not name.endswith(_EXTRA_STATE)}
    if not any(tables.values()) and not here & there - {plain(name) for name in other}:
        raise SpecMismatch(f"{folder} has no table and no tensor of this model; make the model like the saved one")
    return CommonParts(
        unchanged,
        tables,
        tensors,
        [*new, *sorted(here - there), *(f"{name} {shapes}" for name, shapes in other.items())],
        [*left_out, *sorted(there - here)],
    )


def restore_tables(
    path: Path, names: Sequence[str], placements: Iterable[Placement], group: Communicator | None, what: str
) -> None:
    """Restore the tables ``names`` of one snapshot in the clusters of the modules."""
    clusters: dict[int, tuple[Cluster, set[str]]] = {}
    for placement in placements:
        if placement.cluster is not None:
            own = clusters.setdefault(id(placement.cluster), (placement.cluster, set()))[1]
            own |= {spec.name for spec in placement.specs()}
    for cluster, own in clusters.values():
        if tables := [name for name in names if name in own]:
            on_first(group, partial(cluster.restore, path, tables=tables, replace=True), what)
            if group is not None:
                together(group, partial(cluster.reopen, tables) if group.rank > 0 else lambda: None, what)


def adopt_states(
    record: ModelRecord, saved: Mapping[str, Any], placements: Mapping[str, Placement], common: CommonParts
) -> None:
    """Let modules whose tables belonged to other saved modules continue from the states of those."""
    for name, placement in placements.items():
        own = {spec.name for spec in placement.specs()}
        if name not in common.unchanged:
            sources = [module for module, tables in record.modules.items() if own.intersection(tables)]
            states = [saved.get(_extra_state_of(module)) for module in sources]
            placement.adopt_states([state for state in states if isinstance(state, Mapping)])


def _tensors(
    saved: Mapping[str, Any], model: nn.Module, apart: Collection[str], plain: PlainNames
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the tensors to load, without the names ``apart``, and descriptions of those with different shapes."""
    tensors: dict[str, Any] = {}
    other: dict[str, str] = {}
    for name, here in model.state_dict(keep_vars=True).items():
        value = saved.get(plain(name))
        if plain(name) not in saved or plain(name) in apart:
            continue
        is_lazy = isinstance(here, Tensor) and nn.parameter.is_lazy(here)
        if not isinstance(value, Tensor | ShardedTensorRef) or not isinstance(here, Tensor) or is_lazy:
            tensors[name] = value
        elif tuple(value.shape) != tuple(here.shape):
            other[name] = f"{list(here.shape)}, saved as {list(value.shape)}"
        else:
            tensors[name] = value
    return tensors, other


def _extra_state_of(module: str) -> str:
    return f"{module}.{_EXTRA_STATE}".removeprefix(".")
