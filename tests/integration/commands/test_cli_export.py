"""``geartrain export`` and ``geartrain plan``."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from safetensors.numpy import load_file

import geartrain as gt
from geartrain.cli.training import plan_fit
from geartrain.cli.training.plan import _without_triton
from tests.support.command_line import invoke


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


def test_plan_says_whether_a_hashed_table_fits_its_hosts() -> None:
    sizes = ["--ids", "1e9", "--dim", "16", "--memory", "64GB"]
    said = invoke("plan", *sizes, "--hosts", "4").stdout
    assert "1,000,000,000 ids of width 16, float32, adagrad; 4 shards on 4 hosts" in said
    assert "slots         14.9 GiB    64.0 bytes a row" in said
    assert ": fits; 1,289," in said
    assert "does not fit" in (said := invoke("plan", *sizes, "--hosts", "2").stdout) and "it takes --hosts 4" in said
    told = json.loads(invoke("plan", *sizes, "--hosts", "4", "--shards", "8", "--json").stdout)
    assert told["fits"] and told["shards"] == 8 and told["hosts_needed"] == 4
    uneven = json.loads(invoke("plan", *sizes, "--hosts", "4", "--shards", "6", "--json").stdout)
    assert uneven["host_bytes"] > 4 / 3 * 0.95 * told["host_bytes"]  # two of six, not two of eight
    for wrong, why in (
        (["--dim", "16"], "give --classes"),
        ([*sizes, "--hosts", "4", "--shards", "2"], "--shards is 2"),
        ([*sizes[:4], "--memory", "64XB"], "--memory is '64XB'"),
        *((["--dim", "16", "--ids", number], f"--ids is {number}") for number in ("0", "-5", "inf", "nan")),
    ):
        with pytest.raises(gt.errors.ConfigError, match=why):
            invoke("plan", *wrong)


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


def test_plan_prints_the_step_of_a_head_beside_those_of_its_rivals(tmp_path: Path) -> None:
    head = ["--classes", "100000", "--dim", "64", "--rows", "ranks", "--ranks", "16", "--batch-size", "32"]
    step = ["--backbone", "stroke_net", "--image-size", "32", "--channels", "1", "--hardware", "v100-25gbit"]
    said = invoke("plan", *head, *step, "--compare").stdout
    assert "modelled by the peaks of data sheets" in said
    assert "slots (moments)" in said and "16 ranks of 32 samples each, v100-25gbit (8 ranks a node)" in said
    for rival in ("ClassHead on the ranks", "everything replicated", "head split, the rest replicated"):
        assert f"{rival}: " in said
    assert "gradients of features" in said and "expected step " in said
    planned = json.loads(invoke("plan", *head, *step, "--json").stdout)["step"]
    assert planned["scopes"] == {"backbone": "Replicate(shard=False)", "head": "Split()"}
    assert planned["reasons"] == [] and planned["is_by_peaks"]
    parted = json.loads(invoke("plan", *head, *step, "--micro-batches", "4", "--json").stdout)["step"]
    assert parted["step"]["hidden"] > planned["step"]["hidden"]
    replace(gt.Hardware.named("v100-25gbit"), ranks_per_node=16).write(tmp_path / "one-node.yaml")
    near = json.loads(invoke("plan", *head, *step[:-1], str(tmp_path / "one-node.yaml"), "--json").stdout)["step"]
    assert near["step"]["communication"] < planned["step"]["communication"] / 5
    sparse = json.loads(invoke("plan", *head, *step, "--sparsity", "0.999", "--json").stdout)["step"]
    assert sparse["sent_bytes"] < planned["sent_bytes"] / 2


def test_plan_reaches_a_hundred_million_classes_whatever_its_rivals_would_need() -> None:
    head = ["--dim", "512", "--rows", "ranks", "--ranks", "256", "--sparsity", "0.999", "--sample-rate", "0.1"]
    step = ["--backbone", "stroke_net", "--image-size", "32", "--channels", "1", "--hardware", "v100-25gbit"]
    said = invoke("plan", "--classes", "10000000", *head, *step, "--compare").stdout
    assert "everything replicated: not possible (a tensor has 5120000000 elements" in said
    drawn, near = (
        json.loads(invoke("plan", "--classes", "100000000", *head, *step, *more, "--json").stdout)["step"]
        for more in ([], ["--k", "1000"])
    )
    (told,) = [each for each in near["collectives"] if each["what"] == "counts of neighbours"]
    assert told["bytes"] == 8 * 1000
    assert near["sent_bytes"] - drawn["sent_bytes"] == pytest.approx(2 * told["bytes"], rel=0.01)
    assert near["step"]["seconds"] > drawn["step"]["seconds"]
    products = 2 * 100_000_000 * 390_625 * 512 / 125e12  # of a rank, in float16
    assert (drawn["graph_seconds"], near["graph_seconds"]) == (0, pytest.approx(products, rel=0.35))
    halves = json.loads(
        invoke("plan", "--classes", "1000000", *head, *step, "--network-dtype", "float16", "--json").stdout
    )
    (features,) = [each for each in halves["step"]["collectives"] if each["what"] == "features"]
    assert features["bytes"] == 256 * 128 * 512 * 2


def test_plan_loads_torchs_formulas_without_triton() -> None:
    known = sys.modules.get("triton")
    with mock.patch.dict(sys.modules):
        sys.modules.pop("triton", None)
        with _without_triton(), pytest.raises(ImportError):
            importlib.import_module("triton")
        assert "triton" not in sys.modules
    with _without_triton():  # as whoever loaded it has it
        assert sys.modules.get("triton") is known
    assert sys.modules.get("triton") is known


def test_plan_finds_the_most_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    step = ["--backbone", "stroke_net", "--image-size", "32", "--channels", "1", "--hardware", "v100"]
    head = ["--dim", "512", "--rows", "ranks", "--ranks", "8", "--momentum"]
    head += ["--dtype", "float16", "--slot-dtype", "float16"]
    most = json.loads(invoke("plan", "--fit", "classes", *head, *step, "--json").stdout)
    assert most["fit"] == {"classes": most["num_classes"]} and most["step"]["fits"]
    assert 90_000_000 < most["num_classes"] < 32 * 10**9 * 8 / 2048  # rows and momentum of 1 KiB each
    more = ["--classes", str(int(1.001 * most["num_classes"]))]
    assert not json.loads(invoke("plan", *more, *head, *step, "--json").stdout)["step"]["fits"]
    one_machine = ["--fit", "classes", "--dim", "512", "--memory", "64GB", "--hosts", "4"]
    assert "at most 37," in invoke("plan", *one_machine).stdout  # 6,144 bytes a row, in half of the memory or more
    sizes = ["--classes", "20000000", *head, *step]
    found = json.loads(invoke("plan", "--fit", "batch", "--k", "100", *sizes, "--json").stdout)
    assert found["batch_size"] == found["fit"]["samples a rank"] > found["fit"]["with both"]
    assert found["fit"]["samples a rank"] > found["fit"]["with float32 rows"]
    assert found["step"]["fits"] and found["step"]["rank_bytes"] > 0.99 * 32e9
    few = ["--fit", "batch", "--classes", "9", *head, *step]
    monkeypatch.setattr(plan_fit, "_MAX_SAMPLES", 64)
    said = "at least 63 samples a rank; at least 63 with float32 rows, in the 32.0 GB of a rank"
    assert said in invoke("plan", *few).stdout
    assert json.loads(invoke("plan", *few, "--json").stdout)["fit"]["samples a rank"] == 63
    monkeypatch.setattr(plan_fit, "_MAX_CLASSES", 1024)
    assert "at least 1,023 classes, in the 64.0 GB of a host (--memory)\n" in invoke("plan", *one_machine).stdout
    for wrong, why in (
        (["--fit", "rows", "--classes", "9"], "--fit is 'rows'; it must be classes, or batch"),
        (["--fit", "classes", "--classes", "9"], "leave --classes out"),
        (["--fit", "batch", "--classes", "9"], "say --hardware, too"),
        (["--fit", "batch", "--batch-size", "9", *sizes], "leave --batch-size out"),
        (["--fit", "classes", "--memory", "1kB"], "not one class fits into 0.0 GB: take more ranks"),
        (["--fit", "classes", "--memory", "64"], "--memory is '64', 64 bytes; say of what it is, as 64GB"),
        (["--fit", "classes", "--ids", "9"], "or --ids for a hashed table"),
    ):
        with pytest.raises((gt.errors.ConfigError, gt.errors.InvalidArgument), match=why):
            invoke("plan", *wrong, *([] if "--dim" in wrong else ["--dim", "8"]))


@pytest.mark.parametrize("option", ["--hosts", "--batch-size"])
def test_plan_refuses_none_of_what_it_counts(option: str) -> None:
    done = invoke("plan", "--classes", "9", "--dim", "8", option, "0")
    assert done.exit_code == 2 and option in done.output


def test_plan_refuses_a_step_that_it_cannot_know() -> None:
    head = ["--classes", "1000", "--dim", "8"]
    with pytest.raises(gt.errors.InvalidArgument, match="Give --rows ranks, or leave --hardware out"):
        invoke("plan", *head, "--hardware", "h200")
    for of_a_step in (["--sparsity", "0.9"], ["--micro-batches", "4"], ["--compare"], ["--network-dtype", "float16"]):
        with pytest.raises(gt.errors.ConfigError, match="say what it runs on, too, by --hardware"):
            invoke("plan", *head, *of_a_step)
    with pytest.raises(gt.errors.InvalidArgument, match="no hardware is named 'h2000'; there are "):
        invoke("plan", *head, "--rows", "ranks", "--hardware", "h2000")
    with pytest.raises(gt.errors.ConfigError, match="the backbone 'resnet' is unknown"):
        invoke("plan", *head, "--rows", "ranks", "--hardware", "h200", "--backbone", "resnet")
    glyphs = ["--rows", "ranks", "--hardware", "h200", "--backbone", "stroke_net", "--image-size"]
    with pytest.raises(gt.errors.InvalidArgument, match=r"does not take images \[128, 3, 36, 36\]"):
        invoke("plan", *head, *glyphs, "36")
    with pytest.raises(gt.errors.InvalidArgument, match="cannot be made for images of 4 x 4"):
        invoke("plan", *head, *glyphs, "4")
