"""A traced step: two lanes for each rank, and how much of the communication is hidden."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import geartrain as gt
from geartrain.ams.values.errors import ConfigError, InvalidArgument, SyncError
from geartrain.bridge.parallel.overlap.trace import RankTimes, TracedRange, TracedStep
from tests.support.rank_processes import run_ranks

INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: (min(pair), max(pair))))


def moments(intervals: list[tuple[float, float]]) -> set[int]:
    return {moment for start, end in intervals for moment in range(int(start), int(end))}


@given(INTERVALS, INTERVALS)
def test_hidden_are_the_moments_of_both(told: list[tuple[float, float]], computed: list[tuple[float, float]]) -> None:
    lanes = ((told, True), (computed, False))
    ranges = [TracedRange("x", start, end - start, is_told) for lane, is_told in lanes for start, end in lane]
    times = RankTimes(0, 30.0, ranges)
    assert times.communication_seconds == len(moments(told))
    assert times.hidden_seconds == len(moments(told) & moments(computed))


def test_communication_beside_computation_is_hidden() -> None:
    ranges = [
        TracedRange("aten::mm", 0.0, 1.0, False),
        TracedRange("aten::add", 0.5, 1.5, False),  # to 2.0
        TracedRange("gloo:all_gather", 1.0, 2.0, True),  # to 3.0, one second of it hidden
        TracedRange("gloo:all_reduce", 2.5, 1.5, True),  # to 4.0
        TracedRange("aten::mul", 3.5, 0.25, False),
    ]
    trace = TracedStep(Path("x"), [RankTimes(0, 4.0, ranges)])
    assert trace.seconds == 4.0
    assert trace.compute_seconds == 2.25
    assert trace.communication_seconds == 3.0
    assert trace.hidden_seconds == 1.25
    assert trace.hidden_fraction == pytest.approx(1.25 / 3)
    assert trace.summary().splitlines()[-1].endswith("of which hidden 1250.0 ms, 42%; 2 collectives a rank")


def traced_ranks(rank: int, folder: Path) -> None:
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 16)))
    head = gt.ClassHead(None, "classes", num_classes=50, dim=16, rows="ranks")
    step, rows = gt.MicroBatches(net, head, 2), gt.RowOptimizer(head)
    images, labels = torch.randn(6, 8), torch.arange(6)
    for number in range(2):
        with gt.trace_step(folder / f"step-{number}.json") as trace:
            with pytest.raises(InvalidArgument, match="has not ended"):
                trace.summary()
            step(images, labels).backward()
            rows.step()
    assert 0 <= trace.hidden_seconds <= trace.communication_seconds <= trace.seconds
    assert 0 < trace.compute_seconds <= trace.seconds
    assert [rank.rank for rank in trace.ranks] == ([0, 1] if rank == 0 else [1])
    assert trace.summary().count("\n") == len(trace.ranks)
    kind, text = (ConfigError, "no-folder") if rank == 0 else (SyncError, "not written")
    with pytest.raises(kind, match=text), gt.trace_step(folder / "no-folder" / "step.json"):
        pass


def test_lanes_of_all_ranks_are_written(tmp_path: Path) -> None:
    run_ranks(traced_ranks, 2, tmp_path)
    events = json.loads((tmp_path / "step-1.json").read_text())["traceEvents"]
    lanes = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert lanes == {(0, 0): "compute", (0, 1): "communication", (1, 0): "compute", (1, 1): "communication"}
    for rank in (0, 1):
        told = {event["name"] for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) == (rank, 1)}
        done = {event["name"] for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) == (rank, 0)}
        assert {"gloo:all_gather", "gloo:all_reduce"} <= told  # features, DDP's buckets
        assert {"aten::addmm", "aten::tanh", "geartrain::row_chunks"} <= done
        assert not any(name.startswith(("gloo", "c10d")) for name in done)


def test_one_process_has_nothing_to_hide(tmp_path: Path) -> None:
    with gt.trace_step(tmp_path / "step.json") as trace:
        torch.ones(30, 30) @ torch.ones(30, 30)
    assert trace.communication_seconds == 0
    assert trace.hidden_fraction == 1
    assert trace.compute_seconds > 0


def test_a_trace_in_a_trace_is_refused(tmp_path: Path) -> None:
    with (
        gt.trace_step(tmp_path / "outer.json") as outer,
        pytest.raises(InvalidArgument, match="a profiler is at work already"),
        gt.trace_step(tmp_path / "inner.json"),
    ):
        pass
    torch.ones(3).sum()
    assert outer.seconds > 0
    assert not (tmp_path / "inner.json").exists()


def test_what_fails_inside_is_raised_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), gt.trace_step(tmp_path / "step.json"):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InvalidArgument, match="path is 3"), gt.trace_step(3):  # type: ignore[arg-type]
        pass
