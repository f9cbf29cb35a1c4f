"""Rows as an optimizer: what is pushed, when, and with which factor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import local
from geartrain.ams.client.rows.row_calls import RowCalls
from geartrain.ams.programs.selection import FullSoftmax, PartialFC
from geartrain.ams.values.errors import InvalidArgument, NonFinite, ShardUnavailable, TableNotFound
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.specs import Normal
from geartrain.bridge.head.class_head import ClassHead
from geartrain.bridge.head.loss.margins.angular import CosFace
from geartrain.bridge.placements.device_rows import DeviceRows
from geartrain.bridge.rows.optimizer import RowOptimizer
from tests.support import heads
from tests.support.reference import UNIT_SGD, FakeCluster, FakeTable, merged_gradient

HELD, STREAMED = 1 << 30, 0


def make_head(
    cluster: FakeCluster | None = None, name: str = "classes", **settings: Any
) -> tuple[ClassHead, FakeTable]:
    cluster = cluster or FakeCluster()
    parts = {"select": PartialFC(0.1), "margin": CosFace(8, 0.1), "optimizer": UNIT_SGD, "initializer": Normal()}
    defaults = {"num_classes": 60, "dim": 5, **parts}
    head = heads.make_head(cluster, name, **{**defaults, **settings})
    return head, cluster.tables[name]


def batch(size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 5, generator=generator), torch.randint(60, (size,), generator=generator)


@pytest.mark.parametrize("cache_bytes", [HELD, STREAMED])
def test_micro_batches_with_other_active_classes_are_summed_by_class(cache_bytes: int) -> None:
    together, together_table = make_head(select=PartialFC(0.2), rows_cache_bytes=cache_bytes)
    total = np.zeros((60, 5))
    for seed in range(3):
        features, labels = batch(9, seed)
        together(features, labels).backward()
        alone, alone_table = make_head(select=PartialFC(0.2), rows_cache_bytes=cache_bytes)
        alone(features, labels).backward()
        RowOptimizer(alone).step()
        total += merged_gradient(alone_table)
    RowOptimizer(together).step()
    assert len(together_table.pushes) == 1
    np.testing.assert_allclose(merged_gradient(together_table), total, rtol=0, atol=1e-6 * np.abs(total).max())


def test_micro_batches_with_other_active_classes_on_a_rank_are_summed_by_class() -> None:
    def changes(seeds: Sequence[int]) -> torch.Tensor:
        head = ClassHead(
            None,
            "classes",
            num_classes=9000,
            dim=5,
            margin=CosFace(8, 0.1),
            optimizer=SGD(1.0),
            rows="ranks",
            select=PartialFC(0.5),  # two chunks
        )
        assert isinstance(head.table, DeviceRows)
        before = head.table.rows_LD.clone()
        for seed in seeds:
            head(*batch(9, seed)).backward()
        RowOptimizer(head).step()
        return head.table.rows_LD - before

    total = sum(changes([seed]) for seed in range(3))
    torch.testing.assert_close(changes(range(3)), total, rtol=0, atol=1e-5)


def two_heads(cluster: Cluster) -> list[ClassHead]:
    settings: dict[str, Any] = {"num_classes": 60, "dim": 5, "optimizer": UNIT_SGD, "margin": CosFace(8, 0.1)}
    return [heads.make_head(cluster, name, select=FullSoftmax(), **settings) for name in ("first", "second")]


def test_two_heads_send_one_request_to_each_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    together: list[int] = []
    whole = RowCalls.write
    monkeypatch.setattr(RowCalls, "write", lambda self, writes: (together.append(len(writes)), whole(self, writes))[1])
    with local(2) as cluster:
        heads = two_heads(cluster)
        before = [head.table.pull(np.arange(60)) for head in heads]
        features, labels = batch(9)
        for head in heads:
            head(features, labels).backward()
        RowOptimizer(heads).step()
        assert together == [2]
        for head, rows in zip(heads, before, strict=True):
            assert (head.table.pull(np.arange(60)) != rows).any(axis=1).all()
            assert head.table.version() == 1 and not head.row_update.is_pending


def test_of_two_heads_the_one_that_was_refused_is_still_pending() -> None:
    with local(2) as cluster:
        heads = two_heads(cluster)
        features, labels = batch(9)
        for head in heads:
            head(features, labels).backward()
        cluster.drop_table("second")
        rows = RowOptimizer(heads)
        for _ in range(2):
            with pytest.raises(TableNotFound):
                rows.step()
            assert [head.row_update.is_pending for head in heads] == [False, True]
            assert heads[0].table.version() == 1 and heads[0].row_update.step == 1


@pytest.mark.parametrize("cache_bytes", [HELD, STREAMED])
def test_grad_scaler_skips_a_step_that_overflowed(cache_bytes: int) -> None:
    head, table = make_head(rows_cache_bytes=cache_bytes)
    rows, scaler = RowOptimizer(head), torch.amp.GradScaler("cpu", init_scale=2.0**127)
    (scaler.scale(head(*batch(6))) * 1e10).backward()
    scaler.step(rows)
    scaler.update()
    assert table.pushes == []
    assert head.step == 0
    assert scaler.get_scale() == 2.0**126
    scaler.update(1024.0)
    scaler.scale(head(*batch(6))).backward()  # nothing is left of what overflowed, also without zero_grad
    scaler.step(rows)
    assert head.step == 1
    assert all(push.scale == pytest.approx(1 / 1024) for push in table.pushes)


@pytest.mark.parametrize("cache_bytes", [HELD, STREAMED])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_refused_before_any_push(cache_bytes: int, bad: float) -> None:
    cluster = FakeCluster()
    good_head, good_table = make_head(cluster, "good")
    head, table = make_head(cluster, "bad", rows_cache_bytes=cache_bytes)
    rows = RowOptimizer([good_head, head])
    good_head(*batch(4)).backward()
    (head(*batch(4)) * bad).backward()
    with pytest.raises(NonFinite, match="'bad'"):
        rows.step()
    assert good_table.pushes == table.pushes == []
    rows.zero_grad()
    head(*batch(4)).backward()
    rows.step()
    assert len(table.pushes) == 1


@pytest.mark.parametrize("cache_bytes", [HELD, STREAMED])
def test_a_failed_step_can_be_tried_again(cache_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("geartrain.bridge.head.backends.row_stream.block_rows_for", lambda _: 16)
    cluster = FakeCluster()
    head, table = make_head(cluster, select=FullSoftmax(), rows_cache_bytes=cache_bytes)
    other, other_table = make_head(FakeCluster(), select=FullSoftmax(), rows_cache_bytes=cache_bytes)
    rows = RowOptimizer(head)
    head(*batch(4)).backward()
    if cache_bytes == STREAMED:
        monkeypatch.setattr(table, "apply", _failing_once_after_two(table))
    else:
        table.failures.append(ShardUnavailable("shard 0 is away"))
    with pytest.raises(ShardUnavailable):
        rows.step()
    assert head.step == 0
    with pytest.raises(InvalidArgument, match="stopped"):
        head(*batch(4)).backward()
    rows.step()
    assert head.step == 1
    other(*batch(4)).backward()
    RowOptimizer(other).step()
    np.testing.assert_array_equal(table.rows, other_table.rows)


def _failing_once_after_two(table: FakeTable) -> Any:
    apply, calls = table.apply, 0

    def failing(write: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ShardUnavailable("shard 0 is away")
        apply(write)

    return failing


def test_only_heads_are_trained() -> None:
    with pytest.raises(InvalidArgument, match="ClassHead"):
        RowOptimizer()
    with pytest.raises(InvalidArgument, match="ClassHead"):
        RowOptimizer(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="rows only"):
        RowOptimizer(make_head()[0]).add_param_group({"params": [torch.zeros(1, requires_grad=True)]})


def test_streamed_micro_batches_of_different_types_are_refused() -> None:
    head, _ = make_head(select=FullSoftmax(), rows_cache_bytes=0)
    labels = torch.tensor([0, 1])
    head(torch.randn(2, head.dim), labels).backward()
    with pytest.raises(InvalidArgument, match="same autocast, dtype and device"):
        head(torch.randn(2, head.dim, dtype=torch.float64), labels).backward()


def test_what_only_the_storage_type_makes_infinite_is_found_before_anything_is_pushed() -> None:
    with local(2) as cluster:  # a shard that finds it alone would leave the other with its half of the step
        head = ClassHead(cluster, "wide", num_classes=64, dim=4, margin=None, select=FullSoftmax(), optimizer=SGD(0.1))
        rows = RowOptimizer(head)
        before = head.table.pull(np.arange(64))
        (head(torch.ones(3, 4, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)) * 1e39).backward()
        with pytest.raises(NonFinite, match="nothing was pushed"):
            rows.step()
        np.testing.assert_array_equal(head.table.pull(np.arange(64)), before)


def test_gradients_made_finite_by_their_carrier_alone_are_not_taken_for_finite() -> None:
    with local(2) as cluster:
        head = ClassHead(cluster, "odd", num_classes=64, dim=4, margin=None, select=FullSoftmax(), optimizer=SGD(0.1))
        rows = RowOptimizer(head)
        before = head.table.pull(np.arange(64))
        (head(torch.ones(3, 4), torch.zeros(3, dtype=torch.int64)) * torch.inf).backward()
        carrier = rows.param_groups[0]["params"][0]
        with pytest.raises(InvalidArgument, match="nan_to_num_ met the stand-in"):
            torch.nan_to_num_(carrier.grad)
        carrier.grad.as_subclass(torch.Tensor).nan_to_num_()  # whoever goes around that
        with pytest.raises(NonFinite, match="finite"):
            rows.step()
        np.testing.assert_array_equal(head.table.pull(np.arange(64)), before)
