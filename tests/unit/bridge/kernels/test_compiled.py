"""Kernels compile for GPUs that are not here, without a spill, and take no more than the table says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
REPOSITORY = Path(__file__).resolve().parents[4]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("only", [pytest.param([], marks=pytest.mark.slow, id="all"), ["--changed"]])
def test_every_kernel_compiles_without_a_spill_and_as_the_table_says(only: list[str]) -> None:
    if only and not (REPOSITORY / ".cache/kernels").exists():
        pytest.skip("no kernel was compiled here before: 'make test-slow' and 'make kernels' compile all")
    done = subprocess.run(
        [sys.executable, "-m", "scripts.kernels.compile", "--capability", "90", "--jobs", "1", *only],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
