"""What a head puts into a state_dict, and how it goes on from there; the rows themselves are in snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from geartrain.ams.programs.class_lifecycle import LiveClasses
from geartrain.ams.values.errors import SpecMismatch
from geartrain.ams.values.specs import TableSpec
from geartrain.bridge.head.backends.backend import RowBackend
from geartrain.bridge.rows.keeper import RowKeeper

if TYPE_CHECKING:
    from geartrain.ams.client.cluster import Cluster


def state_of(backend: RowBackend) -> dict[str, Any]:
    """See ``ClassHead.get_extra_state``."""
    identity, graph = backend.identity(), backend.select.state()
    return {
        **_size_of(backend),
        "step": backend.update.step,
        "select": repr(backend.select),
        **backend.margins.state(),
        **({} if identity is None else {"table_rows": identity}),
        "retired_runs": backend.living.retired_runs.tolist(),
        **({} if graph is None else {"graph": graph}),
    }


def require_loadable(backend: RowBackend, state: Mapping[str, Any]) -> None:
    """Raise SpecMismatch if the state was saved with other rows than are here, and change nothing."""
    _require_equal(_size_of(backend), state)
    if backend.local is not None:
        backend.local.require_step(int(state["step"]))
    backend.require_rows(state.get("table_rows"))


def resume_state(backend: RowBackend, state: Mapping[str, Any]) -> None:
    """See ``ClassHead.set_extra_state``."""
    _require_equal(_size_of(backend), state)
    step = int(state["step"])
    if backend.local is not None:
        backend.local.require_step(step)
    living = LiveClasses(backend.settings.num_classes, state.get("retired_runs", []))
    backend.margins.resume(state)
    backend.update.discard()
    backend.update.step = step
    backend.update.generation += 1
    backend.living = living
    backend.select.resume(state.get("graph"), living)


class HeadRows(RowKeeper):
    """The rows of a head as saving and loading a model see them."""

    def __init__(self, backend: RowBackend) -> None:
        self._backend = backend
        self.cluster = cast("Cluster | None", backend.settings.cluster)
        self.peers = backend.peers

    def specs(self) -> list[TableSpec]:
        return [self._backend.table.spec]

    def is_trained(self) -> bool:
        table: Any = self._backend.table
        return bool(table.is_written if self._backend.local is not None else max(table.versions()) > 0)

    def go_on(self) -> None:
        if self._backend.update.ranks is not None:
            self._backend.update.ranks.begin_anew()

    def require_state(self, state: Mapping[str, Any]) -> None:
        """Also for rows that may be as wide, but whose columns mean something else."""
        settings = self._backend.settings
        _require_equal({"bias": settings.bias, "sub_centers": settings.sub_centers}, state)
        self._backend.margins.require_resumable(state)

    def graph_to_bytes(self) -> bytes | None:
        return self._backend.select.graph_to_bytes()

    def graph_from_bytes(self, data: bytes) -> None:
        self._backend.select.graph_from_bytes(data)

    def snapshot(self, root: Path, name: str) -> None:
        if self._backend.local is None:
            super().snapshot(root, name)
        else:
            self._backend.local.snapshot(root, name, step=self._backend.update.step, values={}, files={})

    def restore(self, path: Path) -> None:
        if self._backend.local is None:
            super().restore(path)
        else:
            self._backend.local.restore(path)


def _size_of(backend: RowBackend) -> dict[str, Any]:
    """What a head and the state that it loads have in common."""
    own = backend.settings
    return {
        "table": own.name,
        "num_classes": own.num_classes,
        "dim": own.dim,
        "bias": own.bias,
        "sub_centers": own.sub_centers,
    }


def _require_equal(own: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    for key, mine in own.items():
        if state[key] != mine:
            raise SpecMismatch(
                f"the saved head has {key} {state[key]!r}, this one {mine!r}; create the head with the saved settings"
            )
