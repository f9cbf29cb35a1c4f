"""A folder to which models are exported is followed, too; what is still being copied is no version yet."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from geartrain.ams.storage.snapshot.manifest import seal_json, unseal_json
from geartrain.serving.folder import load_folder
from geartrain.serving.live.follow import Follower
from geartrain.serving.live.training import training_of
from geartrain.serving.live.versions import LiveVersions
from geartrain.workers.models.saved_model import CONFIG
from geartrain.workers.models.trained_model import save_model
from tests.support.served_models import exported, small_model


class Followed:
    """Who follows a folder, and what became current."""

    def __init__(self, source: Path, out: Path) -> None:
        self.served: list[Any] = []
        self.follower = Follower(
            training_of(str(source)),
            LiveVersions(out, keep=2),
            lambda version: self.served.append(load_folder(version.folder)),
        )


@pytest.fixture
def followed(tmp_path: Path) -> Iterator[Followed]:
    yield Followed(tmp_path / "models", tmp_path / "out")


def test_versions_are_served_as_they_come_and_one_that_is_being_copied_when_it_is_whole(
    followed: Followed, tmp_path: Path
) -> None:
    models = tmp_path / "models"
    assert not followed.follower.look()
    exported(models / "000120", version=120)
    assert followed.follower.look() and not followed.follower.look()
    made, there = exported(tmp_path / "made", small_model(seed=5), version=180), models / "000180"
    there.mkdir()
    for path in sorted(made.iterdir(), key=lambda path: path.name != "config.json"):  # that first
        data = path.read_bytes()
        for part in (data[:-7], data):
            (there / path.name).write_bytes(part)
            taken = followed.follower.look()
            assert taken or str(there) in followed.follower.facts["error"]
            assert not taken or path.read_bytes() == data
    assert [model.version for model in followed.served] == [120, 180]
    assert (followed.follower.facts["state"], followed.follower.facts["steps_behind"]) == ("following", 0)
    shutil.rmtree(models)  # what is served is a copy
    assert not followed.follower.look()
    assert "no snapshot any more" in followed.follower.facts["error"]
    load_folder(tmp_path / "out" / "000000180")


def test_a_model_that_is_replaced_by_an_older_one_has_a_higher_number(followed: Followed, tmp_path: Path) -> None:
    for version in (90, 120, 100):
        exported(tmp_path / "models", version=version)
        assert followed.follower.look()
    assert [model.version for model in followed.served] == [90, 120, 121]
    assert followed.follower.facts["step"] == 100


def test_a_version_that_cannot_be_served_leaves_what_is_and_takes_no_room(followed: Followed, tmp_path: Path) -> None:
    exported(tmp_path / "models", version=90)
    assert followed.follower.look()
    config = unseal_json((tmp_path / "models" / CONFIG).read_bytes())
    config |= {"version": 91, "kind": "clouds"}
    (tmp_path / "models" / CONFIG).write_bytes(seal_json(config))
    for _ in range(3):
        assert not followed.follower.look()
    assert "is a model of kind 'clouds'; this version serves" in followed.follower.facts["error"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["000000090"]


def test_the_model_of_a_training_is_told_from_one_to_serve(followed: Followed, tmp_path: Path) -> None:
    save_model(tmp_path / "models", small_model())
    assert not followed.follower.look()
    assert "is the model of a training; write one to serve" in followed.follower.facts["error"]
