"""The tutorial of Ray does what it says, and so do the examples with Ray Data and Ray Train."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages import blocks_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
REPOSITORY = Path(__file__).resolve().parents[3]


def printed_by(script: Path, folder: Path) -> str:
    settings = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=480,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_tutorial_ends_with_the_same_loss_whatever_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed; it comes with pip install 'geartrain[ray]'")
    (program,) = [block for block in blocks_of("tutorials/ray.md") if block.title == "on_ray.py"]
    script = tmp_path / program.title
    script.write_text(program.code, encoding="utf-8")
    printed = printed_by(script, tmp_path)
    losses = re.findall(r"last loss (\d+\.\d+)", printed)
    assert len(losses) == 3, printed
    assert len(set(losses)) == 1, printed


@pytest.mark.parametrize("example", ["train_with_ray_data", "train_with_ray_train"])
def test_an_example_trains(example: str, tmp_path: Path) -> None:
    for part in ("ray", "pandas", "pyarrow"):
        pytest.importorskip(part, reason=f"{part} is not installed; it comes with pip install 'ray[data,train]'")
    assert re.search(r"AUC 0\.[789]", printed_by(REPOSITORY / "examples" / f"{example}.py", tmp_path))
