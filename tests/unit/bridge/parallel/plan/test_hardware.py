"""Hardware as data: files, published clusters, checks, and what is measured here."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.parallel.plan.hardware import CLUSTERS, Hardware
from geartrain.bridge.parallel.plan.trace import Collective, Kind
from tests.support.rank_processes import run_ranks

SMALL = Hardware(
    name="two nodes of two",
    flops={"float32": 1e9},
    memory_bandwidth=1e9,
    memory_bytes=10**6,
    ranks_per_node=2,
    intra_node_bandwidth=1e6,
    inter_node_bandwidth=1e5,
    intra_node_latency_seconds=1e-3,
    inter_node_latency_seconds=2e-3,
)


@pytest.mark.parametrize("name", CLUSTERS)
def test_published_clusters_are_written_and_read_back(name: str, tmp_path: Path) -> None:
    one = Hardware.named(name)
    one.write(tmp_path / "cluster.yaml")
    assert Hardware.read(tmp_path / "cluster.yaml") == one
    (tmp_path / "cluster.json").write_text(json.dumps(one.to_dict()))
    assert Hardware.read(tmp_path / "cluster.json") == one


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"memory_bandwidth": 0}, "memory_bandwidth is 0; it must be above zero"),
        ({"flops": {"float16": 1e12}}, "'float32' among them"),
        ({"flops": {"float32": "1e12"}}, r"flops\['float32'\] is '1e12'; it must be a number"),
        ({"overlap": 1.5}, "overlap is 1.5; it must be from 0 to 1"),
        ({"ranks_per_node": 0}, "ranks_per_node is 0"),
        ({"inter_node_latency_seconds": math.inf}, "it must be finite"),
    ],
)
def test_a_rate_that_cannot_be_is_refused_by_name(change: dict[str, Any], error: str) -> None:
    with pytest.raises(InvalidArgument, match=error):
        replace(SMALL, **change)


def test_a_file_with_an_unknown_field_or_without_any_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("name: x\nmemory_bandwith: 1.0e+9\n")
    with pytest.raises(InvalidArgument, match=r"cluster\.yaml.*no field 'memory_bandwith'"):
        Hardware.read(path)
    path.write_text("[1, 2")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        Hardware.read(path)
    with pytest.raises(InvalidArgument, match="there are v100-25gbit, v100-35gbit"):
        Hardware.named("tpu")


def test_a_ring_is_as_fast_as_its_slowest_link() -> None:
    assert SMALL.link(2) == (1e6, 1e-3)
    assert SMALL.link(4) == (1e5, 2e-3)

    def seconds(kind: Kind, num_bytes: int, ranks: int) -> float:
        return Collective(kind=kind, what="", phase="forward", bytes=num_bytes, ranks=ranks).seconds(SMALL)

    # 2 (R-1)/R of the bytes and 2 turns; the halves of it for gather and scatter
    assert seconds("all-reduce", 10**6, 4) == pytest.approx(1.5 * 10 + 6 * 2e-3)
    assert seconds("all-gather", 10**6, 4) == pytest.approx(0.75 * 10 + 3 * 2e-3)
    assert seconds("reduce-scatter", 10**6, 2) == pytest.approx(0.5 + 1e-3)
    assert seconds("send", 10**6, 2) == pytest.approx(1.0 + 1e-3)
    assert seconds("all-reduce", 10**6, 1) == 0.0
    # a few numbers travel whole, in as few turns as can be
    assert seconds("all-reduce", 4, 4) == pytest.approx(2 * (2e-3 + 4e-5))


def measured_by_all(rank: int, ranks: int, folder: Path) -> None:
    one = Hardware.measure()
    (folder / f"{rank}.json").write_text(json.dumps(one.to_dict()))
    assert one.ranks_per_node == ranks
    assert 0 < one.intra_node_bandwidth < math.inf
    assert one.link(ranks)[1] > 0


def test_all_ranks_measure_the_same_hardware(tmp_path: Path) -> None:
    run_ranks(measured_by_all, 2, tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first["flops"]["float32"] > first["memory_bandwidth"] / 100
