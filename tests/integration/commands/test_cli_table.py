"""``geartrain table``, and the second run of a script whose table is still there."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import numpy as np
import pytest

import geartrain as gt
from geartrain.ams.values.errors import ConfigError, InvalidArgument, TableExists, TableNotFound
from tests.integration.conftest import ServedCluster
from tests.support.command_line import invoke


def table_command(*arguments: str, answer: str | None = None) -> tuple[int, str, str]:
    result = invoke("table", *arguments, answer=answer)
    return result.exit_code, result.stdout, result.stderr


def test_a_table_that_a_job_left_is_listed_and_dropped_after_asking(served: Callable[..., ServedCluster]) -> None:
    address = served(2).address
    at = ["--scheduler", address]
    assert table_command("list", *at)[1] == "this cluster has no table\n"
    with gt.connect(address) as cluster:
        for name in ("left", "kept"):
            table = cluster.create_table(name, dim=4, optimizer=gt.SGD(0.1), num_rows=100)
            table.push(np.arange(100), np.ones((100, 4), np.float32))
    listed = json.loads(table_command("list", "--json", *at)[1])
    assert [(table["name"], table["rows"]) for table in listed] == [("left", 100), ("kept", 100)]
    assert "left: 100 rows of dim 4, ids below 100" in table_command("list", *at)[1]

    code, _, asked = table_command("drop", "left", *at, answer="n\n")
    assert (code, "Drop 'left' (100 rows)?" in asked) == (1, True)
    with pytest.raises(TableNotFound, match="no table 'nope'; tables: 'left', 'kept'"):
        table_command("drop", "left", "nope", "--yes", *at)
    with pytest.raises(ConfigError, match="--yes"):
        table_command("drop", "left", "--json", *at)
    assert len(json.loads(table_command("list", "--json", *at)[1])) == 2

    code, out, _ = table_command("drop", "left", *at, answer="y\n")
    assert (code, "dropped left" in out) == (0, True)
    assert [table["name"] for table in json.loads(table_command("list", "--json", *at)[1])] == ["kept"]


def test_rows_of_a_shard_that_does_not_answer_are_said_not_to_be_counted(served: Callable[..., ServedCluster]) -> None:
    cluster = served(2)
    with gt.connect(cluster.address) as connected:
        connected.create_table("t", dim=4, optimizer=gt.SGD(0.1), num_rows=100)
    at = ["--scheduler", cluster.address]
    assert table_command("list", *at)[2] == ""
    cluster.servers[1].stop(0)
    _, out, said = table_command("list", *at)
    assert "t: 0 rows of dim 4" in out
    assert said == "rows and writes of shard 1 (lost) are not counted\n"


def test_a_script_that_runs_twice_is_told_the_command_that_lets_it(served: Callable[..., ServedCluster]) -> None:
    address = served(2).address
    with gt.connect(address) as cluster:
        cluster.create_table("t 1", dim=4, optimizer=gt.SGD(0.1))
        with pytest.raises(TableExists, match="reuse=True") as caught:
            cluster.create_table("t 1", dim=4, optimizer=gt.SGD(0.1))
        assert re.search(r"geartrain table drop 't 1'", str(caught.value))
        code, out, _ = table_command("drop", "t 1", "--yes", "--json", "--scheduler", address)
        assert (code, json.loads(out)) == (0, {"dropped": {"t 1": 0}})
        cluster.create_table("t 1", dim=4, optimizer=gt.SGD(0.1))


def test_a_table_is_altered_by_a_command(served: Callable[..., ServedCluster]) -> None:
    address = served(2).address
    at = ["--scheduler", address]
    with gt.connect(address) as cluster:
        table = cluster.create_table("t", dim=4, optimizer=gt.Adam(0.1, betas=(0.8, 0.99)), max_bytes=100_000)
        code, out, _ = table_command("alter", "t", "--without", "max_bytes", "--min-count", "3", *at)
        assert (code, "max_bytes is None, not 100000" in out, "admission is MinCount(" in out) == (0, True, True)
        more = ["--optimizer", "lr=0.05", "--optimizer", "eps=1e-6", "--unseen-steps", "50"]
        told = json.loads(table_command("alter", "t", *more, "--json", *at)[1])
        assert (told["optimizer"]["scalars"]["lr"], told["expiry"]["steps"]) == (0.05, 50)
        table.pull(np.arange(10))
        spec = table.spec
        assert spec.optimizer == gt.Adam(0.05, betas=(0.8, 0.99), eps=1e-6)
        assert (spec.max_bytes, spec.expiry, spec.admission) == (None, gt.Unseen(steps=50), gt.MinCount(3))
        assert table_command("alter", "t", "--min-count", "3", *at)[1] == "t: it was so already\n"
    for wrong, match in (
        ([], "say what to alter: --max-bytes"),
        (["--without", "dim"], "--without is 'dim'; it must be max_bytes, expiry or admission"),
        (["--without", "expiry", "--unseen-seconds", "5"], "--unseen-seconds and --without expiry contradict"),
        (["--optimizer", "lr"], r"--optimizer is \['lr'\]; each must be a name and a number: lr=0.05"),
    ):
        with pytest.raises(ConfigError, match=match):
            table_command("alter", "t", *wrong, *at)
    with pytest.raises(InvalidArgument, match="momentum"):
        table_command("alter", "t", "--optimizer", "momentum=0.5", *at)
