"""Whether HTTP goes under certificates."""

from __future__ import annotations

from geartrain.ams.values.config import NO_FOLDER, ClusterConfig


def certificates_of(config: ClusterConfig) -> str | None:
    """The folder under which HTTP goes: one that was named; on loopback none, by itself."""
    folder = config.security.folder
    return None if folder in (None, NO_FOLDER) or config.serve.insecure else folder
