"""Parts of a model that hold rows, and actions on all ranks that train them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.text import quoted
from geartrain.bridge.checkpoint.rank_rows import is_divided
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.dense.dense_table import placement_of
from geartrain.bridge.placements.placement import Placement

T = TypeVar("T")

_links: weakref.WeakKeyDictionary[Any, Communicator] = weakref.WeakKeyDictionary()
"""Communicators by DeviceMesh: creating one creates a process group where the ranks' own uses NCCL."""


@runtime_checkable
class DividedState(Protocol):
    """Object whose ``state_dict()`` is divided among ranks until it is merged."""

    @property
    def saving_ranks(self) -> Communicator:
        """Ranks that hold the parts."""

    def merge(self) -> None:
        """Exchange the parts, so that every rank has all of them; every rank calls it."""


class PlainNames:
    """Names within a model as they are without DistributedDataParallel, torch.compile and gt.parallelize around it."""

    def __init__(self, model: nn.Module) -> None:
        """Raise InvalidArgument if ``model`` is no module."""
        if not isinstance(model, nn.Module):
            raise InvalidArgument(f"model is {quoted(model)}; it must be a torch.nn.Module")
        wrapped = []
        for name, module in model.named_modules(remove_duplicate=False):
            if "_orig_mod" in module._modules:
                wrapped.append((name, "_orig_mod"))
            elif isinstance(module, DistributedDataParallel) or hasattr(type(module), "saving_ranks"):
                wrapped.append((name, "module"))
        self._wrapped = sorted(wrapped, key=lambda pair: -len(pair[0]))  # the innermost first

    def __call__(self, name: str) -> str:
        """Return the plain name of a module or of a key of the model's ``state_dict``."""
        for outer, inner in self._wrapped:
            prefix = f"{outer}.{inner}" if outer else inner
            if name == prefix or name.startswith(f"{prefix}."):
                name = (outer + name.removeprefix(prefix)).removeprefix(".")
        return name


def placements_of(model: nn.Module) -> dict[str, Placement]:
    """Return the placements of the model's rows by name of the module, each once.

    Raises InvalidArgument for a module that trains rows but has no placement.
    """
    found: dict[str, Placement] = {}
    plain = PlainNames(model)
    for name, module in model.named_modules():
        placement = getattr(module, "row_placement", None) or placement_of(module)
        if placement is not None:
            found[plain(name)] = placement
        elif hasattr(module, "row_update"):
            raise InvalidArgument(
                f"module {name!r} ({type(module).__name__}) trains rows and has no row_placement, so they would not be "
                "saved: give it one (geartrain.bridge.placements.placement.Placement)"
            )
    return found


def require_between_steps(model: nn.Module) -> None:
    """Raise InvalidArgument if row gradients are pending: they would not be saved."""
    for name, module in model.named_modules():
        update = getattr(module, "row_update", None)
        if update is not None and update.is_pending:
            raise InvalidArgument(
                f"row gradients of module {name!r} wait for their step; save and load between two steps: call step(), "
                "or zero_grad() to drop them"
            )


def divided_states(state: Mapping[str, Any] | None) -> list[DividedState]:
    """Return the objects of ``state`` that are divided among ranks."""
    return [item for item in state.values() if isinstance(item, DividedState)] if isinstance(state, Mapping) else []


def group_of(
    model: nn.Module, placements: dict[str, Placement], state: Mapping[str, Any] | None = None
) -> Communicator | None:
    """Return the ranks that save and load together, as they train rows or parameters together; None: no others.

    They come from a parallel model (``saving_ranks``), DTensors, or ``state``. Every rank calls it.
    """
    for placement in placements.values():
        if placement.peers is not None:
            return placement.peers
    parallel: Any = next((module for module in model.modules() if hasattr(type(module), "saving_ranks")), None)
    if parallel is not None:
        ranks: Communicator | None = parallel.saving_ranks
        return ranks
    divided: Any = next((parameter for parameter in model.parameters() if is_divided(parameter)), None)
    if divided is None or divided.device_mesh.ndim != 1:
        return next((item.saving_ranks for item in divided_states(state)), None)
    mesh = divided.device_mesh
    if mesh not in _links:
        _links[mesh] = Communicator(mesh.get_group())
    return _links[mesh]


def together(group: Communicator | None, action: Callable[[], T], what: str) -> T:
    """Run ``action``, without collectives, on every rank; if it fails on one, all raise, naming ``what``."""
    return action() if group is None else group.run_together(action, what)


def on_first(group: Communicator | None, action: Callable[[], object], what: str) -> None:
    """Run ``action`` on the first rank alone, as :func:`together`; all wait for it."""
    together(group, action if group is None or group.rank == 0 else lambda: None, what)
