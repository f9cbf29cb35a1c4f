"""Recipes as text: a YAML file, ``--set KEY=VALUE`` with dotted keys, and the JSON beside a snapshot, with one
check."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import asdict, fields, is_dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from geartrain.ams.values.config import suggestion
from geartrain.ams.values.errors import ConfigError, GeartrainError
from geartrain.ams.values.text import quoted
from geartrain.workers.atomic import replacing

RECIPE_FILE = "recipe.yaml"
R = TypeVar("R")


def recipe_of(kind: type[R], values: Mapping[str, Any], where: str = "the recipe") -> R:
    """Return the recipe of ``values``, nested as its class is, with that class's defaults. Raises ConfigError naming a
    key that is unknown, with the likely one, or an invalid value.
    """
    known = list(_keys(kind))
    for key, _ in flat(values):
        if not any(_names(key, name) for name in known):
            named = [_with_names_of(key, name) for name in known]
            raise ConfigError(f"{where} has no key {quoted(key)}; {suggestion(key, named)}")
    try:
        return TypeAdapter(kind).validate_python(merged(asdict(kind()), values))  # type: ignore[call-overload]
    except ValidationError as exc:
        found = exc.errors()[0]
        error = found.get("ctx", {}).get("error")
        if isinstance(error, GeartrainError):  # raised by the class itself
            of = ".".join(map(str, found["loc"]))
            raise ConfigError(f"{of}: {error}" if "." in of else f"{error}") from exc
        key = ".".join(str(part) for part in found["loc"])
        raise ConfigError(f"{where} has {key} = {found['input']!r}: {found['msg']}") from exc


def as_json(recipe: Any) -> dict[str, Any]:
    """Return the recipe as plain values, for :func:`recipe_of`."""
    values: dict[str, Any] = TypeAdapter(type(recipe)).dump_python(recipe, mode="json")
    return values


def read_recipe(path: Path) -> dict[str, Any]:
    """Return the values in a YAML file. Raises ConfigError if there are none."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(
            f"the recipe {path} cannot be read ({exc.strerror}); give a YAML file, such as the recipe.yaml of a run"
        ) from exc
    except (ValueError, yaml.YAMLError) as exc:
        raise ConfigError(f"the recipe {path} is no YAML: {exc}") from exc
    if not isinstance(values, dict):
        raise ConfigError(f"the recipe {path} holds no keys; give lines such as 'steps: 600'")
    return values


def write_recipe(folder: Path, recipe: Any) -> None:
    """Write all keys of ``recipe`` to ``folder``, in a file for ``--recipe``."""
    with replacing(folder / RECIPE_FILE) as temporary:
        temporary.write_text(yaml.safe_dump(as_json(recipe), sort_keys=False, allow_unicode=True), encoding="utf-8")


def with_settings(values: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Return ``values`` overridden by those of ``KEY=VALUE``; a value is YAML. Raises ConfigError."""
    changed: dict[str, Any] = {**values}
    for text in settings:
        key, sign, value = text.partition("=")
        if not sign or not key:
            raise ConfigError(f"--set {quoted(text)} is not KEY=VALUE, such as --set steps=600")
        try:
            change: Any = yaml.safe_load(value)
        except yaml.YAMLError as exc:
            raise ConfigError(f"--set {quoted(text)}: {exc}") from exc
        for section in reversed(key.split(".")):
            change = {section: change}
        changed = merged(changed, change)
    return changed


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` overridden by ``changes``, section by section."""
    result = {**values, **changes}
    for key, inner in changes.items():
        if isinstance(inner, Mapping) and isinstance(values.get(key), Mapping):
            result[key] = merged(values[key], inner)
    return result


def flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield dotted keys with their values."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", of_inner) for inner, of_inner in flat(value))
        else:
            yield str(key), value


def gone_on_with(saved: R, given: R, stated: Sequence[str], changeable: Sequence[str], out: Path) -> R:
    """Return the ``saved`` recipe of the run in ``out`` with those ``stated`` keys of ``given`` that match a pattern of
    ``changeable``.

    Raises ConfigError if another key differs from the run's.
    """
    values, begun = as_json(given), as_json(saved)
    flat_values, flat_begun = dict(flat(values)), dict(flat(begun))
    changed = {key for key in stated if key in flat_begun and any(fnmatchcase(key, known) for known in changeable)}
    for key in stated:
        if key not in changed and flat_values.get(key) != flat_begun.get(key):
            raise ConfigError(
                f"{key} is {flat_values.get(key)!r}, but the run in {out} was begun with {flat_begun.get(key)!r}; give "
                "that, or leave it out, or start a new run (another --out and --snapshots)"
            )
    return recipe_of(type(saved), _replaced(begun, values, changed))


def _replaced(values: Mapping[str, Any], others: Mapping[str, Any], keys: Set[str], prefix: str = "") -> dict[str, Any]:
    """Return ``values`` with those of ``others`` at the dotted ``keys``."""
    return {
        name: _replaced(value, others.get(name, {}), keys, f"{prefix}{name}.")
        if isinstance(value, Mapping)
        else others[name]
        if f"{prefix}{name}" in keys
        else value
        for name, value in values.items()
    }


def _names(key: str, known: str) -> bool:
    """Return whether ``key`` is a known one, or a section of it."""
    given, whole = key.split("."), known.split(".")
    return fnmatchcase(key, known) or (len(given) < len(whole) and all(map(fnmatchcase, given, whole)))


def _with_names_of(key: str, known: str) -> str:
    """Return the ``known`` key with the names that ``key`` has in the places of ``*``."""
    section, _, name = known.partition(".*.")
    mine = key.removeprefix(f"{section}.").partition(".")[0]
    return f"{section}.{mine}.{name}" if name and key.startswith(f"{section}.") else known


def _keys(kind: Any) -> Iterator[str]:
    """Yield dotted keys; in a mapping from names to sections ``*`` stands for a name."""
    types = get_type_hints(kind)
    for field in fields(kind):
        inner, name = types[field.name], field.name
        if get_origin(inner) is Mapping and is_dataclass(get_args(inner)[1]):
            inner, name = get_args(inner)[1], f"{name}.*"
        yield from (f"{name}.{key}" for key in _keys(inner)) if is_dataclass(inner) else (name,)
