"""A training of a model of clicks is followed, too: each version is an export of one snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from geartrain.ams.storage.snapshot.folder import list_snapshots, open_snapshot
from geartrain.serving.folder import load_folder
from geartrain.serving.live.follow import Follower
from geartrain.serving.live.training import training_of
from geartrain.serving.live.versions import LiveVersions
from geartrain.workers.ctr.export import export_clicks
from geartrain.workers.job.options import SnapshotSettings
from tests.support.served_models import require_onnx
from tests.unit.serving.models.test_clicks_model import CACHE, as_json, asked, held_out, trained


def test_a_model_of_clicks_answers_as_its_export_does(tmp_path: Path) -> None:
    require_onnx()
    run = trained(tmp_path, "deepfm", 0)
    export_clicks(run, tmp_path / "model", cache=CACHE, say=print)
    served: list[Any] = []
    versions = LiveVersions(tmp_path / "versions")
    follower = Follower(training_of(str(run)), versions, lambda version: served.append(load_folder(version.folder)))
    assert follower.poll(), follower.facts
    assert not follower.poll()
    (model,) = served
    assert (model.kind, model.version, follower.facts["step"]) == ("clicks", 40, 40)
    body = {"samples": as_json(held_out(tmp_path, 0))[:20]}
    expected = load_folder(tmp_path / "model")
    assert asked(model.operations["click"], body) == asked(expected.operations["click"], body)
    assert [path.name for path in (tmp_path / "versions").iterdir()] == ["000000040"]


@pytest.mark.slow
def test_where_the_newest_snapshot_is_damaged_the_whole_one_before_it_is_served_under_a_number_of_its_own(
    tmp_path: Path,
) -> None:
    require_onnx()
    run = trained(tmp_path, "deepfm", 0, snapshots=SnapshotSettings(steps=10, keep=4))
    newest, before, whole, *_ = (run / "snapshots" / listed.name for listed in list_snapshots(run / "snapshots"))
    step = int(whole.name[-9:])
    (before / "manifest.json").write_bytes(b"{}")
    block = next(path for path in newest.iterdir() if path.name.startswith("rows-"))
    block.write_bytes(block.read_bytes()[:-1])
    (tmp_path / "versions" / f"{step:09}").mkdir(parents=True)  # as damage leaves it
    versions, served = LiveVersions(tmp_path / "versions"), list[Any]()
    follower = Follower(training_of(str(run)), versions, lambda version: served.append(load_folder(version.folder)))
    assert follower.poll(), follower.facts
    assert [(model.version, model.facts["training"]["step"]) for model in served] == [(step + 1, step)]
    facts = follower.facts
    assert (facts["state"], facts["step"], facts["steps_behind"]) == ("failing", step, 40 - step)
    assert block.name in facts["error"]
    samples = as_json(held_out(tmp_path, 0))[:5]
    export_clicks(open_snapshot(whole), tmp_path / "model", cache=CACHE, say=print)
    expected = asked(load_folder(tmp_path / "model").operations["click"], {"samples": samples})
    assert asked(served[0].operations["click"], {"samples": samples}) == expected
