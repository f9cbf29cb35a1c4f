"""Heads and dense modules whose rows travel in 16 bits: trained as in float32 but for rounding, kept in float32."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.values.errors import InvalidArgument, TableNotFound
from tests.support import heads

CLASSES, DIM, BATCH, STEPS = 60, 16, 32, 12


batch = partial(heads.make_batch, BATCH, CLASSES, DIM)


def trained(cluster: Cluster, name: str, **settings: object) -> gt.ClassHead:
    head = heads.make_head(
        cluster, name, num_classes=CLASSES, dim=DIM, optimizer=gt.SGD(0.5), initializer=gt.Normal(std=0.1), **settings
    )  # type: ignore[arg-type]
    rows = gt.RowOptimizer(head)
    for step in range(STEPS):
        head(*batch(step)).backward()
        rows.step()
    return head


def distance(head: gt.ClassHead, other: gt.ClassHead) -> float:
    return float((head.weights() - other.weights()).abs().max())


@pytest.mark.parametrize("rows_cache_bytes", [64 << 20, 0])  # held, streamed
def test_a_head_learns_what_it_learns_in_float32_but_for_rounding(rows_cache_bytes: int) -> None:
    with gt.local(2) as cluster:
        settings = {"rows_cache_bytes": rows_cache_bytes, "margin": None}
        wide = trained(cluster, "a", **settings)
        with gt.local(2) as others:
            narrow = trained(others, "a", wire_dtype="bfloat16", **settings)
            assert 0 < distance(wide, narrow) < 0.02
            assert wide.weights().abs().max() > 0.3
            exact = others.table("a").pull(torch.arange(CLASSES))
            torch.testing.assert_close(narrow.weights(), exact, rtol=0, atol=0)  # what is kept or shown is not rounded
            assert (exact != exact.bfloat16()).any()


def test_only_rows_that_travel_have_a_wire() -> None:
    with gt.local() as cluster:
        for rows, owner in (("hosted", cluster), ("ranks", None)):
            with pytest.raises(InvalidArgument, match=r"wire_dtype is 'float16', and of head 'a' no rows travel"):
                gt.ClassHead(owner, "a", num_classes=9, dim=4, rows=rows, config=gt.HeadConfig(wire_dtype="float16"))
        with pytest.raises(InvalidArgument, match="rows of table 'a' are bfloat16"):
            gt.ClassHead(
                cluster, "a", num_classes=9, dim=4, config=gt.HeadConfig(dtype="bfloat16", wire_dtype="float16")
            )
        with pytest.raises(TableNotFound):
            cluster.table("a")
        head = gt.ClassHead(cluster, "a", num_classes=9, dim=4, config=gt.HeadConfig(wire_dtype="float16"))
        with pytest.raises(InvalidArgument, match="wire_dtype of ClassHead 'a' cannot be set"):
            head.wire_dtype = None


def test_a_plan_of_memory_counts_gradients_on_the_wire() -> None:
    def plan(**wire: object) -> dict[str, int]:
        report = gt.memory_report(**heads.head_settings(num_classes=100_000, dim=128, select=gt.PartialFC(0.1), **wire))  # type: ignore[arg-type]
        return {part.name: part.bytes for part in report.parts}

    assert "gradients in 16 bits" not in plan()
    assert plan(wire_dtype="bfloat16")["gradients in 16 bits"] == 10_000 * 128 * 2


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(DIM, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def test_a_dense_module_in_16_bits_follows_the_one_in_float32() -> None:
    """Gradients are given: the weights are the sum of all of them, each rounded."""
    torch.manual_seed(0)
    with gt.local() as cluster:
        module = Small()
        dense = gt.attach(module, cluster, name="small", optimizer=gt.SGD(1.0), dim=32, wire_dtype="bfloat16")
        table = cluster.table("small")
        before = table.pull(torch.arange(table.spec.num_rows or 0)).double()
        total: dict[str, Tensor] = {}
        for step in range(200):
            random = torch.Generator().manual_seed(step)
            for name, item in module.named_parameters():
                item.grad = 1e-2 + 1e-4 * torch.rand(item.shape, generator=random)
                total[name] = total.get(name, torch.zeros(item.shape).double()) + item.grad.bfloat16().double()
            dense.step()
        moved = (before - table.pull(torch.arange(table.spec.num_rows or 0)).double()).flatten()
        expected = torch.cat([item.flatten() for item in total.values()])
        torch.testing.assert_close(moved[: len(expected)], expected, rtol=0, atol=5e-5)
        for parameter in module.parameters():
            torch.testing.assert_close(parameter.detach(), parameter.detach().bfloat16().float(), rtol=0, atol=0)


def test_a_wrong_wire_makes_no_table_of_a_module() -> None:
    with gt.local() as cluster:
        with pytest.raises(InvalidArgument, match="wire_dtype is 'half'"):
            gt.attach(Small(), cluster, name="small", wire_dtype="half")  # type: ignore[arg-type]
        with pytest.raises(TableNotFound):
            cluster.table("small")
