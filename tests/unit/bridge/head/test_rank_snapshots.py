"""A class table goes on anywhere: on another number of ranks, or in a cluster, as if it had never stopped."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import geartrain as gt
from geartrain.ams.client.factory import local
from geartrain.ams.programs.selection import PartialFC
from geartrain.ams.storage.snapshot.folder import latest, open_snapshot
from geartrain.ams.values.errors import (
    InvalidArgument,
    SnapshotDamaged,
    SnapshotError,
    SnapshotFailed,
    SpecMismatch,
    SyncError,
)
from geartrain.ams.values.optimizers.registry import Adam, RowOptimizerSpec, SparseMomentum
from geartrain.ams.values.specs import DTypeName
from geartrain.bridge.head.class_head import ClassHead
from geartrain.bridge.head.loss.margins.angular import ArcFace
from geartrain.bridge.head.weights import export_class_weights, import_class_weights
from geartrain.bridge.rows.serialization import state_from_bytes, state_to_bytes
from tests.support import heads
from tests.support.rank_processes import on_ranks, run_ranks

CLASSES, DIM, BATCH = 101, 8, 12
LEGS = [(2, range(4)), (3, range(4, 8)), (1, range(8, 12))]
"""Ranks, and the steps they train."""


MOMENTUM = SparseMomentum(lr=0.5, momentum=0.9, weight_decay=1e-3)
ELAPSED = SparseMomentum(lr=0.5, momentum=0.9, weight_decay=1e-3, untouched="elapsed")
ADAM = Adam(0.05, weight_decay=1e-3)


def make_head(rows: str, cluster: Any = None, **settings: Any) -> ClassHead:
    settings = {"dtype": "float32", "optimizer": MOMENTUM, **settings}
    slots = settings["dtype"] if settings["optimizer"].takes_narrow_slots else "float32"
    settings |= {"num_classes": CLASSES, "dim": DIM, "select": PartialFC(0.3), "margin": ArcFace(16, 0.3)}
    return heads.make_head(cluster, "faces", rows=rows, slot_dtype=slots, **settings)


train = partial(heads.train, batch=partial(heads.make_batch, BATCH, CLASSES, DIM))


def train_leg(rank: int, ranks: int, folder: Path, leg: int, dtype: DTypeName, optimizer: RowOptimizerSpec) -> None:
    head = make_head("ranks", dtype=dtype, optimizer=optimizer)
    if leg > 0:
        snapshot = head.restore(folder / f"leg{leg - 1}")
        head.load_state_dict(state_from_bytes(snapshot.job_files()["head"]))
    losses = train(head, LEGS[leg][1], rank, ranks)
    files = {"head": state_to_bytes(head.state_dict())}
    path = head.snapshot(folder, f"leg{leg}", values={"leg": leg}, files=files)
    assert open_snapshot(path).verify() == []
    np.save(folder / f"losses{leg}-{rank}.npy", losses)


@pytest.mark.parametrize(
    ("dtype", "optimizer"),
    [
        pytest.param("float32", ELAPSED, id="float32-elapsed"),
        pytest.param("bfloat16", ADAM, id="bfloat16-adam"),
        pytest.param("float32", MOMENTUM, id="float32-momentum", marks=pytest.mark.slow),
        pytest.param("bfloat16", MOMENTUM, id="bfloat16-momentum", marks=pytest.mark.slow),
        pytest.param("bfloat16", ELAPSED, id="bfloat16-elapsed", marks=pytest.mark.slow),
        pytest.param("float32", ADAM, id="float32-adam", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_then_three_then_one_then_a_cluster_train_as_if_uninterrupted(
    dtype: DTypeName, optimizer: RowOptimizerSpec, tmp_path: Path
) -> None:
    for leg, (ranks, _) in enumerate(LEGS):
        run_ranks(train_leg, ranks, tmp_path, leg, dtype, optimizer)
    resumed = [
        sum(np.load(tmp_path / f"losses{leg}-{rank}.npy") for rank in range(ranks))
        for leg, (ranks, _) in enumerate(LEGS)
    ]
    with local(num_shards=3) as cluster:
        snapshot = cluster.restore(tmp_path / "leg2")
        last = make_head("pull", cluster, dtype=dtype, optimizer=optimizer, reuse=True)
        last.load_state_dict(state_from_bytes(snapshot.job_files()["head"]))
        resumed.append(np.array(train(last, range(12, 15))))
        rows = last.weights()
    head = make_head("ranks", dtype=dtype, optimizer=optimizer)
    losses = train(head, range(15))
    tolerance = 5e-6 if dtype == "float32" else 2e-2  # every step rounds the rows to 8 bits
    np.testing.assert_allclose(np.concatenate(resumed), losses, rtol=tolerance)
    atol = float(rows.abs().max()) * (1e-4 if dtype == "float32" else 3e-2)
    torch.testing.assert_close(rows, head.weights(), rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("dtype", "optimizer"),
    [("float32", MOMENTUM), ("float16", MOMENTUM), ("float32", ELAPSED), ("bfloat16", ADAM)],
    ids=["momentum", "float16", "elapsed", "adam"],
)
def test_a_cluster_goes_on_with_rows_of_ranks_and_ranks_with_those_of_a_cluster(
    dtype: DTypeName, optimizer: RowOptimizerSpec, tmp_path: Path
) -> None:
    head = make_head("ranks", dtype=dtype, optimizer=optimizer)
    first = train(head, range(3))
    run_ranks(train_leg, 3, tmp_path, 0, dtype, optimizer)
    with local(num_shards=2) as cluster:
        cluster.restore(tmp_path / "leg0")
        moved = make_head("pull", cluster, dtype=dtype, optimizer=optimizer, reuse=True)
        moved.load_state_dict(state_from_bytes(open_snapshot(tmp_path / "leg0").job_files()["head"]))
        expected = train(make_head("ranks", dtype=dtype, optimizer=optimizer), range(8))
        tolerance = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 2e-2}[dtype]
        assert train(moved, range(4, 8)) == pytest.approx(expected[4:], rel=tolerance)
        assert first == pytest.approx(expected[:3], rel=tolerance)
        # An increment rests on its parent; ranks read both.
        cluster.snapshot(tmp_path, "whole", tables=["faces"]).result()
        train(moved, range(8, 9))
        cluster.snapshot(tmp_path, "more", tables=["faces"], parent="whole").result()
        back = make_head("ranks", dtype=dtype, optimizer=optimizer)
        back.restore(tmp_path / "more")
        assert torch.equal(back.weights(), moved.weights())
        back.load_state_dict(moved.state_dict())
        assert train(back, range(9, 11)) == pytest.approx(train(moved, range(9, 11)), rel=tolerance)


def test_rows_nobody_touched_have_their_initial_value_after_a_restore(tmp_path: Path) -> None:
    with local() as cluster:
        theirs = make_head("pull", cluster)
        train(theirs, range(1))
        cluster.snapshot(tmp_path, "s").result()
        head = make_head("ranks")
        train(head, range(5))
        head.restore(tmp_path / "s")
        assert torch.equal(head.weights(), theirs.weights())


def test_a_snapshot_of_another_table_or_a_damaged_one_leaves_initial_rows(tmp_path: Path) -> None:
    head = make_head("ranks")
    initial = head.weights()
    train(head, range(2))
    path = Path(head.snapshot(tmp_path, "s"))
    with pytest.raises(SnapshotFailed, match="already exists"):
        head.snapshot(tmp_path, "s")
    with pytest.raises(SpecMismatch):
        make_head("ranks", seed=4).restore(path)
    block = next(path.glob("rows-*"))
    data = bytearray(block.read_bytes())
    data[-1] ^= 1
    block.write_bytes(data)
    with pytest.raises(SnapshotDamaged, match=block.name):
        head.restore(path)
    assert torch.equal(head.weights(), initial)


@on_ranks(2)
def test_a_step_that_an_earlier_life_has_left_gets_another_name_and_is_newer(
    rank: int, ranks: int, folder: Path
) -> None:
    for life in range(2):
        head = make_head("ranks")
        losses = train(head, range(2 + life), rank, ranks)
        path = head.snapshot(folder / "snapshots", step=42, values={"life": life})
        assert (len(losses), Path(path).name) == (2 + life, ("step-000000042", "step-000000042-2")[life])
        assert latest(folder / "snapshots").manifest.job == {"life": life}
        dist.barrier()


def test_a_state_is_taken_with_the_rows_of_its_step_only(tmp_path: Path) -> None:
    head = make_head("ranks")
    train(head, range(3))
    state = head.state_dict()
    path = head.snapshot(tmp_path, step=70)  # the user's count, skipped steps included
    assert Path(path).name == "step-000000070"
    resumed = make_head("ranks")
    with pytest.raises(SpecMismatch, match="step 3, and the rows of 'faces' are of step 0"):
        resumed.load_state_dict(state)
    assert resumed.restore(path).manifest.step == resumed.step == 70
    resumed.load_state_dict(state)
    assert resumed.step == 3
    train(resumed, range(3, 4))
    with pytest.raises(SpecMismatch, match="step 3, and the rows of 'faces' are of step 4"):
        resumed.load_state_dict(state)


def test_rows_in_a_cluster_have_snapshots_of_their_own(tmp_path: Path) -> None:
    with local() as cluster, pytest.raises(InvalidArgument, match=r"Cluster\.snapshot"):
        make_head("pull", cluster).snapshot(tmp_path, "s")


def fail_on_one_rank(rank: int, folder: Path) -> None:
    head = make_head("ranks")
    with pytest.raises(SnapshotError if rank == 0 else SnapshotFailed):
        head.snapshot(folder / "taken", "name", files={})
    root = folder / "sound"
    with pytest.raises(SpecMismatch if rank == 1 else SnapshotFailed):
        head.snapshot(root if rank == 0 else folder / "another", "s")
    path = head.snapshot(root, "s")
    if rank == 1:
        path = folder / "elsewhere"
    with pytest.raises(SyncError if rank == 0 else SnapshotError):
        head.restore(path)
    assert [entry.name for entry in root.iterdir() if entry.name != "s"] == []


def test_a_failure_of_one_rank_is_one_of_all(tmp_path: Path) -> None:
    (tmp_path / "taken" / "name").mkdir(parents=True)
    run_ranks(fail_on_one_rank, 2, tmp_path)


@on_ranks(2)
def test_features_of_one_rank_that_are_not_finite_strand_no_other(rank: int) -> None:
    head = make_head("ranks")
    features = torch.randn(3, DIM, generator=torch.Generator().manual_seed(rank))
    expected = head.predict(features, 2)
    if rank == 1:
        features[1] = torch.nan
    scores, ids = head.predict(features, 2)  # were they refused there, the other would wait
    whole = [0, 1, 2] if rank == 0 else [0, 2]
    assert torch.equal(scores[whole], expected[0][whole]) and torch.equal(ids[whole], expected[1][whole])
    assert scores[1].isnan().all() == (rank == 1)


@on_ranks(2)
def test_files_of_class_weights_are_read_and_written_by_ranks_together(rank: int, ranks: int, folder: Path) -> None:
    head = make_head("ranks", dtype="float16")
    if rank == 0:  # as partial FC saves them, of another number of ranks
        for part, rows in enumerate(torch.tensor_split(head.weights(torch.arange(CLASSES)) * 2, ranks + 1)):
            np.save(folder / f"rank:{part}_softmax_weight.npy", rows.numpy())
    else:
        head.weights()
    dist.barrier()
    expected = head.weights() * 2
    told = import_class_weights(head, sorted(folder.glob("rank:*.npy")))
    assert [count for _, count in told] == [34, 34, 33]
    assert torch.equal(head.weights(), expected)
    path = export_class_weights(head, folder / "out.safetensors")
    assert torch.equal(load_file(path)["weight"], expected)
    blocked = folder / "file" / "below.safetensors"
    if rank == 0:
        (folder / "file").write_bytes(b"")
    with pytest.raises(OSError if rank == 0 else SyncError):
        export_class_weights(head, blocked)
    for wrong in range(ranks):
        nowhere: Any = None
        with pytest.raises(InvalidArgument if rank == wrong else SyncError):
            export_class_weights(head, nowhere if rank == wrong else path)
    with pytest.raises(InvalidArgument if rank == 1 else SyncError):
        import_class_weights(head, path if rank == 0 else folder / "nowhere.npy")
    assert torch.equal(head.weights(), expected)


def test_rows_of_eight_bits_come_back_as_they_were(tmp_path: Path) -> None:
    config = gt.HeadConfig(dtype="float8_e4m3fn", slot_dtype="int8")

    def made() -> gt.ClassHead:
        optimizer = gt.SparseMomentum(0.1, 0.9)
        return gt.ClassHead(None, "narrow", num_classes=37, dim=130, optimizer=optimizer, rows="ranks", config=config)

    head, features = made(), torch.randn(8, 130, generator=torch.Generator().manual_seed(0))
    initial, rows = head.weights(), gt.RowOptimizer(head)
    for _ in range(3):
        head(features, torch.arange(8)).backward()
        rows.step()
    assert head.weights().dtype == torch.bfloat16 and not torch.equal(head.weights(), initial)
    again = made()
    assert torch.equal(again.weights(), initial)
    again.restore(Path(head.snapshot(tmp_path, "s")))
    assert torch.equal(again.weights(), head.weights())
    tables: Any = (head.table, again.table)
    ours, theirs = (table.stored.slots(slice(None), torch.float32) for table in tables)
    assert torch.equal(ours, theirs) and (ours != 0).any()
    for each in (head, again):
        own = gt.RowOptimizer(each)
        each(features, torch.arange(8)).backward()
        own.step()
    assert torch.equal(again.weights(), head.weights())  # they draw the same numbers for rounding
    exported = load_file(export_class_weights(head, tmp_path / "weights.safetensors"))
    assert all(torch.equal(part, head.weights()) for part in exported.values())
    with local() as cluster, pytest.raises(InvalidArgument, match="ranks"):
        gt.ClassHead(cluster, "narrow", num_classes=37, dim=130, optimizer=gt.SGD(0.1), config=config)
