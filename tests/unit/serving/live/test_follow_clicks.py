"""A training of a model of clicks is followed, too: each version is an export of one snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from geartrain.serving.folder import load_folder
from geartrain.serving.live.follow import Follower
from geartrain.serving.live.training import training_of
from geartrain.serving.live.versions import LiveVersions
from geartrain.workers.ctr.export import export_clicks
from tests.support.served_models import require_onnx
from tests.unit.serving.models.test_clicks_model import CACHE, as_json, asked, held_out, trained


def test_a_model_of_clicks_answers_as_its_export_does(tmp_path: Path) -> None:
    require_onnx()
    run = trained(tmp_path, "deepfm", 0)
    export_clicks(run, tmp_path / "model", cache=CACHE, say=print)
    served: list[Any] = []
    versions = LiveVersions(tmp_path / "versions")
    follower = Follower(training_of(str(run)), versions, lambda version: served.append(load_folder(version.folder)))
    assert follower.look(), follower.facts
    assert not follower.look()
    (model,) = served
    assert (model.kind, model.version, follower.facts["step"]) == ("clicks", 40, 40)
    body = {"samples": as_json(held_out(tmp_path, 0))[:20]}
    expected = load_folder(tmp_path / "model")
    assert asked(model.operations["click"], body) == asked(expected.operations["click"], body)
    assert [path.name for path in (tmp_path / "versions").iterdir()] == ["000000040"]
