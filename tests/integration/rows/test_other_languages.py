"""The page for other languages, typed as it stands: Node, by proto/ and the page alone, with two shards."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from geartrain.ams.client.factory import connect, local
from geartrain.ams.values.placement import bucket_of
from tests.integration.conftest import ServedCluster
from tests.support.command_line import typed
from tests.support.pages import DOCS, blocks_of

PAGE = "how-to/other-languages.md"


def test_node_trains_a_table_of_two_shards_and_its_snapshot_is_restored(
    tmp_path: Path, served: Callable[..., ServedCluster]
) -> None:
    if shutil.which("npm") is None:
        pytest.skip("needs Node with npm")
    terminal, script, *_ = blocks_of(PAGE)
    install, start = terminal.code.splitlines()
    try:
        done = subprocess.run(install.split(), cwd=tmp_path, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        pytest.skip("no registry of npm answers")
    if done.returncode:
        pytest.skip(f"npm installs nothing here: {done.stderr[-200:]}")
    cluster = served(2)
    (tmp_path / script.title).write_text(script.code, encoding="utf-8")
    (tmp_path / "proto").symlink_to(DOCS.parent / "proto")
    line = start.replace("127.0.0.1:7000", cluster.address).split()
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "of 2 shards" in done.stdout

    ids = np.arange(100)
    rows = np.stack([0.5 - ids, 0.5 + ids], axis=1).astype(np.float32)
    with connect(cluster.address) as ours:
        np.testing.assert_array_equal(ours.table("words").pull(ids), rows)
    shown = typed("snapshot", "list", str(tmp_path / "snapshots"))
    assert shown.returncode == 0 and "step-000000001" in shown.stdout, shown.stderr
    with local(num_shards=3) as another:
        another.restore(tmp_path / "snapshots" / "step-000000001")
        np.testing.assert_array_equal(another.table("words").pull(ids), rows)
        another.table("words").push(ids, np.ones((100, 2), np.float32))
        np.testing.assert_array_equal(another.table("words").pull(ids), rows - 1)


def test_the_buckets_that_the_page_names_are_right() -> None:
    said = (DOCS / PAGE).read_text(encoding="utf-8")
    assert "of 0, 1, 2 and 1000 they are 3618, 2320, 2421 and 961" in said
    assert bucket_of(np.array([0, 1, 2, 1000]), dense=False).tolist() == [3618, 2320, 2421, 961]
