"""Two ranks in sync mode equal one worker with the joint batch, up to rounding."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.integration import sync_script

SCRIPT = Path(__file__).with_name("sync_script.py")


def test_two_ranks_equal_one_worker_with_the_joint_batch(served: Callable[..., Any], tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(SCRIPT)]
    done = subprocess.run([*torchrun, served(2).address, str(tmp_path / "two.npz")], capture_output=True, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:].decode()
    threads = torch.get_num_threads()
    sync_script.main(served(2).address, str(tmp_path / "one.npz"))
    torch.set_num_threads(threads)
    two, one = (np.load(tmp_path / f"{name}.npz") for name in ("two", "one"))
    for field in (f"{select}/{what}" for select in sync_script.SELECTIONS for what in ("losses", "rows", "dense")):
        np.testing.assert_allclose(two[field], one[field], rtol=2e-4, atol=2e-5, err_msg=field)
    for select in sync_script.SELECTIONS:
        assert np.abs(one[f"{select}/rows"]).max() > 0.3  # it did train: initial rows stay near 0.1
