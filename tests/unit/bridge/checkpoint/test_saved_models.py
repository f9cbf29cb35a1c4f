"""A saved model goes on anywhere as if it had never stopped; what does not fit is refused and changes nothing."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.observe.failpoints import armed
from geartrain.ams.storage.snapshot.folder import open_snapshot
from geartrain.ams.storage.snapshot.manifest import seal_json, unseal_json
from geartrain.ams.values.errors import (
    ConfigError,
    GeartrainError,
    InvalidArgument,
    ModelDamaged,
    SnapshotDamaged,
    SnapshotError,
    SnapshotFailed,
    SpecMismatch,
    SyncError,
    TableExists,
)
from geartrain.bridge.checkpoint import saving
from geartrain.bridge.dense.dense_table import DenseTable
from tests.faults.children import Child
from tests.support import heads
from tests.support.rank_processes import run_ranks
from tests.unit.bridge.gear.test_slow_gear import DIM as GEAR_DIM
from tests.unit.bridge.gear.test_slow_gear import SAMPLES, build

CLASSES, DIM, BATCH = 31, 5, 12


class Model(nn.Module):
    """A backbone and a head."""

    def __init__(self, cluster: Cluster | None, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.backbone = nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM))
        rule: dict[str, Any] = {"margin": gt.CosFace(16, 0.1), "optimizer": gt.SparseMomentum(0.5)}
        settings = {"num_classes": CLASSES, "dim": DIM, "select": gt.PartialFC(0.5), **rule, **settings}
        self.head = heads.make_head(cluster, **settings)

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.head(self.backbone(features), labels)
        return loss


class Trainer:
    """A model with what trains it."""

    def __init__(self, cluster: Cluster | None, **settings: Any) -> None:
        self.model = Model(cluster, **settings)
        self.dense = torch.optim.AdamW(self.model.backbone.parameters(), 0.01)
        self.rows = gt.RowOptimizer(self.model.head)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.rows, 0.9)
        self.state = {"dense": self.dense, "rows": self.rows, "schedule": self.schedule}

    def train(self, steps: range, share: slice = slice(None)) -> list[float]:
        losses = []
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            features = torch.randn(BATCH, DIM, generator=generator)
            labels = torch.randint(CLASSES, (BATCH,), generator=generator)
            loss = self.model(features[share], labels[share])
            loss.backward()
            for item in (self.dense, self.rows):
                item.step()
                item.zero_grad()
            self.schedule.step()
            losses.append(loss.item())
        return losses


def predictions(model: Model) -> Tensor:
    features = torch.randn(20, DIM, generator=torch.Generator().manual_seed(99))
    model.eval()
    with torch.no_grad():
        _, classes = model.head.predict(model.backbone(features), 3)
    model.train()
    return classes


@pytest.fixture
def saved(cluster: Cluster, tmp_path: Path) -> Path:
    """Of a model at step 3."""
    trainer = Trainer(cluster)
    trainer.train(range(3))
    return gt.save(trainer.model, tmp_path / "model", state={**trainer.state, "epoch": 7})


@pytest.mark.parametrize(("place", "shards"), [("pull", 3), ("hosted", 1), ("ranks", 0)])
@pytest.mark.parametrize(
    "optimizer", [gt.SparseMomentum(0.5, untouched="elapsed"), gt.AdamW(0.05)], ids=lambda one: type(one).__name__
)
def test_training_goes_on_to_the_bit_in_another_cluster_and_place(
    cluster: Cluster, tmp_path: Path, place: str, shards: int, optimizer: Any
) -> None:
    first = Trainer(cluster, optimizer=optimizer)
    first.train(range(3))
    gt.save(first.model, tmp_path / "model", state={**first.state, "random": torch.get_rng_state(), "epoch": 7})
    wanted, expected = predictions(first.model), first.train(range(3, 6))
    with gt.local(num_shards=max(shards, 1)) as elsewhere:
        second = Trainer(None if place == "ranks" else elsewhere, rows=place, optimizer=optimizer)
        values = gt.load(second.model, tmp_path / "model", state=second.state)
        assert values["epoch"] == 7
        assert values["random"].dtype == torch.uint8
        assert torch.equal(predictions(second.model), wanted)
        got = second.train(range(3, 6))
        assert got == (expected if place == "pull" else pytest.approx(expected, rel=1e-5))
        gt.save(second.model, tmp_path / "again")
    gt.load(Trainer(cluster_of := gt.local(), optimizer=optimizer).model, tmp_path / "again")
    cluster_of.close()


def test_every_part_of_a_model_comes_back(cluster: Cluster, tmp_path: Path) -> None:
    class Whole(nn.Module):
        def __init__(self, cluster: Cluster) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.gear = gt.SlowGear(
                cluster,
                "image",
                dim=GEAR_DIM,
                build=build,
                samples=SAMPLES,
                gradients_per_id=1,
                mode="sync",
                expire_seconds=0,
            )
            self.middle = nn.Sequential(nn.Linear(GEAR_DIM, 4), nn.BatchNorm1d(4))
            self.heads = nn.ModuleList(
                gt.ClassHead(cluster, name, num_classes=9, dim=4, margin=None, optimizer=gt.Momentum(0.1))
                for name in ("colour", "shape")
            )

    def run(model: Whole, dense: DenseTable, steps: int) -> list[float]:
        rows, losses = gt.RowOptimizer(model.gear, model.heads), []
        for step in range(steps):
            features = model.middle(model.gear(torch.tensor([1, 2, 3])))
            loss = sum(head(features, torch.tensor([step, 4, 5])) for head in model.heads)
            loss.backward()
            for item in (rows, dense):
                item.step()
                item.zero_grad()
            losses.append(loss.item())
        return losses

    def attached(cluster: Cluster) -> tuple[Whole, DenseTable]:
        model = Whole(cluster)
        return model, gt.attach(model.middle, cluster, name="middle", optimizer=gt.Adam(0.05))

    model, dense = attached(cluster)
    run(model, dense, 3)
    gt.save(model, tmp_path / "model")
    expected = run(model, dense, 3)
    gt.load(model, tmp_path / "model", replace=True)
    assert run(model, dense, 3) == expected
    model.gear.close()
    with gt.local(num_shards=3) as elsewhere:
        again, dense = attached(elsewhere)
        gt.load(again, tmp_path / "model")
        assert run(again, dense, 3) == expected
        again.gear.close()


def test_a_module_without_rows_is_a_model_too_and_what_wraps_a_part_is_looked_through(tmp_path: Path) -> None:
    plain, other = nn.Sequential(nn.Linear(2, 3)), nn.Sequential(nn.Linear(2, 3))
    gt.save(nn.Sequential(torch.compile(plain)), tmp_path / "model")
    gt.load(torch.compile(nn.Sequential(other)), tmp_path / "model")  # type: ignore[arg-type]
    assert torch.equal(plain[0].weight, other[0].weight)


def test_a_graph_of_nearest_classes_comes_back(cluster: Cluster, tmp_path: Path) -> None:
    first = Trainer(cluster, select=gt.KNNSoftmax(active=0.5, k=4, rebuild="epoch"))
    first.train(range(2))
    gt.save(first.model, tmp_path / "model", state=first.state)
    expected = first.train(range(2, 4))
    with gt.local() as elsewhere:
        second = Trainer(elsewhere, select=gt.KNNSoftmax(active=0.5, k=4, rebuild="epoch"))
        gt.load(second.model, tmp_path / "model", state=second.state)
        assert second.train(range(2, 4)) == expected


def save_on_ranks(rank: int, ranks: int, folder: Path) -> None:
    trainer = Trainer(None, rows="ranks")
    trainer.model.backbone = nn.parallel.DistributedDataParallel(trainer.model.backbone)
    trainer.train(range(3), slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks))
    gt.save(trainer.model, folder / "model", state=trainer.state)
    write_losses(trainer, rank, ranks, folder)


def save_where_one_rank_sees_no_snapshot(rank: int, folder: Path) -> None:
    trainer = Trainer(None, rows="ranks")
    if rank == 1:
        saving.open_snapshot = lambda _: open_snapshot(folder / "nothing")
    with pytest.raises(SyncError if rank == 0 else SnapshotError):
        gt.save(trainer.model, folder / "model")
    torch.distributed.barrier()
    assert not any((folder / "model").iterdir())
    (folder / f"agreed-{rank}").touch()


def test_what_one_rank_cannot_save_no_rank_saves(tmp_path: Path) -> None:
    run_ranks(save_where_one_rank_sees_no_snapshot, 2, tmp_path)
    assert len(list(tmp_path.glob("agreed-*"))) == 2


def load_on_ranks(rank: int, ranks: int, folder: Path) -> None:
    trainer = Trainer(None, rows="ranks")
    gt.load(trainer.model, folder / "model", state=trainer.state)
    write_losses(trainer, rank, ranks, folder)


def write_losses(trainer: Trainer, rank: int, ranks: int, folder: Path) -> None:
    """Of this rank's share of a batch, in eval(), where ranks meet over no statistics."""
    trainer.model.eval()
    share = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    generator = torch.Generator().manual_seed(50)
    features = torch.randn(BATCH, DIM, generator=generator)[share]
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)[share]
    with torch.no_grad():
        loss = float(trainer.model(features, labels)) * len(labels) / BATCH
    (folder / f"loss-{ranks}-{rank}").write_text(str(loss))


def joint_loss(folder: Path, ranks: int) -> float:
    return sum(float((folder / f"loss-{ranks}-{rank}").read_text()) for rank in range(ranks))


def test_a_model_saved_on_two_ranks_loads_on_three_and_on_one(tmp_path: Path) -> None:
    run_ranks(save_on_ranks, 2, tmp_path)
    run_ranks(load_on_ranks, 3, tmp_path)
    load_on_ranks(0, 1, tmp_path)
    assert joint_loss(tmp_path, 3) == pytest.approx(joint_loss(tmp_path, 2), rel=1e-6)
    assert joint_loss(tmp_path, 1) == pytest.approx(joint_loss(tmp_path, 2), rel=1e-6)


def save_again(pipe: Any, folder: str) -> None:  # noqa: ARG001
    with gt.local() as cluster:
        trainer = Trainer(cluster)
        trainer.train(range(1))
        gt.save(trainer.model, folder)


@pytest.mark.parametrize("place", ["block.write.after", "snapshot.rename.after", "model.publish.before"])
def test_a_process_that_dies_while_it_saves_leaves_the_old_model(saved: Path, place: str) -> None:
    child = Child(save_again, str(saved), armed=f"{place}=kill")
    assert child.exit_code() == -signal.SIGKILL
    with gt.local() as cluster:
        trainer = Trainer(cluster)
        assert gt.load(trainer.model, saved)["epoch"] == 7
        assert trainer.model.head.step == 3
        gt.save(trainer.model, saved)
    assert len(list(saved.iterdir())) == 3  # what the dead process left is gone


def test_a_save_that_fails_leaves_the_old_model_and_nothing_else(cluster: Cluster, saved: Path) -> None:
    before = sorted(path.name for path in saved.iterdir())
    trainer = Trainer(cluster, reuse=True)
    for place in ("model.publish.before", "block.write.before"):
        with armed(f"{place}=error(ENOSPC)"), pytest.raises(SnapshotFailed, match="Free space"):
            gt.save(trainer.model, saved)
        assert sorted(path.name for path in saved.iterdir()) == before
    gt.save(trainer.model, saved)
    assert not {path.name for path in saved.iterdir()} & set(before) - {"model.json"}


class TwoHeads(Model):
    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self.second = gt.ClassHead(cluster, "second", num_classes=3, dim=DIM)


class Headless(nn.Module):
    def __init__(self, cluster: Cluster) -> None:  # noqa: ARG002
        super().__init__()
        self.backbone = nn.Linear(DIM, DIM)


class Wider(Model):
    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self.backbone = nn.Sequential(nn.Linear(DIM, DIM + 1), nn.BatchNorm1d(DIM))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda c: Model(c, num_classes=30), r"num_rows is 31, not 30\..*import_class_weights"),
        (lambda c: Model(c, dim=6), r"dim is 5, not 6.*\. .*one more with bias=True"),
        (
            lambda c: Model(c, optimizer=gt.SparseMomentum(7.0, untouched="elapsed")),
            r"optimizer.untouched is 'freeze', not",
        ),
        (lambda c: Model(c, optimizer=gt.SGD(0.5)), r"optimizer is SparseMomentum"),
        (lambda c: Model(c, dtype="bfloat16"), r"dtype is 'float32', not 'bfloat16'"),
        (lambda c: Model(c, margin=gt.ArcFace(16.0)), r"saved head has margin CosFace"),
        (TwoHeads, r"no rows of module 'second' \(tables \['second'\]\)"),
        (Headless, r"rows of module 'head' .* which this model has not; its modules with rows: none"),
        (Wider, r"'backbone.0.weight' .* has shape \[5, 5\], that of this model \[6, 5\]"),
    ],
)
def test_a_model_that_was_made_otherwise_is_refused_and_not_changed(
    saved: Path, make: Callable[[Cluster], nn.Module], message: str
) -> None:
    with gt.local() as cluster:
        model = make(cluster)
        before = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, Tensor)}
        incarnations = cluster.table_incarnations()
        with pytest.raises(SpecMismatch, match=message):
            gt.load(model, saved)
        assert cluster.table_incarnations() == incarnations
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())


@pytest.mark.parametrize("is_first_on_ranks", [True, False])
def test_the_optimizer_of_many_tables_goes_on_in_another_place(tmp_path: Path, is_first_on_ranks: bool) -> None:
    def made(cluster: Cluster | None) -> tuple[nn.Module, Any]:
        fields = [gt.Field(name, dim=2) for name in "abcd"]
        group = gt.EmbeddingGroup(cluster, "ctr", fields, rows="ranks" if cluster is None else "pull")
        return group, gt.RowOptimizer(group)

    with gt.local() as cluster:
        model, rows = made(None if is_first_on_ranks else cluster)
        rows.param_groups[0]["lr"] = 0.25
        gt.save(model, tmp_path / "model", state={"rows": rows})
        model, rows = made(cluster if is_first_on_ranks else None)
        gt.load(model, tmp_path / "model", state={"rows": rows})
        assert rows.param_groups[0]["lr"] == 0.25


def test_an_optimizer_that_was_made_otherwise_is_refused_before_anything_is_loaded(saved: Path) -> None:
    with gt.local() as cluster:
        trainer = Trainer(cluster)
        other = gt.RowOptimizer(gt.ClassHead(cluster, "other", num_classes=3, dim=DIM))
        dense = torch.optim.AdamW([{"params": [one]} for one in trainer.model.backbone.parameters()], 0.01)
        before, weights = trainer.model.head.weights(), trainer.model.backbone[0].weight.clone()
        for state, error, message in (
            ({"dense": dense}, SpecMismatch, r"'dense' of .* has param_groups of \[4\] .* of \[1, 1, 1, 1\]"),
            ({"rows": other}, InvalidArgument, r"0 param_groups of the rows of table 'other'"),
        ):
            with pytest.raises(error, match=message):
                gt.load(trainer.model, saved, state=state)
            assert torch.equal(trainer.model.head.weights(), before)
            assert torch.equal(trainer.model.backbone[0].weight, weights)


def test_trained_rows_are_replaced_only_if_that_is_said(cluster: Cluster, saved: Path) -> None:
    trainer = Trainer(cluster, reuse=True)
    trained = trainer.model.head.weights()
    with pytest.raises(TableExists, match=r"replace=True"):
        gt.load(trainer.model, saved)
    assert torch.equal(trainer.model.head.weights(), trained)
    ranks = Trainer(None, rows="ranks")
    ranks.train(range(1))
    with pytest.raises(TableExists, match=r"replace=True"):
        gt.load(ranks.model, saved)
    gt.load(ranks.model, saved, replace=True)
    assert torch.equal(ranks.model.head.weights(), trained)


@pytest.mark.parametrize("place", ["pull", "ranks"])
def test_imprinted_rows_are_not_replaced_either(saved: Path, place: str) -> None:
    with gt.local() as another:
        model = Model(None if place == "ranks" else another, rows=place)
        model.head.imprint([(torch.randn(BATCH, DIM), torch.arange(BATCH))], model.backbone)
        with pytest.raises(TableExists, match=r"replace=True"):
            gt.load(model, saved)
        gt.load(model, saved, replace=True)


def test_a_save_that_fails_over_the_model_of_a_later_version_leaves_that(cluster: Cluster, saved: Path) -> None:
    content = unseal_json((saved / "model.json").read_bytes())
    (saved / "model.json").write_bytes(seal_json({**content, "format": 1_000}))
    with pytest.raises(ConfigError, match=r"has format 1000; .* reads format 2\. Use .*, or save the model again"):
        gt.load(Trainer(cluster, reuse=True).model, saved)
    before = sorted(path.name for path in saved.iterdir())
    trainer = Trainer(cluster, reuse=True)
    with armed("block.write.before=error(ENOSPC)"), pytest.raises(SnapshotFailed):
        gt.save(trainer.model, saved)
    assert set(before) <= {path.name for path in saved.iterdir()}
    gt.save(trainer.model, saved)
    assert len(list(saved.iterdir())) == 3


def test_damage_is_named_and_changes_nothing(saved: Path) -> None:
    with gt.local() as cluster:
        trainer = Trainer(cluster)
        first = trainer.model.head.weights()
        files = [path for path in saved.rglob("*") if path.is_file()]
        assert len(files) >= 5
        for path in files:
            whole = path.read_bytes()
            path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 4]) + whole[-8:])
            with pytest.raises((ModelDamaged, SnapshotDamaged), match=path.name):
                gt.load(trainer.model, saved)
            path.unlink()
            with pytest.raises(ConfigError if path.name == "model.json" else GeartrainError, match=path.name):
                gt.load(trainer.model, saved)
            path.write_bytes(whole)
        assert torch.equal(trainer.model.head.weights(), first)
        gt.load(trainer.model, saved)


def test_a_snapshot_of_another_save_is_not_taken(saved: Path, cluster: Cluster, tmp_path: Path) -> None:
    other = gt.save(Model(cluster, reuse=True), tmp_path / "other")
    (mine,), (theirs,) = list(saved.glob("rows-*")), list(other.glob("rows-*"))
    mine.rename(tmp_path / "aside")
    theirs.rename(mine)
    with gt.local() as elsewhere, pytest.raises(ModelDamaged, match="of another save"):
        gt.load(Model(elsewhere), saved)


def test_what_cannot_be_saved_or_loaded_is_said(cluster: Cluster, saved: Path, tmp_path: Path) -> None:
    trainer = Trainer(cluster, reuse=True)
    refused: Mapping[str, Callable[[], Any]] = {
        "must be a torch.nn.Module": lambda: gt.save({}, tmp_path / "a"),  # type: ignore[arg-type]
        "a folder. Copy it": lambda: gt.save(trainer.model, "s3://bucket/model"),
        "holds other files": lambda: gt.save(trainer.model, tmp_path),
        "is a file": lambda: gt.save(trainer.model, saved / "model.json"),
        "state must be|it must be a dict": lambda: gt.save(trainer.model, saved, state=[1]),  # type: ignore[arg-type]
        r"\['values'\]\['odd'\] is object": lambda: gt.save(trainer.model, saved, state={"odd": object()}),
        "no state of 'sched'; .*'schedule'": lambda: gt.load(trainer.model, saved, state={"sched": trainer.schedule}),
        "must have load_state_dict": lambda: gt.load(trainer.model, saved, state={"dense": 3}),
    }
    for message, action in refused.items():
        with pytest.raises(InvalidArgument, match=message):
            action()
    with pytest.raises(ConfigError, match=r"that geartrain\.save wrote"):
        gt.load(trainer.model, tmp_path / "nothing")
    trainer.model(torch.randn(BATCH, DIM), torch.randint(CLASSES, (BATCH,))).backward()
    for action in (gt.save, gt.load):
        with pytest.raises(InvalidArgument, match="between two steps"):
            action(trainer.model, saved)


def test_a_module_that_does_not_say_where_its_rows_are_is_not_saved(cluster: Cluster, tmp_path: Path) -> None:
    class Own(nn.Module):
        def __init__(self, update: Any) -> None:
            super().__init__()
            self.row_update = update

    with pytest.raises(InvalidArgument, match="has no row_placement"):
        gt.save(nn.Sequential(Own(Model(cluster).head.row_update)), tmp_path / "model")


def test_the_rows_are_an_ordinary_snapshot(saved: Path) -> None:
    (rows,) = saved.glob("rows-*")
    assert open_snapshot(rows).verify() == []
    with gt.local() as cluster:
        cluster.restore(rows)
        assert cluster.table("classes").spec.num_rows == CLASSES


def test_a_plain_state_over_other_rows_on_ranks_is_refused(tmp_path: Path) -> None:
    first, other = Trainer(None, rows="ranks"), Trainer(None, rows="ranks")
    first.train(range(3))
    other.train(range(1, 4))  # of as many steps
    torch.save(first.model.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    with pytest.raises(SpecMismatch, match=r"geartrain\.save"):
        other.model.load_state_dict(state)
    Trainer.train(first, range(0))
    first.model.load_state_dict(state)
