"""What the README shows is what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def run_block(number: int) -> str:
    code = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)[number]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_loop_of_embeddings_trains() -> None:
    losses = [float(line.split()[1]) for line in run_block(0).splitlines()]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.1  # half of the samples were clicked, by chance


def test_the_loop_of_a_class_head_trains() -> None:
    losses = [float(line.split()[1]) for line in run_block(1).splitlines()]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 2  # of random labels, with the random numbers of the day


def test_it_is_a_page_of_at_most_120_lines() -> None:
    assert len(README.splitlines()) <= 120
