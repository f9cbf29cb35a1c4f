"""What a head is told too late, or cannot use, is refused by name: settings, saved states, restored tables."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.values.errors import InvalidArgument, SpecMismatch, TableNotFound
from tests.support import heads
from tests.unit.bridge.gear.test_slow_gear import DIM as GEAR_DIM
from tests.unit.bridge.gear.test_slow_gear import SAMPLES, build

CLASSES, DIM = 30, 5


make_head = partial(
    heads.make_head,
    num_classes=CLASSES,
    dim=DIM,
    select=gt.PartialFC(0.5),
    margin=gt.ArcFace(scale=64),
    optimizer=gt.SGD(0.5),
)


batch = partial(heads.make_batch, 6, CLASSES, DIM)


def train(head: gt.ClassHead, steps: int = 3) -> None:
    heads.train(head, range(steps), batch=batch)


class Model(nn.Module):
    def __init__(self, cluster: Cluster | None, **settings: Any) -> None:
        super().__init__()
        self.backbone = nn.Linear(DIM, DIM)
        self.head = make_head(cluster, **settings)


@pytest.mark.parametrize("place", ["pull", "hosted", "ranks"])
def test_a_margin_that_is_set_counts_from_then_on(cluster: Cluster, place: str) -> None:
    cluster_or_none = None if place == "ranks" else cluster
    head = make_head(cluster_or_none, margin=gt.ArcFace(16, 0.0), rows=place).eval()
    losses = []
    for margin in (0.0, 0.2, 0.4):
        head.margin = gt.ArcFace(16, margin)
        assert head.margin == gt.ArcFace(16, margin)
        losses.append(float(head(*batch()).detach()))
    assert losses[0] < losses[1] < losses[2]
    with pytest.raises(InvalidArgument, match=r"margin is 0\.3"):
        head.margin = 0.3  # type: ignore[assignment]
    assert head.margin == gt.ArcFace(16, 0.4)


def test_what_cannot_be_set_is_refused_with_what_to_do(cluster: Cluster) -> None:
    head = make_head(cluster)
    for name, value, remedy in (
        ("select", gt.FullSoftmax(), "reuse=True"),
        ("scale", 32.0, "head.margin = "),
        ("num_classes", 40, "num_live_classes"),
        ("lr", 0.1, "param_groups"),
        ("step", 7, "load_state_dict"),
    ):
        with pytest.raises(InvalidArgument, match=f"(?s){name} of ClassHead 'classes' cannot be set.*{remedy}"):
            setattr(head, name, value)
    head.comment = "of one's own"  # as on any module


def test_a_state_is_not_taken_over_the_rows_of_another_cluster(cluster: Cluster) -> None:
    model = Model(cluster)
    train(model.head)
    state = model.state_dict()
    with gt.local(num_shards=2) as elsewhere:
        for strict in (True, False):
            other = Model(elsewhere, reuse=True)
            with pytest.raises(SpecMismatch, match=r"(?s)other rows.*cluster\.restore.*import_class_weights"):
                other.load_state_dict(state, strict=strict)
            assert other.head.step == 0
        other.load_state_dict({key: item for key, item in state.items() if "_extra_state" not in key}, strict=False)


def test_a_state_is_taken_over_the_same_table_and_over_what_was_restored_or_imported(
    cluster: Cluster, tmp_path: Path
) -> None:
    model = Model(cluster)
    train(model.head)
    state = model.state_dict()
    snapshot = cluster.snapshot(tmp_path).result(30)
    gt.export_class_weights(model.head, tmp_path / "weights.safetensors")
    train(model.head)
    over_moved = Model(cluster, reuse=True)
    with pytest.raises(SpecMismatch, match="with strict=False and without the '_extra_state'"):
        over_moved.load_state_dict(state)
    del (without := dict(state))["head._extra_state"]
    over_moved.load_state_dict(without, strict=False)
    with gt.local(num_shards=3) as elsewhere:
        elsewhere.restore(snapshot)
        restored = Model(elsewhere, reuse=True)
        restored.load_state_dict(state)
        assert restored.head.step == 3
    with gt.local(num_shards=1) as elsewhere:
        imported = Model(elsewhere)
        gt.import_class_weights(imported.head, tmp_path / "weights.safetensors")
        imported.load_state_dict(state)


def test_a_model_can_be_saved_when_its_cluster_is_closed() -> None:
    with gt.local(num_shards=1) as cluster:
        model = Model(cluster)
    state = model.state_dict()
    assert "ids" not in state["head._extra_state"]["table_rows"]


def test_a_forgotten_row_optimizer_is_told_of_once(cluster: Cluster) -> None:
    head = make_head(cluster)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(2):
            head(*batch(seed)).backward()
    with pytest.warns(UserWarning, match=r"(?s)'classes'.*geartrain\.RowOptimizer\(module\)"):
        head(*batch(2)).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(4):
            head(*batch(seed)).backward()


def test_neither_evaluation_nor_accumulation_is_taken_for_a_forgotten_one(cluster: Cluster) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        head = make_head(cluster).eval()
        for seed in range(5):
            features, labels = batch(seed)
            head(features.requires_grad_(), labels).backward()
        rows = gt.RowOptimizer(head.train())
        for seed in range(5):
            head(*batch(seed)).backward()
        rows.step()


def replaced(cluster: Cluster, folder: Path) -> Callable[[], Any]:
    snapshot = cluster.snapshot(folder).result(30)
    return lambda: cluster.restore(snapshot, replace=True)


@pytest.mark.parametrize("place", ["held", "streamed", "hosted"])
def test_a_head_applies_no_gradient_from_before_a_restore(cluster: Cluster, place: str, tmp_path: Path) -> None:
    head = make_head(
        cluster, rows="hosted" if place == "hosted" else "pull", rows_cache_bytes=0 if place == "streamed" else 1 << 20
    )
    rows = gt.RowOptimizer(head)
    restore = replaced(cluster, tmp_path)
    before = head.weights()
    head(*batch()).backward()
    between = head(*batch(1))
    restore()
    with pytest.raises(TableNotFound, match=r"zero_grad\(\)"):
        rows.step()
    with pytest.raises(InvalidArgument, match="call the head again"):
        between.backward()
    assert torch.equal(head.weights(), before)
    rows.zero_grad()
    train(head, 1)
    assert not torch.equal(head.weights(), before)


def test_a_dense_module_makes_no_step_on_weights_from_before_a_restore(cluster: Cluster, tmp_path: Path) -> None:
    torch.manual_seed(1)
    module = nn.Linear(3, 2)
    dense = gt.attach(module, cluster, name="dense", optimizer=gt.SGD(0.5))
    restore = replaced(cluster, tmp_path)
    first = module.weight.detach().clone()
    for _ in range(2):
        module(torch.ones(1, 3)).sum().backward()
        dense.step()
        dense.zero_grad()
    module(torch.ones(1, 3)).sum().backward()
    restore()
    with pytest.raises(TableNotFound, match=r"refresh\(\)"):
        dense.step()
    assert dense.refresh()
    assert torch.equal(module.weight, first)
    assert module.weight.grad is None
    module(torch.ones(1, 3)).sum().backward()
    dense.step()
    torch.testing.assert_close(module.weight.detach(), first - 0.5)


def test_buffers_that_moved_before_a_restore_are_those_of_the_snapshot_after_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    dense = gt.attach(module, cluster, name="dense", optimizer=gt.SGD(0.5))
    restore = replaced(cluster, tmp_path)
    module(torch.randn(4, 3)).sum().backward()  # moves the statistics, which are not pushed
    restore()
    dense.refresh()
    assert torch.equal(module[1].running_mean, torch.zeros(2))
    assert int(module[1].num_batches_tracked) == 0


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_slow_gear_of_a_restored_table_says_so_and_one_of_a_dropped_table_closes(
    cluster: Cluster, tmp_path: Path, mode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def make(reuse: bool) -> gt.SlowGear:
        return gt.SlowGear(
            cluster, "image", dim=GEAR_DIM, build=build, samples=SAMPLES, gradients_per_id=16, mode=mode, reuse=reuse
        )

    image = make(False)
    rows = gt.RowOptimizer(image)
    restore = replaced(cluster, tmp_path)
    ids = torch.tensor([1, 2])
    image(ids).sum().backward()
    rows.step()
    image(ids).sum().backward()
    restore()
    with pytest.raises(TableNotFound, match=r"another SlowGear"):
        rows.step()
    with pytest.raises(TableNotFound, match=r"another SlowGear"):
        image(ids)
    image.close()
    again = make(True)
    again(ids).sum().backward()
    gt.RowOptimizer(again).step()
    cluster.drop_table("image")
    again.close()
    assert "2 gradients will not be applied" in caplog.text
