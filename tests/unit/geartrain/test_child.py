"""The child processes of the launcher."""

from __future__ import annotations

import os
import queue
from pathlib import Path

import pytest

from geartrain.launch.child import Child


def test_a_role_runs_no_module_of_the_folder_that_it_was_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("psutil", "yaml", "numpy", "grpc"):
        (tmp_path / f"{name}.py").write_text("import pathlib\npathlib.Path('ran').touch()\nraise SystemExit(7)\n")
    monkeypatch.chdir(tmp_path)
    seen: queue.SimpleQueue[Child] = queue.SimpleQueue()
    arguments = ["scheduler", "--listen=127.0.0.1:0", "--num-shards=1"]
    child = Child("scheduler", arguments, os.environ, on_line=str, on_ready=seen.put, on_exit=seen.put)
    try:
        seen.get(timeout=60)
        assert child.facts is not None, list(child.tail)
    finally:
        child.terminate()
        child.stop(20.0)
    assert not (tmp_path / "ran").exists()
