"""``geartrain snapshot`` as a person or a script meets it, against real processes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from geartrain.ams.client.factory import connect, local
from geartrain.ams.values.optimizers.registry import SparseMomentum
from tests.integration.commands.test_cli import assert_one_line_error, geartrain, role
from tests.support.command_line import typed

IDS = np.arange(500)


def take(folder: Path, *steps: int) -> None:
    with local(2) as cluster:
        table = cluster.create_table("t", dim=4, optimizer=SparseMomentum(lr=0.1), num_rows=500)
        for step in steps:
            table.push(IDS, np.ones((500, 4), np.float32))
            cluster.snapshot(folder, step=step).result(60)


def test_a_cluster_is_saved_and_restored_on_another_number_of_shards(tmp_path: Path) -> None:
    with role("up", "--shards=2", "--scheduler-listen=127.0.0.1:0", "--json") as ready:
        at = ["--scheduler", ready["scheduler"]]
        with connect(ready["scheduler"]) as cluster:
            table = cluster.create_table("t", dim=4, optimizer=SparseMomentum(lr=0.1), num_rows=500)
            table.push(IDS, np.ones((500, 4), np.float32))
            rows = table.pull(IDS)
        created = geartrain("snapshot", "create", str(tmp_path), "--step=7", "--json", *at)
        assert created.returncode == 0, created.stderr
        facts = json.loads(created.stdout)
        assert (facts["name"], facts["step"], facts["rows"]) == ("step-000000007", 7, {"t": 500})
        again = typed("snapshot", "restore", str(tmp_path), *at)
        assert_one_line_error(again, 1, "table 't' of the snapshot exists already", "drop it")
    with role("up", "--shards=3", "--scheduler-listen=127.0.0.1:0", "--json") as ready:
        at = ["--scheduler", ready["scheduler"]]
        restored = geartrain("snapshot", "restore", str(tmp_path), *at)
        assert restored.returncode == 0, restored.stderr
        assert "500 rows" in restored.stdout
        with connect(ready["scheduler"]) as cluster:
            np.testing.assert_array_equal(cluster.table("t").pull(IDS), rows)


def test_snapshots_are_listed_checked_and_pruned(tmp_path: Path) -> None:
    take(tmp_path, 1, 2, 3)
    listed = json.loads(typed("snapshot", "list", str(tmp_path), "--json").stdout)
    assert [facts["step"] for facts in listed] == [3, 2, 1]
    sound = typed("snapshot", "verify", str(tmp_path))
    assert sound.returncode == 0
    assert "step-000000003: sound, step 3" in sound.stdout
    pruned = typed("snapshot", "prune", str(tmp_path), "--keep=2")
    assert pruned.stdout == "removed step-000000001\n"

    block = next((tmp_path / "step-000000003").glob("rows-*"))
    block.write_bytes(block.read_bytes()[:-1])
    damaged = typed("snapshot", "verify", str(tmp_path / "step-000000003"))
    assert damaged.returncode == 1
    assert block.name in damaged.stdout
    assert "1 fault" in damaged.stdout


def test_a_damaged_newest_snapshot_is_passed_over_only_on_request(tmp_path: Path) -> None:
    take(tmp_path, 1, 2)
    block = next((tmp_path / "step-000000002").glob("rows-*"))
    block.unlink()
    with role("up", "--shards=1", "--scheduler-listen=127.0.0.1:0", "--json") as ready:
        at = ["--scheduler", ready["scheduler"]]
        refused = typed("snapshot", "restore", str(tmp_path), *at)
        assert_one_line_error(refused, 1, block.name, "it is missing", "allow")
        allowed = typed("snapshot", "restore", str(tmp_path), "--allow-fallback", *at)
        assert allowed.returncode == 0, allowed.stderr
        assert "step-000000001" in allowed.stdout


def test_wrong_folders_are_named(tmp_path: Path) -> None:
    for command in ("list", "verify", "restore"):
        assert_one_line_error(typed("snapshot", command, str(tmp_path / "nowhere")), 2, "nowhere", "not a folder")
    assert_one_line_error(typed("snapshot", "verify", str(tmp_path)), 2, "is no snapshot and holds none")
    empty = typed("snapshot", "list", str(tmp_path))
    assert (empty.returncode, "holds no snapshot" in empty.stdout) == (0, True)


def test_an_increment_is_taken_compacted_and_restored_over_what_is_there(tmp_path: Path) -> None:
    with role("up", "--shards=1", "--scheduler-listen=127.0.0.1:0", "--json") as ready:
        at = ["--scheduler", ready["scheduler"]]
        with connect(ready["scheduler"]) as cluster:
            tables = [cluster.create_table(name, dim=4, optimizer=SparseMomentum(lr=0.1)) for name in ("t", "u")]
            tables[0].push(IDS, np.ones((500, 4), np.float32))
            cluster.snapshot(tmp_path, "a").result(60)
            tables[0].push(IDS[:9], np.ones((9, 4), np.float32))
            rows = tables[0].pull(IDS)
            created = geartrain("snapshot", "create", str(tmp_path), "--name=b", "--table=t", "--parent=a", *at)
            assert "9 rows" in created.stdout, created.stderr
            assert "added to a" in created.stdout
            compacted = json.loads(typed("snapshot", "compact", str(tmp_path), "--as=c", "--json").stdout)
            assert (compacted["name"], compacted["parent"], compacted["rows"]) == ("c", None, {"t": 500})
            assert_one_line_error(typed("snapshot", "compact", str(tmp_path / "c")), 2, "'c'", "whole already")
            tables[0].push(IDS, np.ones((500, 4), np.float32))
            for name, more in (("b", ()), ("c", ("--table=t",))):
                restored = typed("snapshot", "restore", str(tmp_path / name), "--replace", *more, *at)
                assert restored.returncode == 0, restored.stderr
                np.testing.assert_array_equal(cluster.table("t").pull(IDS), rows)
