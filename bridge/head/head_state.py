"""State of a head in a state_dict, saved and resumed; the rows are in snapshots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from geartrain.ams.programs.class_lifecycle import LiveClasses
from geartrain.ams.values.errors import SpecMismatch
from geartrain.bridge.head.backends.backend import Imprinted, RowBackend
from geartrain.bridge.placements.device_snapshot import DevicePlacement
from geartrain.bridge.placements.placement import ClusterPlacement, Placement

if TYPE_CHECKING:
    from geartrain.ams.client.cluster import Cluster
    from geartrain.ams.client.table import Table
    from geartrain.bridge.placements.device_update import DeviceUpdate


def state_of(backend: RowBackend) -> dict[str, Any]:
    """Return the state for ``ClassHead.get_extra_state``."""
    identity, graph, imprinted = backend.identity(), backend.select.state(), backend.imprinted
    return {
        **_size_of(backend),
        "step": backend.update.step,
        "frozen_steps": backend.update.frozen_steps,
        "select": repr(backend.select),
        **backend.margins.state(),
        **({} if identity is None else {"table_rows": identity}),
        "retired_runs": backend.live_classes.retired_runs.tolist(),
        **({} if graph is None else {"graph": graph}),
        **({} if imprinted is None else {"imprinted": imprinted.state()}),
    }


def require_loadable(backend: RowBackend, state: Mapping[str, Any]) -> None:
    """Raise SpecMismatch unless the state belongs to the rows of ``backend``. Changes nothing."""
    _require_equal(_size_of(backend), state)
    if backend.local is not None:
        backend.local.require_step(int(state["step"]))
    backend.require_rows(state.get("table_rows"))


def resume_state(backend: RowBackend, state: Mapping[str, Any]) -> None:
    """Resume from a state, for ``ClassHead.set_extra_state``."""
    _require_equal(_size_of(backend), state)
    step = int(state["step"])
    if backend.local is not None:
        backend.local.require_step(step)
    live_classes = LiveClasses(backend.settings.num_classes, state.get("retired_runs", []))
    backend.margins.resume(state)
    backend.update.discard()
    backend.update.step, backend.update.frozen_steps = step, int(state.get("frozen_steps", 0))
    backend.update.generation += 1
    backend.live_classes = live_classes
    backend.imprinted = Imprinted.of(state.get("imprinted"))
    backend.select.resume(state.get("graph"), live_classes)


class _HeadRows(Placement):
    """Placement of a head's rows that also checks its settings and keeps its graph."""

    backend: RowBackend

    def require_state(self, state: Mapping[str, Any]) -> None:
        """Raise SpecMismatch also for rows of equal width whose columns mean something else."""
        settings = self.backend.settings
        _require_equal({"bias": settings.bias, "sub_centers": settings.sub_centers}, state)
        self.backend.margins.require_resumable(state)

    def graph_state(self) -> dict[str, Any] | None:
        graph = self.backend.select.graph_state()
        return graph if graph and graph["version"] else None

    def load_graph(self, state: Any, own: Callable[[Any, range], Tensor]) -> None:
        if isinstance(state, Tensor):
            self.backend.select.graph_from_bytes(state.numpy().tobytes())
        else:
            self.backend.select.load_graph(state, own)


class _RowsInCluster(_HeadRows, ClusterPlacement):
    """Rows of a head in a cluster."""


class _RowsOnDevices(_HeadRows, DevicePlacement):
    """Rows of a head on the ranks' devices."""


def head_rows(backend: RowBackend) -> Placement:
    """Return the placement of a head's rows, for saving and loading a model."""
    placed: _HeadRows
    if backend.local is not None:
        placed = _RowsOnDevices(cast("DeviceUpdate[Any]", backend.update))
    else:
        cluster, table = cast("Cluster", backend.settings.cluster), cast("Table", backend.table)
        placed = _RowsInCluster(cluster, [table], backend.update.ranks)
    placed.backend = backend
    return placed


def _size_of(backend: RowBackend) -> dict[str, Any]:
    """Return the values that must be equal in a head and a state that it loads."""
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
