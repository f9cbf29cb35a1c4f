"""A followed run whose network is code of one's own: the graph is that of the code as it is now."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from geartrain.ams.storage.snapshot.folder import list_snapshots
from geartrain.serving.folder import load_folder
from geartrain.serving.live.versions import LiveVersions
from geartrain.workers.recipes import signs
from tests.support.command_line import typed
from tests.support.served_models import require_onnx

CODE = """
from torch import nn

class Net(nn.Module):
    def __init__(self, channels, dim, size):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(channels * size * size, dim))

    def forward(self, images):
        return {sign} * self.layers(images)

net = Net
"""


@pytest.mark.slow
def test_code_that_changed_makes_another_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_onnx()
    monkeypatch.setattr(signs, "NUM_SIGNS", 4)
    signs.drawn_signs(tmp_path / "pictures")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # an edit within a second would not be seen
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_nets.py").write_text(CODE.format(sign=1))
    sets = [f"--set={one}" for one in ("backbone=own_nets:net", "look.kind=ink", "look.size=16", "dim=8")]
    out = tmp_path / "run"
    done = typed("worker", "classify", "--data", str(tmp_path / "pictures"), "--out", str(out), "--steps", "2", *sets)
    assert done.returncode == 0, done.stderr
    (snapshot, *_) = [listed.snapshot for listed in list_snapshots(out / "snapshots") if listed.snapshot]

    versions, bitmaps = LiveVersions(tmp_path / "versions", backbone="own_nets:net"), np.zeros((2, 1, 16, 16), np.uint8)
    features = []
    for sign in (1, -1):
        (tmp_path / "own_nets.py").write_text(CODE.format(sign=sign))
        features.append(load_folder(versions.write(snapshot, lambda: False).folder).features({"images": bitmaps}))
    assert np.abs(features[0]).max() > 0
    np.testing.assert_allclose(features[1], -features[0])
    again = LiveVersions(tmp_path / "versions", backbone="own_nets:net")  # a process after these
    (tmp_path / "own_nets.py").write_text(CODE.format(sign=1))
    served = load_folder(again.write(snapshot, lambda: False).folder)
    np.testing.assert_allclose(served.features({"images": bitmaps}), features[0])
