"""Two ranks in sync mode equal one worker with the joint batch, up to rounding."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).with_name("sync_script.py")


@pytest.mark.parametrize("select", ["partial", "full"])
def test_two_ranks_equal_one_worker_with_the_joint_batch(
    served: Callable[..., object], tmp_path: Path, select: str
) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    results = {}
    for name, launcher in (("two", torchrun), ("one", [])):
        out = tmp_path / f"{name}.npz"
        address: str = served(2).address  # type: ignore[attr-defined]
        command = [sys.executable, *launcher, str(SCRIPT), address, select, str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, done.stderr[-3000:]
        results[name] = np.load(out)
    for field in ("losses", "rows", "dense"):
        np.testing.assert_allclose(results["two"][field], results["one"][field], rtol=2e-4, atol=2e-5, err_msg=field)
    assert np.abs(results["one"]["rows"]).max() > 0.3  # it did train: initial rows stay near 0.1
