"""What a service serves of the folders that it is given."""

from __future__ import annotations

import shutil
from pathlib import Path

from geartrain.ams.values.config import ServeConfig
from geartrain.serving.catalog import Catalog
from geartrain.serving.folder import load_folder
from geartrain.serving.service import open_models
from tests.support.served_models import exported


def test_versions_are_told_by_their_models_whatever_people_call_their_folders(tmp_path: Path) -> None:
    for name, version in {"1": 180, "2": 500, "3": 500}.items():
        exported(tmp_path / name, version=version)
    shutil.copytree(tmp_path / "1", tmp_path / "0")
    (tmp_path / "0" / "config.json").write_bytes(b"half")
    catalog = Catalog(load_folder)
    open_models(catalog, ServeConfig(models=(f"signs={tmp_path}",)))
    state = catalog.state("signs")
    assert (state["current"], state["versions"]) == (500, [180, 500])
    assert catalog.rollback("signs") == 180
    assert catalog.rollback("signs", 500) == 500
    catalog.close()
