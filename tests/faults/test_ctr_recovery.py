"""A run of a click model that is killed goes on from its newest snapshot."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from geartrain.ams.storage.snapshot.folder import list_snapshots
from tests.support.command_line import typed
from tests.support.movielens_files import write_movielens


def test_a_killed_run_goes_on_from_its_newest_snapshot(tmp_path: Path) -> None:
    films, out = write_movielens(tmp_path / "films"), tmp_path / "run"
    settings = ["--steps=30", "--logger=none", "--set=batch_size=50", "--set=dim=4", "--set=snapshots.steps=5"]
    command = [sys.executable, "-m", "geartrain", "worker", "ctr", "--data", str(films), "--out", str(out), *settings]
    environment = {**os.environ, "GEARTRAIN_FAILPOINTS": "job.save.before=kill@4"}
    killed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    newest = next(listed.snapshot for listed in list_snapshots(out / "snapshots") if listed.snapshot)
    assert 0 < newest.manifest.step < 30
    assert not (out / "report.json").exists()
    done = typed("worker", "ctr", "--resume", str(out), "--logger=none")
    assert done.returncode == 0, done.stderr
    assert f"Going on at step {newest.manifest.step}" in done.stdout
    assert json.loads((out / "report.json").read_text(encoding="utf-8"))["steps"] == 30
