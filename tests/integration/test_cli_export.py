"""``geartrain export`` and ``geartrain plan``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

import geartrain as gt
from geartrain.cli.main import build_app


def invoke(*arguments: str) -> Any:
    result = CliRunner().invoke(build_app([*arguments]), [*arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_table_of_a_running_cluster_becomes_a_file(served: Callable[..., Any], tmp_path: Path) -> None:
    address, out = served(2).address, tmp_path / "w.safetensors"
    with gt.connect(address) as cluster:
        table = cluster.create_table("w", dim=4, num_rows=9_000, optimizer=gt.SGD(0.1))
        rows = np.random.default_rng(0).standard_normal((9_000, 4), np.float32)
        table.assign(np.arange(9_000), rows)
    said = invoke("plan", "--classes", "100", "--dim", "8", "--adam").stdout
    assert "slots (moments)" in said
    assert "C = 100 classes, D = 8 their width, A = 100 active classes, B = 128 samples" in said
    assert "slots: what the optimizer keeps" in said and "Not counted: the backbone" in said
    told = json.loads(invoke("export", "w", str(out), "--scheduler", address, "--json").stdout)
    assert told == {"file": str(out), "rows": 9_000, "dim": 4, "dtype": "float32"}
    assert np.array_equal(load_file(out)["weight"], rows)
    with pytest.raises(gt.errors.TableNotFound, match="no table 'v'"):
        invoke("export", "v", str(out), "--scheduler", address)


def test_plan_prints_the_memory_of_a_head() -> None:
    sizes = ["--classes", "1000000", "--dim", "512"]
    settings = [*sizes, "--dtype", "float16", "--slot-dtype", "float16"]
    assert "per class 2,058.1 bytes" in invoke("plan", *settings, "--momentum").stdout
    assert "per class 6,156.1 bytes" in invoke("plan", *sizes).stdout  # AdamW: the rows, twice as much, and a number
    assert "slots (moments)" in invoke("plan", "--classes", "100", "--dim", "8", "--adam").stdout
    assert "slots (moments)" in invoke("plan", "--classes", "100", "--dim", "8", "--optimizer", "adam").stdout
    with pytest.raises(gt.errors.InvalidArgument, match="there is no optimizer 'adams'; there are sgd"):
        invoke("plan", *settings, "--optimizer", "adams")
    told = json.loads(invoke("plan", *settings, "--rows", "ranks", "--ranks", "8", "--sgd", "--json").stdout)
    assert told["bytes_per_class"] == 1032
    assert told["rank_bytes"] > 125_000 * 1024
    with pytest.raises(gt.errors.InvalidArgument, match="rows is 'here'"):
        invoke("plan", *settings, "--rows", "here")
