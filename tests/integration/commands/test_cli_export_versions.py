"""``geartrain export TABLE FOLDER`` against real processes: while training goes on, killed, and on a full disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.snapshots.follower import TableFollower
from geartrain.ams.client.table import Table
from geartrain.ams.observe.failpoints import armed
from geartrain.ams.storage.export.versions import version_names
from geartrain.ams.values.placement import bucket_of
from tests.integration.commands.test_cli import TIMEOUT_SECONDS, assert_one_line_error, role
from tests.integration.conftest import ServedCluster
from tests.support.command_line import typed

IDS = np.arange(400)
MARKED = np.arange(300, 400)


def write(table: Table, seed: int) -> None:
    random = np.random.default_rng(seed)
    table.push(random.choice(300, 30, replace=False), random.standard_normal((30, 4)).astype(np.float32))


@contextmanager
def following(address: str, folder: Path, *options: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    arguments = ["export", "t", str(folder), "--follow", "--every=0.05", "--json", "--scheduler", address, *options]
    with subprocess.Popen(
        [sys.executable, "-m", "geartrain", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def training(cluster: Cluster) -> Iterator[list[int]]:
    """Another thread writes the same number to all MARKED rows, or removes all of them, again and again."""
    written, done = [0], threading.Event()

    def train() -> None:
        table = cluster.table("t")
        while not done.is_set():
            if written[0] % 5 == 4:
                table.remove(MARKED)
            table.assign(MARKED, np.full((len(MARKED), 4), 1000 + written[0], np.float32))
            written[0] += 1

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield written
    finally:
        done.set()
        thread.join()


def assert_of_one_write_on_each_shard(cluster: Cluster, follower: TableFollower) -> None:
    ids, rows = follower.rows()
    shard_of = cluster._calls.view.bucket_shards[bucket_of(MARKED, dense=False)]
    for shard in range(2):
        mine = np.isin(ids, MARKED[shard_of == shard])
        assert np.count_nonzero(mine) in (0, np.count_nonzero(shard_of == shard)), "some of the rows were removed"
        assert len(np.unique(rows[mine])) <= 1, "rows are of several writes"


def said(process: subprocess.Popen[str]) -> dict[str, object]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.stderr and process.stderr.read()
    found: dict[str, object] = json.loads(line)
    return found


def test_versions_follow_a_training_through_kills_and_full_disks(tmp_path: Path) -> None:
    folder = tmp_path / "e"
    with role("up", "--shards=2", "--scheduler-listen=127.0.0.1:0", "--json") as ready:
        at = ready["scheduler"]
        with gt.connect(at) as cluster:
            table = cluster.create_table("t", dim=4, optimizer=gt.Adagrad(0.1))
            write(table, 0)

            def await_equal(follower: TableFollower) -> None:
                deadline = time.monotonic() + 60
                while follower.pull(IDS).tobytes() != table.pull(IDS).tobytes():
                    assert time.monotonic() < deadline, "what was written did not come"
                    follower.refresh()
                    time.sleep(0.01)

            # Killed when the files of version 1 are there, before its manifest is.
            with following(at, folder, GEARTRAIN_FAILPOINTS="manifest.write.before=kill") as process:
                assert process.wait(TIMEOUT_SECONDS) == -signal.SIGKILL
            assert version_names(folder) == []
            with following(at, folder) as process:
                assert said(process) | {"seconds": 0, "bytes": 0} == {
                    "version": 1, "since": None, "path": str(folder / "version-000000001"), "rows": 30, "bytes": 0,
                    "seconds": 0,
                }  # fmt: skip
                follower = TableFollower(folder)
                for seed in range(1, 5):
                    write(table, seed)
                    assert said(process)["since"] == seed
                    await_equal(follower)
                process.send_signal(signal.SIGINT)
                assert process.wait(TIMEOUT_SECONDS) == 0
                assert process.stderr is not None
                assert process.stderr.read().endswith(f"ended after version 5 of {folder}\n")
            write(table, 5)
            with armed("manifest.write.before=error(ENOSPC)"):
                full = typed("export", "t", str(folder), "--scheduler", at)
                assert_one_line_error(full, 1, "No space left", "Free space on that disk")
            assert follower.refresh() is None
            done = typed("export", "t", str(folder), "--scheduler", at)
            assert done.returncode == 0, done.stderr
            assert done.stdout.startswith("version 6: 30 rows, written since version 5, ")
            await_equal(follower)
            done = typed("export", "t*", str(folder), "--compact", "--keep=1", "--scheduler", at)
            assert done.stdout.startswith(f"version 6 is whole: {len(follower)} rows, ")
            assert version_names(folder) == ["version-000000006-whole"]
            assert TableFollower(folder).rows()[1].tobytes() == follower.rows()[1].tobytes()
            assert typed("export", "t", str(folder), "--since=6", "--scheduler", at).stdout.startswith(
                "version 7: 0 rows"
            )
            done = typed("export", "t", str(tmp_path / "t.safetensors"), "--scheduler", at)
            assert done.returncode == 0, done.stderr
            arrays = load_file(tmp_path / "t.safetensors")
            assert arrays["weight"].tobytes() == table.pull(arrays["ids"]).tobytes()
            assert sorted(arrays["ids"]) == follower.rows()[0].tolist()
            assert list(tmp_path.glob(".*")) == [], "something was left behind"
            wrong = typed("export", "t", str(folder), "--since=3", "--scheduler", at)
            assert_one_line_error(wrong, 1, "version 3 is not in", "versions 6 to 7")
            wrong = typed("export", "t", "t.pt", "--scheduler", at)
            assert_one_line_error(wrong, 2, "t.pt is no file to export to")
            wrong = typed("export", "t", "t.safetensors", "--follow", "--scheduler", at)
            assert_one_line_error(wrong, 2, "for versions of a table")
            wrong = typed("export", "t", str(folder), "--every=5", "--scheduler", at)
            assert_one_line_error(wrong, 2, "--every 5 is the pause", "add --follow")
            wrong = typed("export", "u", str(folder), "--compact", "--scheduler", at)
            assert_one_line_error(wrong, 2, "holds versions of t, not of u")


def test_follow_goes_on_when_a_lost_shard_is_back_and_restored(
    served: Callable[..., ServedCluster], tmp_path: Path
) -> None:
    folder, shards = tmp_path / "e", served(2)
    with gt.connect(shards.address) as cluster:
        table = cluster.create_table("t", dim=4, optimizer=gt.Adagrad(0.1))
        write(table, 0)
        path = cluster.snapshot(tmp_path / "s").result(60)
    with following(shards.address, folder) as process:
        assert said(process)["version"] == 1
        follower = TableFollower(folder)
        with gt.connect(shards.address) as cluster:
            write(cluster.table("t"), 1)  # lost with the shard
            with training(cluster) as written:
                while follower.version < 4 or written[0] < 20:
                    follower.refresh()
                    assert_of_one_write_on_each_shard(cluster, follower)
            live = cluster.table("t").pull(IDS).tobytes()
        while follower.pull(IDS).tobytes() != live:
            said(process)
            follower.refresh()
        before = follower.pull(IDS).tobytes()
        shards.servers[1].stop(0)
        shards.servers[1] = shards.start_server(1)
        with gt.connect(shards.address) as cluster:
            cluster.restore(path, replace=True)
            live = cluster.table("t").pull(IDS).tobytes()
        assert live != before
        while said(process)["since"] is not None:  # the first version after the restore is whole
            pass
        follower.refresh()
        assert follower.pull(IDS).tobytes() == live
