"""What a head puts into a state_dict, and how it goes on from there; the rows themselves are in snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from geartrain.ams.programs.class_lifecycle import LiveClasses
from geartrain.ams.values.errors import SpecMismatch
from geartrain.bridge.head.backends.backend import HeadSettings, RowBackend


@dataclass(frozen=True, kw_only=True)
class HeadSize:
    """What a head and the state that it loads have in common."""

    table: str
    num_classes: int
    dim: int
    bias: bool
    sub_centers: int


def state_of(backend: RowBackend, size: HeadSize) -> dict[str, Any]:
    """See ``ClassHead.get_extra_state``."""
    identity, graph = backend.identity(), backend.select.state()
    return {
        "table": size.table,
        "num_classes": size.num_classes,
        "dim": size.dim,
        **({"bias": True} if size.bias else {}),
        **({"sub_centers": size.sub_centers} if size.sub_centers > 1 else {}),
        "step": backend.update.step,
        "select": repr(backend.select),
        **backend.margins.state(),
        **({} if identity is None else {"table_rows": identity}),
        "retired_runs": backend.living.retired_runs.tolist(),
        **({} if graph is None else {"graph": graph}),
    }


def require_loadable(backend: RowBackend, size: HeadSize, state: Mapping[str, Any]) -> None:
    """Raise SpecMismatch if the state was saved with other rows than are here, and change nothing."""
    _require_same(size, state)
    backend.require_step(int(state["step"]))
    backend.require_rows(state.get("table_rows"))


def resume_state(backend: RowBackend, size: HeadSize, state: Mapping[str, Any]) -> None:
    """See ``ClassHead.set_extra_state``."""
    _require_same(size, state)
    step = int(state["step"])
    backend.require_step(step)
    living = LiveClasses(size.num_classes, state.get("retired_runs", []))
    backend.margins.resume(state)
    backend.update.discard()
    backend.update.step = step
    backend.update.generation += 1
    backend.living = living
    backend.select.resume(state.get("graph"), living)


def require_same_columns(settings: HeadSettings, state: Mapping[str, Any]) -> None:
    """Raise SpecMismatch for rows that may be as wide, but whose columns mean something else."""
    _require_equal({"bias": settings.bias, "sub_centers": settings.sub_centers}, state)


def _require_same(size: HeadSize, state: Mapping[str, Any]) -> None:
    _require_equal(asdict(size), state)


def _require_equal(own: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    state = {"bias": False, "sub_centers": 1, **state}
    for key, mine in own.items():
        if state[key] != mine:
            raise SpecMismatch(
                f"the saved head has {key} {state[key]!r}, this one {mine!r}; create the head with the saved settings"
            )
