"""Each tutorial of the site does what it says: its blocks are taken from the page and run, in the order of the page.

A ``python`` block with a title is a file, those without one are a single program. An ``sh`` block with the title of a
terminal is typed there; one without a title is for the reader alone.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.pages import DEADLINE_SECONDS, DOCS, Block, await_text, blocks_of, losses_in, program_of, run
from tests.support.rank_processes import run_ranks
from tests.support.role_process import RoleProcess

pytestmark = pytest.mark.slow
ADDRESS = "127.0.0.1:7000"
"""What the pages say; a test's cluster listens at a free port."""


class Reader:
    """Somebody who does what a tutorial says, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = ADDRESS
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, "GEARTRAIN_SCHEDULER__LISTEN": "127.0.0.1:0"}

    def save(self, block: Block) -> None:
        (self.folder / block.title).write_text(block.code.replace(ADDRESS, self.address), encoding="utf-8")

    def type(self, block: Block) -> str:
        """Run a block and return what it prints."""
        command = block.code.replace(ADDRESS, self.address)
        done = subprocess.run(
            ["bash", "-euc", command],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    @contextmanager
    def running(self, block: Block) -> Iterator[Path]:
        """Leave a block running in a terminal of its own; yields the file that shows what it prints."""
        shown = self.folder / f"{block.title}.txt"
        command = f"exec {block.code.replace(ADDRESS, self.address)}"
        with (
            shown.open("wb") as out,
            subprocess.Popen(
                ["bash", "-euc", command], cwd=self.folder, env=self.environment, stdout=out, stderr=subprocess.STDOUT
            ) as process,
        ):
            try:
                yield shown
            finally:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(30)
                finally:
                    process.kill()

    def await_cluster(self, shown: Path) -> None:
        """Wait until ``geartrain up`` says where it listens."""
        found = await_text(shown, r'scheduler"?:? "?(127\.0\.0\.1:\d+)')
        self.address = found.group(1)
        self.environment |= {"GEARTRAIN_SERVER__SCHEDULER": self.address}


def test_the_first_head_learns_like_nn_linear_and_is_the_same_after_loading(tmp_path: Path) -> None:
    printed = run(program_of("tutorials/first-head.md"), tmp_path)
    in_cluster = re.findall(r"^\[(.*)\] for ", printed, flags=re.MULTILINE)
    alone = re.findall(r"^\[\((.*)\)\]$", printed, flags=re.MULTILINE)
    assert [re.findall(r"'\w+'", item) for item in alone] == [re.findall(r"'\w+'", item) for item in in_cluster] != []
    ends = {name: float(right) for name, right in re.findall(r"^(\S+)  step .* right (\S+)$", printed, re.MULTILINE)}
    assert ends["nn.Linear"] > 0.7, printed
    assert ends["ClassHead"] > ends["nn.Linear"] - 0.05, printed
    assert float(re.search(r"after loading: right (\S+)", printed)[1]) == ends["ClassHead"]
    for mistake in ("InvalidIds: label 1000 at index 1", "TableExists: table 'words'", "SpecMismatch: the saved state"):
        assert mistake in printed


def test_the_cells_of_the_notebook_show_what_they_say(tmp_path: Path) -> None:
    cells = json.loads((DOCS / "tutorials/explore-head.ipynb").read_text(encoding="utf-8"))["cells"]
    printed = run("\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"), tmp_path)
    unsure, others, added, retired = (
        float(found) for found in re.findall(r": +(?:right )?(\d\.\d+)$", printed, re.MULTILINE)
    )
    assert unsure < others - 0.2, printed
    assert added > 0.6, printed  # without training, beside 390 classes that lose no point by it
    assert retired > 0.6, printed
    assert "class 1 in " in printed
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)  # what runs is what is shown


def test_a_slow_gear_learns_and_serves_most_features_from_its_cache(tmp_path: Path) -> None:
    printed = run(program_of("tutorials/slow-gear.md"), tmp_path)
    losses = losses_in(printed)
    assert losses[-1] < losses[0] / 2, printed
    assert int(re.search(r"(\d+) % of the features", printed)[1]) > 50, printed
    assert ", 0 waiting" in printed


def test_the_tree_of_items_finds_what_users_like(tmp_path: Path) -> None:
    lists = json.loads(run(program_of("tutorials/tdm.md"), tmp_path).splitlines()[-1])
    assert [len(item) for item in lists] == [5, 5, 5]
    right = [item % 10 == user for user, entry in enumerate(lists) for item in entry]
    assert sum(right) > 10, lists


def run_script(rank: int, ranks: int, folder: Path, arguments: list[str]) -> None:
    """What one process of torchrun does with the script of the page; leaves its losses."""
    script: dict[str, Any] = runpy.run_path(str(folder / "train_in_scopes.py"))
    with contextlib.chdir(folder):
        losses = script["train"](script["arguments"](arguments))
    (folder / f"losses-{rank}-of-{ranks}.json").write_text(json.dumps(losses))


def losses_of(command: str, folder: Path) -> list[float]:
    """Those of all steps of a command of the page; the same on every rank."""
    launcher, _, typed = command.partition(" train_in_scopes.py")
    if launcher == "python":
        run_script(0, 1, folder, typed.split())
        ranks = 1
    else:
        ranks = int(launcher.removeprefix("torchrun --rdzv-backend loopback --nproc-per-node "))
        run_ranks(run_script, ranks, folder, typed.split())
    first, *others = [json.loads((folder / f"losses-{rank}-of-{ranks}.json").read_text()) for rank in range(ranks)]
    assert all(losses == first for losses in others)
    return [float(loss) for loss in first]


def test_one_script_has_the_same_losses_on_one_device_replicated_split_and_sharded(tmp_path: Path) -> None:
    blocks = blocks_of("tutorials/parallel.md")
    script = "\n\n\n".join(block.code.strip("\n") for block in blocks if block.title == "train_in_scopes.py") + "\n"
    assert script == (DOCS.parent / "examples/train_in_scopes.py").read_text(encoding="utf-8")
    (tmp_path / "train_in_scopes.py").write_text(script, encoding="utf-8")
    first, then = [block.code.splitlines() for block in blocks if block.title == "terminal"]
    alone, *others = [losses_of(command, tmp_path) for command in first]
    assert alone[-1] < 2.5 < 7 < alone[0]
    for losses in others:
        assert losses == pytest.approx(alone, rel=0.02)
        assert losses[:5] == pytest.approx(alone[:5], rel=1e-4)
    three, one = [losses_of(command, tmp_path) for command in then]
    assert three == pytest.approx(one, rel=1e-3)
    assert three[0] < 2 * alone[-1]
    printed = run(program_of("tutorials/parallel.md"), tmp_path)
    for mistake in ("'backbone.1.weight' is in no scope", "'body' is no module", "Sequential, which cannot be split"):
        assert mistake in printed


def test_torchrun_starts_the_script_of_the_page(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "loopback", "--nproc-per-node", "2"]
    script = DOCS.parent / "examples/train_in_scopes.py"
    done = subprocess.run(
        [*torchrun, str(script), "--scopes", "split", "--steps", "2"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "rank 1 of 2: 248,072 parameters are here" in done.stdout
    assert len(losses_in(done.stdout)) == 2


def test_the_first_cluster_trains_saves_and_restores(tmp_path: Path) -> None:
    up, *rest = [block for block in blocks_of("tutorials/first-cluster.md") if block.title]
    reader = Reader(tmp_path)
    with reader.running(up) as shown:
        reader.await_cluster(shown)
        printed = ""
        for block in rest:
            if block.language == "python":
                reader.save(block)
            else:
                assert block.title == "terminal 2"
                printed += reader.type(block)
    losses = losses_in(printed)
    assert losses[-1] < 1 < losses[0], printed
    assert "step-000000050" in printed
    assert (tmp_path / "sku.safetensors").stat().st_size > 0
    assert "sku" in printed.rpartition("ready:")[2], printed


def test_a_training_whose_shard_is_killed_ends_with_the_loss_of_an_undisturbed_one(tmp_path: Path) -> None:
    up, train, second, third = [block for block in blocks_of("tutorials/recover.md") if block.title]
    reader = Reader(tmp_path)
    with reader.running(up):
        reader.await_cluster(tmp_path / "cluster.json")
        shorter = train.code.replace("CLASSES, STEPS = 1_000, 300", "CLASSES, STEPS = 1_000, 150")  # shows as much
        reader.save(replace(train, code=shorter))
        with reader.running(second) as shown:
            await_text(shown, "saved at step 100")
            reader.type(third)
            disturbed = await_text(shown, r"last loss (\S+)").group(1)
            assert "going on from step" in shown.read_text(encoding="utf-8")
        undisturbed = reader.type(second)
    assert "going on" not in undisturbed
    assert losses_in(undisturbed)[-1] == float(disturbed)


def test_a_newcomer_is_served_as_the_tutorial_says(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs pip install 'geartrain[serve]'")
    (page,) = [block for block in blocks_of("tutorials/to-production.md") if block.title == "train.py"]
    reader = Reader(tmp_path)
    reader.save(page)
    reader.type(replace(page, code="python train.py"))
    arguments = ("--follow", str(tmp_path / "live" / "people"), "--listen", "127.0.0.1:0")
    with RoleProcess("serve", *arguments, errors=tmp_path / "serve.log") as role:
        connection = http.client.HTTPConnection(role.address, timeout=DEADLINE_SECONDS)
        until, status = time.monotonic() + DEADLINE_SECONDS, 0
        while status != 200:
            assert time.monotonic() < until, (tmp_path / "serve.log").read_text()
            body = json.dumps({"features": [[1.0] * 64], "k": 1000})
            connection.request("POST", "/v1/models/people/nearest", body)
            response = connection.getresponse()
            status, said = response.status, json.loads(response.read())
    assert said["version"] == 30
    named = {found["class"] for found in said["answers"][0]}
    assert len(named) == 1000
    assert "somebody new" in named
    assert "person 0" not in named


def test_what_is_searched_for_is_found_by_faiss_as_by_the_model(tmp_path: Path) -> None:
    pytest.importorskip("faiss", reason="needs pip install 'geartrain[serve]'")
    printed = run(program_of("tutorials/search.md"), tmp_path)
    assert "faiss: ['class 7', 'class 1234']\nmodel: ['class 7', 'class 1234']\npicture 42 1.00" in printed
