"""Scopes of a model's parts, replicated or split: named in a dict, or marked where the modules are made."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from geartrain.ams.values.arguments import boolean, integer
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.text import quoted
from geartrain.bridge.rows.stand_in import named_dense_parameters


@dataclass(frozen=True)
class Replicate:
    """A part of a model that every rank has, with its own samples: gradients are averaged over the ranks.

    ``shard=False``: whole on every rank (DistributedDataParallel). ``shard=True``: its parameters, gradients and
    optimizer state are sharded over the ranks, and gathered when needed (FSDP2, ``fully_shard``). ``stage``: on a mesh
    with stages, the number of its stage; None: the first.
    """

    shard: bool = False
    stage: int | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        """Raise InvalidArgument unless ``shard`` is a bool and ``stage`` a stage number."""
        boolean("shard", self.shard)
        _check_stage(self.stage)


@dataclass(frozen=True)
class Split:
    """A part of a model whose rows are divided among the ranks: every rank works on its rows, for all samples.

    ``stage``: on a mesh with stages, the number of its stage; None: the last.
    """

    stage: int | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        """Raise InvalidArgument unless ``stage`` is a stage number."""
        _check_stage(self.stage)


def _check_stage(stage: int | None) -> None:
    if stage is not None:
        integer("stage", stage, 0)


Scope = Replicate | Split

_marks: weakref.WeakKeyDictionary[nn.Module, Scope] = weakref.WeakKeyDictionary()
_open: list[Scope] = []


def replicate(*, shard: bool = False, stage: int | None = None) -> contextlib.AbstractContextManager[None]:
    """Mark the modules made inside as :class:`Replicate`; nothing else happens to them.

    ``gt.parallelize(model, mesh, loss=...)`` without a dict reads the marks. In nested blocks the innermost counts.
    """
    return _marking(Replicate(shard=shard, stage=stage))


def split(*, stage: int | None = None) -> contextlib.AbstractContextManager[None]:
    """Mark the modules made inside as :class:`Split`, as :func:`replicate` does."""
    return _marking(Split(stage=stage))


@contextlib.contextmanager
def _marking(scope: Scope) -> Iterator[None]:
    hook = register_module_parameter_registration_hook(lambda module, *_: _mark(module))
    _open.append(scope)
    try:
        yield
    finally:
        _open.pop()
        hook.remove()


def _mark(module: nn.Module) -> None:
    _marks[module] = _open[-1]


def marked_scopes(model: nn.Module) -> dict[str, Scope]:
    """Return the marks of ``model`` as a dict: by names of the largest modules whose parameters have one mark.

    Raises InvalidArgument if there are none.
    """
    found: dict[str, Scope] = {}

    def scopes_in(module: nn.Module) -> set[Scope | None]:
        """Return the marks of the modules of ``module`` that own parameters; None for one without a mark."""
        owners = [part for part in module.modules() if part._parameters]
        return {_marks.get(part) for part in owners}

    def walk(name: str, module: nn.Module) -> None:
        scopes = scopes_in(module)
        only = next(iter(scopes)) if len(scopes) == 1 else None
        # A split scope names single layers: a container of them cannot be split.
        if only is not None and (isinstance(only, Replicate) or module._parameters):
            found[name] = only
            return
        for part, child in module.named_children():
            walk(f"{name}.{part}" if name else part, child)

    walk("", model)
    if not found:
        raise InvalidArgument(
            "no scopes are given, and no module of the model was made inside gt.replicate() or gt.split(); give "
            'a dict, such as {"backbone": gt.Replicate(), "head": gt.Split()}'
        )
    return found


@dataclass(frozen=True)
class ScopedModel:
    """A model with its scopes."""

    scopes: Mapping[str, Scope]
    """Scopes as given or marked."""
    split: Mapping[str, nn.Module]
    """Modules to split, by name."""
    replicated: Mapping[str, tuple[Replicate, nn.Module]]
    """Scopes to replicate, by name; the modules of ``split`` may be inside."""


def scoped(model: nn.Module, scopes: Mapping[str, Scope]) -> ScopedModel:
    """Look up the scopes of ``model``.

    Raises InvalidArgument for a name that is none of its modules, a scope inside another of its kind, and a parameter
    that is in no scope, or in both a replicated and a split one.
    """
    if not isinstance(scopes, Mapping) or not scopes:
        raise InvalidArgument(
            f'scopes is {quoted(scopes)}; it must be a dict, such as {{"backbone": gt.Replicate(), "head": gt.Split()}}'
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    split: dict[str, nn.Module] = {}
    replicated: dict[str, tuple[Replicate, nn.Module]] = {}
    for name, scope in scopes.items():
        if name not in modules:
            raise InvalidArgument(f"scope {name!r} is no module of the model; its own are {_parts_of(model)}")
        match scope:
            case Split():
                split[name] = modules[name]
            case Replicate():
                replicated[name] = (scope, modules[name])
            case _:
                raise InvalidArgument(
                    f"the scope of {name!r} is {quoted(scope)}; it must be gt.Replicate() or gt.Split()"
                )
    for name in scopes:
        outer = next((scope for scope in scopes if scope != name and is_inside(name, scope)), None)
        if outer is not None and not (name in split and outer in replicated and not replicated[outer][0].shard):
            raise InvalidArgument(
                f"scope {name!r} lies inside scope {outer!r}; only a split part may, inside gt.Replicate() without "
                "shard=True. Name parts that lie side by side"
            )
    _require_all_named(model, split, replicated)
    return ScopedModel(scopes, split, replicated)


def called_parts(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield ``module`` with its name; for a container without a forward, such as nn.ModuleList, its modules."""
    if type(module).forward is not nn.Module.forward:
        yield name, module
        return
    for key, child in module.named_children():
        yield from called_parts(f"{name}.{key}", child)


def replaced(model: nn.Module, name: str, layer: nn.Module) -> nn.Module:
    """Return ``model`` with ``layer`` at ``name``; ``layer`` itself if that is the whole model."""
    if not name:
        return layer
    model.set_submodule(name, layer)
    return model


def is_inside(name: str, outer: str) -> bool:
    """Return whether ``name`` is a module or parameter inside the module ``outer``."""
    return not outer or name.startswith(f"{outer}.")


def _parts_of(model: nn.Module) -> str:
    return ", ".join(repr(name) for name, _ in model.named_children()) or "none, it is a single module: name it ''"


def _require_all_named(
    model: nn.Module, split: Mapping[str, nn.Module], replicated: Mapping[str, tuple[Replicate, nn.Module]]
) -> None:
    owners: dict[int, tuple[str, str]] = {}
    kinds: dict[int, set[bool]] = {}
    first_names: dict[int, str] = {}
    for name, parameter in named_dense_parameters(model, remove_duplicate=False):
        is_split = any(name == part or is_inside(name, part) for part in split)
        if not is_split and not any(is_inside(name, part) for part in replicated):
            raise InvalidArgument(
                f"parameter {name!r} is in no scope; name its module: "
                f'{{"{name.rpartition(".")[0]}": gt.Replicate()}} keeps it whole on every rank'
            )
        kinds.setdefault(id(parameter), set()).add(is_split)
        scope = next((part for part in replicated if is_inside(name, part)), None)
        if scope is not None and not is_split:
            other, tied = owners.setdefault(id(parameter), (scope, name))
            if other != scope and (replicated[other][0].shard or replicated[scope][0].shard):
                raise InvalidArgument(
                    f"parameters {tied!r} and {name!r} are one, in the scopes {other!r} and {scope!r}; with shard=True "
                    "name one module that holds both, or untie them"
                )
        first = first_names.setdefault(id(parameter), name)
        if len(kinds[id(parameter)]) > 1 or (is_split and first != name):
            raise InvalidArgument(
                f"parameters {first!r} and {name!r} are one, and a split layer has its own; untie them, or replicate "
                "both"
            )
