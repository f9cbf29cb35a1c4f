"""Sources of settings: one YAML file, then the environment, then flags; each overrides the one before.

``GEARTRAIN_SERVER__LISTEN=127.0.0.1:7001`` sets ``server.listen``, ``GEARTRAIN_MODE=production`` the key ``mode``,
which has no section; an empty variable counts as none. Settings are read from files or the environment only here; the
result is a :class:`ClusterConfig`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError, create_model

from geartrain.ams.values.config import (
    ClientConfig,
    ClusterConfig,
    Section,
    SecurityConfig,
    error_text,
    identify,
    suggestion,
)
from geartrain.ams.values.errors import ConfigError
from geartrain.ams.values.text import shown_url
from geartrain.launch.roles import ROLES

PREFIX = "GEARTRAIN_"
DELIMITER = "__"
S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class Setting:
    """One value and its source, for error messages."""

    section: str
    """Section of the key; empty for a key of the whole cluster."""
    key: str
    value: object
    origin: str


def flags(section: str, /, *, prefix: str = "", **values: object) -> list[Setting]:
    """Return the settings of ``section`` given on the command line; None stands for a flag that was not given.

    ``prefix`` is the part of the flags' names before those of the settings.
    """
    return [
        Setting(section, key, value, f"flag --{prefix}{key.replace('_', '-')}")
        for key, value in values.items()
        if value is not None
    ]


WHOLE = ""
"""Section of the keys without a section."""
WHOLE_KEYS = ("mode",)


def sections() -> dict[str, type[Section]]:
    """Return the sections of the configuration by name: one for each role, ``client`` and ``security``."""
    return {**{name: role.settings for name, role in ROLES.items()}, "client": ClientConfig, "security": SecurityConfig}


def load(
    path: Path | None = None, given: Iterable[Setting] = (), environ: Mapping[str, str] = os.environ
) -> ClusterConfig:
    """Read and check the configuration.

    Args:
        path: a YAML file, or None for the defaults.
        given: settings from the command line.
        environ: the environment.

    Raises:
        ConfigError: the file cannot be read, or has an unknown key or an impossible value; names the place.
    """
    found: dict[tuple[str, str], Setting] = {}
    for source in (_file_settings(path) if path else (), _environment_settings(environ), given):
        for setting in source:
            _require_known(setting)
            found[setting.section, setting.key] = setting
    # The mode decides where roles may listen, and holds for every connection of this process.
    security = _build("security", SecurityConfig, found)
    identify(security.folder, token=security.token)
    built: dict[str, Any] = {name: _build(name, section, found) for name, section in sections().items()}
    more: dict[str, Any] = {name: (type(built[name]), ...) for name in built if name not in ClusterConfig.model_fields}
    kind = create_model("ClusterConfig", __base__=ClusterConfig, **more) if more else ClusterConfig
    return _build(WHOLE, kind, found, built)


def to_plain(config: ClusterConfig) -> dict[str, Any]:
    """Return the whole configuration by section, for people to read: URLs without passwords."""
    plain: dict[str, Any] = _without_secrets(config.model_dump())
    return plain


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_secrets(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_without_secrets(item) for item in value]
    return shown_url(value) if isinstance(value, str) and "//" in value else value


def to_yaml(config: ClusterConfig) -> str:
    """Return the whole configuration as a commented YAML file, which :func:`load` reads; URLs as :func:`to_plain`."""
    plain = to_plain(config)
    lines = [f"{key}: {json.dumps(plain[key])}  # {ClusterConfig.model_fields[key].description}" for key in WHOLE_KEYS]
    lines.append("")
    for name, section in sections().items():
        lines.append(f"{name}:  # {(section.__doc__ or '').strip()}")
        for key, field in section.model_fields.items():
            lines.append(f"  {key}: {json.dumps(plain[name][key])}  # {' '.join((field.description or '').split())}")
        lines.append("")
    return "\n".join(lines)


def to_environment(config: ClusterConfig, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return ``environ`` with the whole configuration in it, for a child process with exactly this configuration."""
    inherited = {name: value for name, value in environ.items() if not _is_setting(name)}
    values = {
        f"{PREFIX}{name}{DELIMITER}{key}".upper(): value if isinstance(value, str) else json.dumps(value)
        for name in sections()
        for key, value in getattr(config, name).model_dump().items()
        if value is not None
    }
    return inherited | values | {f"{PREFIX}{key}".upper(): str(getattr(config, key)) for key in WHOLE_KEYS}


def _is_setting(name: str) -> bool:
    name = name.upper()
    return name.startswith(PREFIX) and (DELIMITER in name or name[len(PREFIX) :].lower() in WHOLE_KEYS)


def _environment_settings(environ: Mapping[str, str]) -> Iterator[Setting]:
    keys = [(name, key) for name, section in sections().items() for key in section.model_fields]
    misspelt = {f"{PREFIX}{name}_{key}".upper(): f"{PREFIX}{name}{DELIMITER}{key}".upper() for name, key in keys}
    for name, value in environ.items():
        if value and (meant := misspelt.get(name.upper())) is not None:
            raise ConfigError(f"environment variable {name} would be ignored; write {meant}, with two underscores")
        if _is_setting(name) and value:
            section, _, key = name[len(PREFIX) :].lower().rpartition(DELIMITER)
            yield Setting(section, key, value, f"environment variable {name}")


def _file_settings(path: Path) -> Iterator[Setting]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        why = getattr(exc, "strerror", None) or exc
        raise ConfigError(f"cannot read the configuration file {str(path)!r} ({why}); give a YAML file") from exc
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        for section, line, section_node in _pairs(loader, root, path, "the file"):
            if section in WHOLE_KEYS:
                yield Setting(WHOLE, section, loader.construct_object(section_node, deep=True), f"{path}:{line}")
                continue
            _require_section(section, f"{path}:{line}")
            for key, line, value_node in _pairs(loader, section_node, path, f"section {section!r}"):
                yield Setting(section, key, loader.construct_object(value_node, deep=True), f"{path}:{line}")
    except yaml.MarkedYAMLError as exc:
        place = f"{path}:{exc.problem_mark.line + 1}" if exc.problem_mark else str(path)
        raise ConfigError(f"{place}: not valid YAML: {exc.problem}") from exc
    finally:
        loader.dispose()


def _pairs(
    loader: yaml.SafeLoader, node: yaml.Node | None, path: Path, what: str
) -> Iterator[tuple[str, int, yaml.Node]]:
    """Yield key, line and value node of a mapping; an empty node is an empty mapping."""
    if node is None or (isinstance(node, yaml.ScalarNode) and not node.value):
        return
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path}:{node.start_mark.line + 1}: {what} must be a mapping of 'key: value' lines")
    seen = set()
    for key_node, value_node in node.value:
        key, line = str(loader.construct_object(key_node, deep=True)), key_node.start_mark.line + 1
        if key in seen:
            raise ConfigError(f"{path}:{line}: {key!r} is given twice in {what}; keep one")
        seen.add(key)
        yield key, line, value_node


def _require_section(name: str, origin: str) -> type[Section]:
    if name == WHOLE:
        return ClusterConfig
    known = sections()
    if name not in known:
        raise ConfigError(f"{origin}: unknown section {name!r}; {suggestion(name, [*known, *WHOLE_KEYS])}")
    return known[name]


def _require_known(setting: Setting) -> None:
    section = _require_section(setting.section, setting.origin)
    if setting.key not in section.model_fields:
        raise ConfigError(
            f"{setting.origin}: unknown key {setting.key!r} in section {setting.section!r}; "
            f"{suggestion(setting.key, section.model_fields)}"
        )


def _build(
    name: str,
    section: type[S],
    found: Mapping[tuple[str, str], Setting],
    built: Mapping[str, Section] = MappingProxyType({}),
) -> S:
    values: dict[str, Any] = {key: setting.value for (owner, key), setting in found.items() if owner == name}
    try:
        return section(**built, **values)
    except ConfigError as exc:
        if not isinstance(exc.__cause__, ValidationError):
            raise
        complaints = []
        for error in exc.__cause__.errors():
            setting = found.get((name, str(error["loc"][0]))) if error["loc"] else None
            place = f"{setting.origin}: {name and name + '.'}{setting.key}" if setting else name
            complaints.append(f"{place}: {error_text(error)}")
        raise ConfigError("; ".join(complaints)) from exc
