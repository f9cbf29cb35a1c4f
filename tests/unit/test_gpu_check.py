"""The first minutes with a GPU are not spent on mistakes of the script: it runs here, small, and stops at nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from scripts import gpu_check


def test_what_measures_on_a_device_runs_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--dry", "--out", str(tmp_path), "--only", "waits", "captured", "head", "graph"]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["waits"]["found"]["steps"] > 6
    assert {case["case"] for case in report["head"]["found"]["cases"]} >= {"1 M full, bf16 rows"}
    assert "measured over modelled, worst first" in capsys.readouterr().out


def test_a_part_that_fails_or_hangs_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel = {"kernel": "slow", "starts": 2, "measured_ms": 3.0, "modelled_ms": 1.0}
    case = {"case": "a step", "ours_ms": 8.0, "modelled_ms": 2.0, "launches": 9, "kernels": [kernel]}
    commands = {
        "broken": ("raise SystemExit(3)", 60),
        "endless": ("import threading; print('began', flush=True); threading.Event().wait()", 2),
        "head": (f"print({json.dumps(json.dumps({'cases': [case]}))})", 60),
    }
    listed = [(name, [sys.executable, "-c", code], limit) for name, (code, limit) in commands.items()]
    monkeypatch.setattr(gpu_check, "parts", lambda **_: listed)
    assert gpu_check.main(["--dry", "--out", str(tmp_path)]) == 1
    report = json.loads((tmp_path / "report.json").read_text())
    assert [report[name]["exit"] for name in commands] == [3, 124, 0]
    assert "began" in report["endless"]["output"]
    said = capsys.readouterr().out
    assert said.index("4.00  the whole step, 9 launches, 8.00 ms: a step") < said.index("3.00  slow, 2 x")
    assert "FAILED broken: exit code 3" in said
    assert "FAILED endless: exit code 124 (out of time)" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_before_it_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "require", lambda *_: None)
    monkeypatch.setattr(gpu_check, "build_core", lambda: pytest.fail("built"))
    with pytest.raises(SystemExit, match="sees no CUDA device here; with --dry"):
        gpu_check.main([])
