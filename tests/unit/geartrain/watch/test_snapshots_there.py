"""Which snapshots the page of a cluster lists."""

from __future__ import annotations

from pathlib import Path

from geartrain.watch.dashboard_state import _there


def test_those_that_are_gone_from_a_folder_that_is_here_and_no_others(tmp_path: Path) -> None:
    kept, gone = tmp_path / "step-2", tmp_path / "step-1"
    kept.mkdir()
    elsewhere = ["s3://bucket/runs/step-3", "/mnt/of/another/machine/step-4", "\0"]
    assert _there([str(kept), str(gone), *elsewhere]) == {str(kept), *elsewhere}
