"""Sealed JSON file of a saved model: its checksum and format are checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from geartrain.ams.storage.snapshot.manifest import unseal_json
from geartrain.ams.values.errors import ConfigError, ModelDamaged
from geartrain.ams.values.text import other_format


def read_sealed(path: Path, format_number: int, hint: str, again: str) -> dict[str, Any]:
    """Return the content of a model's sealed JSON; ``again`` says in errors how to write the model again.

    Raises ConfigError if it does not exist (with the ``hint``) or has another format; ModelDamaged.
    """
    try:
        content = unseal_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise ConfigError(f"{path} does not exist; {hint}") from exc
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc}") from exc
    except ValueError as exc:
        raise ModelDamaged(f"{path} is damaged: {exc}; bring it back from a copy, or {again}") from exc
    if content.get("format") != format_number:
        raise ConfigError(f"{path} {other_format(content.get('format'), format_number)}, or {again}")
    return content
