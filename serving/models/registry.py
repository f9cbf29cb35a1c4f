"""Registry of the kinds of models that can be served, and their loader."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from geartrain.ams.values.errors import ConfigError

if TYPE_CHECKING:
    from geartrain.serving.answers import Servable

KINDS: dict[str, str] = {
    "pictures": "geartrain.serving.models.pictures:PictureModel",
    "tensors": "geartrain.serving.models.tensors:TensorModel",
    "clicks": "geartrain.serving.models.clicks:ClicksModel",
    "tree": "geartrain.serving.models.tree:TreeModel",
}
"""``module:class`` of the Servable, by ``kind`` of config.json; made from a folder and its config."""


def load_kind(kind: str, folder: Path, config: dict[str, object]) -> Servable:
    """Load a model of a kind. Raises ConfigError for an unknown kind, and the errors of the kind."""
    place = KINDS.get(kind)
    if place is None:
        raise ConfigError(f"{folder} is a model of kind {kind!r}; this version serves {', '.join(KINDS) or 'none'}")
    module, _, name = place.partition(":")
    servable: Servable = getattr(importlib.import_module(module), name)(folder, config)
    return servable
