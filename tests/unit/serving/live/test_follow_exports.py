"""A folder to which models are exported is followed, too; what is still being copied is no version yet."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from geartrain.ams.storage.snapshot.manifest import seal_json, unseal_json
from geartrain.ams.values.config import ClientConfig, ServeConfig
from geartrain.ams.values.errors import InvalidArgument
from geartrain.serving.batching import Batcher
from geartrain.serving.catalog import Catalog
from geartrain.serving.folder import load_folder
from geartrain.serving.live.follow import Follower
from geartrain.serving.live.start import follow
from geartrain.serving.live.training import training_of
from geartrain.serving.live.versions import LiveVersions
from geartrain.serving.service import ModelService
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
    assert not followed.follower.poll()
    error = f"there is no snapshot yet in {models}, which does not exist; it is looked for again"
    assert (followed.follower.facts["state"], followed.follower.facts["error"]) == ("waiting", error)
    exported(models / "000120", version=120)
    assert followed.follower.poll() and not followed.follower.poll()
    made, there = exported(tmp_path / "made", version=180), models / "000180"
    there.mkdir()
    for path in sorted(made.iterdir(), key=lambda path: path.name != "config.json"):  # that first
        data = path.read_bytes()
        for part in (data[:-7], data):
            (there / path.name).write_bytes(part)
            taken = followed.follower.poll()
            assert taken or str(there) in followed.follower.facts["error"]
            assert not taken or path.read_bytes() == data
    assert [model.version for model in followed.served] == [120, 180]
    assert (followed.follower.facts["state"], followed.follower.facts["steps_behind"]) == ("following", 0)
    shutil.rmtree(models)  # what is served is a copy
    assert not followed.follower.poll()
    assert "no snapshot any more" in followed.follower.facts["error"]
    load_folder(tmp_path / "out" / "000000180")


def test_a_model_that_is_replaced_by_an_older_one_has_a_higher_number(followed: Followed, tmp_path: Path) -> None:
    for version in (90, 120, 100):
        exported(tmp_path / "models", version=version)
        assert followed.follower.poll()
    assert [model.version for model in followed.served] == [90, 120, 121]
    assert followed.follower.facts["step"] == 100


def test_a_version_that_cannot_be_served_leaves_what_is_and_takes_no_room(followed: Followed, tmp_path: Path) -> None:
    exported(tmp_path / "models", version=90)
    assert followed.follower.poll()
    config = unseal_json((tmp_path / "models" / CONFIG).read_bytes())
    config |= {"version": 91, "kind": "clouds"}
    (tmp_path / "models" / CONFIG).write_bytes(seal_json(config))
    for _ in range(3):
        assert not followed.follower.poll()
    assert "is a model of kind 'clouds'; this version serves" in followed.follower.facts["error"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["000000090"]


def test_the_model_of_a_training_is_told_from_one_to_serve(followed: Followed, tmp_path: Path) -> None:
    save_model(tmp_path / "models", small_model())
    assert not followed.follower.poll()
    assert "is the model of a training; write one to serve" in followed.follower.facts["error"]


def test_while_nothing_is_served_an_older_version_is_taken_where_the_newest_is_damaged(
    followed: Followed, tmp_path: Path
) -> None:
    models = tmp_path / "models"
    for version in (90, 120, 180, 200):
        exported(models / f"{version:06d}", version=version)
    (models / "000200" / CONFIG).write_text("{}")
    damaged = models / "000180" / "backbone.onnx"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert followed.follower.poll()
    for _ in range(2):
        assert [model.version for model in followed.served] == [120]
        facts = followed.follower.facts
        assert (facts["state"], facts["step"]) == ("failing", 120)
        assert facts["seconds_behind"] > 0
        assert str(models / "000200") in facts["error"]
        assert not followed.follower.poll()
    shutil.rmtree(models / "000200")
    exported(models / "000200", version=200)
    assert followed.follower.poll()
    assert [model.version for model in followed.served] == [120, 200]


def test_what_somebody_rolled_back_to_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported(tmp_path / "models", version=90)
    service = ModelService(Catalog(load_folder), Batcher(threads=0))
    told = ServeConfig(follow=f"m={tmp_path / 'models'}", versions=str(tmp_path / "out"), keep=2)
    with ExitStack() as cleanup:
        follower = follow(service, told, ClientConfig(), cleanup)
        follower.close()  # from here on it looks when it is told to
        follower.poll()
        exported(tmp_path / "models", version=120)
        assert follower.poll()
        exported(tmp_path / "models", version=150)
        write = LiveVersions.write

        def write_slowly(*arguments: Any) -> Any:
            service.rollback("m", 90)
            return write(*arguments)

        monkeypatch.setattr(LiveVersions, "write", write_slowly)
        follower.poll()
        assert service.catalog.state("m")["current"] == 90
        assert (follower.facts["state"], follower.facts["step"]) == ("held", 120)  # until it looks again
        assert not follower.poll()
        assert (follower.facts["state"], follower.facts["step"]) == ("held", 90)
        load_folder(tmp_path / "out" / "000000090")
    service.close()


def test_two_services_do_not_write_versions_into_one_folder(tmp_path: Path) -> None:
    exported(tmp_path / "models", version=90)
    told = ServeConfig(follow=f"m={tmp_path / 'models'}", versions=str(tmp_path / "out"))
    services = [ModelService(Catalog(load_folder), Batcher(threads=0)) for _ in range(2)]
    with ExitStack() as first:
        follow(services[0], told, ClientConfig(), first)
        with ExitStack() as second, pytest.raises(InvalidArgument, match="out, which another service writes to"):
            follow(services[1], told, ClientConfig(), second)
    with ExitStack() as second:
        follow(services[1], told, ClientConfig(), second)
    for service in services:
        service.close()
