"""What the README shows is what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from geartrain.cli.main import COMMANDS

REPOSITORY = Path(__file__).resolve().parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def test_the_example_trains() -> None:
    code = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)[0]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(losses) == 20
    assert losses[-1] < losses[0] / 2


def test_the_other_examples_run(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)[1:]
    assert len(blocks) >= 3
    for number, code in enumerate(blocks):
        (tmp_path / f"block_{number}.py").write_text(code, encoding="utf-8")
    run = f"import runpy; [runpy.run_path(f'block_{{n}}.py') for n in range({len(blocks)})]"
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_every_command_is_in_the_table() -> None:
    table = "".join(re.findall(r"^\| `geartrain .*$", README, flags=re.MULTILINE))
    assert [name for name in COMMANDS if name not in table] == []


def test_every_linked_file_exists() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert [target for target in targets if "://" not in target and not (REPOSITORY / target).exists()] == []
