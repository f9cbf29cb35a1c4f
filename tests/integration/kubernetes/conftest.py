"""What tests of the chart and of its manifests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from geartrain.ams.values.config import CERTIFIED_ROLES
from geartrain.launch.certificates import create_authority, issue
from tests.support.pods import REPOSITORY

DEPLOY = REPOSITORY / "deploy"
MANIFESTS = {"cluster": [], "everything": ["-f", str(DEPLOY / "kubernetes" / "everything.values.yaml")]}
"""Name in deploy/kubernetes -> what helm is told."""


def manifest(name: str) -> list[dict[str, Any]]:
    """The objects of a file of deploy/kubernetes."""
    return objects((DEPLOY / "kubernetes" / f"{name}.yaml").read_text())


def objects(text: str) -> list[dict[str, Any]]:
    """The objects in a text of YAML."""
    return [found for found in yaml.safe_load_all(text) if found]


@pytest.fixture
def certificates(tmp_path: Path) -> dict[str, dict[str, bytes]]:
    """The Secrets of the roles, as the notes of the chart make them."""
    create_authority(tmp_path / "ca", "shop")
    found = {}
    for role in CERTIFIED_ROLES:
        issue(tmp_path / "ca", tmp_path / role, [role])
        found[f"geartrain-{role}"] = {path.name: path.read_bytes() for path in (tmp_path / role).iterdir()}
    return found
