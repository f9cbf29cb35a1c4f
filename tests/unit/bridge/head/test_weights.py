"""Class centers from other programs' files, and back into one."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.values.errors import InvalidArgument, InvalidRows, NonFinite
from tests.support import heads

CLASSES, DIM = 23, 8


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks a file."""
    monkeypatch.setattr("geartrain.bridge.head.weights.block_rows_for", lambda row_bytes: 5)  # noqa: ARG005


def head_of(cluster: Cluster, **settings: Any) -> gt.ClassHead:
    defaults = {"num_classes": CLASSES, "dim": DIM, "margin": gt.ArcFace(scale=64), "optimizer": gt.SparseMomentum(0.1)}
    return heads.make_head(cluster, "w", **{**defaults, **settings})


def matrix(rows: int = CLASSES, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, DIM, generator=torch.Generator().manual_seed(seed))


def written(folder: Path, kind: str, weights: torch.Tensor, ranks: int) -> list[Path]:
    """One file a rank, shared out as partial FC does: the first ranks have one class more."""
    paths = []
    for rank, part in enumerate(torch.tensor_split(weights, ranks)):
        part = part.clone()
        path = folder / f"rank:{rank}_softmax_weight.{kind.split()[0]}"
        if kind == "pt":
            torch.save(part, path)
        elif kind == "pt state":
            torch.save({"weight": part, "weight_mom": torch.ones_like(part), "epoch": 3}, path)
        elif kind == "pt legacy":
            torch.save({"fc": part}, path, _use_new_zipfile_serialization=False)
        elif kind == "safetensors":
            save_file({"kernel": part, "bias": torch.zeros(len(part))}, path)
        else:
            np.save(path, part.numpy())
        paths.append(path)
    return paths


@pytest.mark.parametrize("kind", ["pt", "pt state", "pt legacy", "safetensors", "npy"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_files_in_rank_order_become_the_class_centers(kind: str, ranks: int, cluster: Cluster, tmp_path: Path) -> None:
    head, weights = head_of(cluster), matrix()
    told = gt.import_class_weights(head, written(tmp_path, kind, weights, ranks))
    assert torch.equal(head.weights(), weights)
    assert [count for _, count in told] == [len(part) for part in torch.tensor_split(weights, ranks)]


def test_a_folder_is_taken_in_the_order_of_its_numbers(cluster: Cluster, tmp_path: Path) -> None:
    head, weights = head_of(cluster), matrix()
    written(tmp_path, "npy", weights, 12)  # rank 10 sorts before rank 2 as text
    gt.import_class_weights(head, tmp_path)
    assert torch.equal(head.weights(), weights)


def test_a_list_that_sorts_10_before_2_is_refused_with_the_right_order(cluster: Cluster, tmp_path: Path) -> None:
    head, weights = head_of(cluster), matrix()
    before = head.weights()
    for rename in ("rank:{}_softmax_weight", "step_70_rank_{}", "part-{:02}", "checkpoint_gpu_{}/fc", "centers{}"):
        folder = tmp_path / rename[:5]
        folder.mkdir()
        files = [folder / f"{rename.format(rank)}.npy" for rank in range(12)]
        for file, part in zip(files, torch.tensor_split(weights, 12), strict=True):
            file.parent.mkdir(exist_ok=True)
            np.save(file, part.numpy())
        scrambled = sorted(files) if sorted(files) != files else files[::-1]
        with pytest.raises(InvalidArgument, match="not in the order of the numbers") as refused:
            gt.import_class_weights(head, scrambled)
        assert torch.equal(head.weights(), before)
        right = str(refused.value).rpartition("; give ")[2].split(", ")
        assert right == list(map(str, files))
        gt.import_class_weights(head, right)
        assert torch.equal(head.weights(), weights)
        head.table.assign(torch.arange(CLASSES), before)


def test_a_rank_without_a_file_or_with_two_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    head = head_of(cluster, num_classes=CLASSES + 5, num_live_classes=CLASSES)
    paths = [tmp_path / name for name in ("rank_0.npy", "rank_2.npy", "rank_02.npy", "old_rank_2.npy", "rank_3.npy")]
    for path in paths:
        np.save(path, matrix(8).numpy())
    for given, message in (
        ([paths[0], paths[1], paths[4]], "hold no file of rank 1; give the file of each rank once"),
        ([paths[1], paths[4]], "hold no file of rank 1"),
        ([paths[1], paths[2]], "hold no file of rank 1"),
        ([*paths[:2], paths[3]], "hold no file of rank 1"),
        ([paths[0], paths[0].with_name("rank-1.npy"), paths[1], paths[3]], "hold several files of rank 2"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            gt.import_class_weights(head, given)


def test_names_without_ranks_leave_the_order_to_the_list(cluster: Cluster, tmp_path: Path) -> None:
    head, weights = head_of(cluster), matrix()
    first, second = torch.tensor_split(weights, 2)
    for names in (("men.npy", "boys.npy"), ("2024_b1.npy", "2023_b2.npy"), ("rank_0/a.npy", "more.npy")):
        head.table.assign(torch.arange(CLASSES), torch.zeros(CLASSES, DIM))
        (tmp_path / "rank_0").mkdir(exist_ok=True)
        for name, part in zip(names, (first, second), strict=True):
            np.save(tmp_path / name, part.numpy())
        gt.import_class_weights(head, [tmp_path / name for name in names])
        assert torch.equal(head.weights(), weights)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_is_exported_is_imported_again_bit_by_bit(dtype: Any, cluster: Cluster, tmp_path: Path) -> None:
    head = head_of(cluster, dtype=dtype)
    path = gt.export_class_weights(head, tmp_path / "out" / "w.safetensors")
    exported = load_file(path)["weight"]  # by the library
    assert exported.dtype == getattr(torch, dtype)
    assert torch.equal(exported, head.weights())
    assert [entry.name for entry in path.parent.iterdir()] == ["w.safetensors"]
    again = gt.ClassHead(cluster, "again", num_classes=CLASSES, dim=DIM, config=gt.HeadConfig(dtype=dtype))
    assert not torch.equal(again.weights(), exported)
    gt.import_class_weights(again, path)
    assert torch.equal(again.weights(), exported)


def test_momentum_starts_anew_and_training_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    head, weights = head_of(cluster, select=gt.FullSoftmax()), matrix()
    rows, features = gt.RowOptimizer(head), torch.ones(4, DIM)
    labels = torch.arange(4)
    head(features, labels).backward()
    rows.step()
    gt.import_class_weights(head, written(tmp_path, "npy", weights, 1))
    settings: dict[str, Any] = {"margin": gt.ArcFace(scale=64), "optimizer": gt.SparseMomentum(0.1)}
    fresh = heads.make_head(cluster, "fresh", num_classes=CLASSES, dim=DIM, select=gt.FullSoftmax(), **settings)
    gt.import_class_weights(fresh, tmp_path)
    for each in (head, fresh):
        each(features, labels).backward()
        gt.RowOptimizer(each).step()
    assert torch.equal(head.weights(), fresh.weights())
    assert not torch.equal(head.weights(), weights)


def test_a_file_of_another_dtype_is_stored_in_the_tables(cluster: Cluster, tmp_path: Path) -> None:
    head, weights = head_of(cluster, dtype="float16"), matrix().double()
    np.save(tmp_path / "w.npy", weights.numpy())
    gt.import_class_weights(head, tmp_path / "w.npy")
    assert torch.equal(head.weights(), weights.half())


def test_a_head_is_made_larger_by_importing_its_rows_into_one_of_more_ids(cluster: Cluster, tmp_path: Path) -> None:
    old = head_of(cluster)
    path = gt.export_class_weights(old, tmp_path / "w.safetensors")
    larger = gt.ClassHead(cluster, "larger", num_classes=CLASSES + 5, dim=DIM, num_live_classes=CLASSES)
    assert gt.import_class_weights(larger, path) == [(path, CLASSES)]
    assert torch.equal(larger.weights(torch.arange(CLASSES)), old.weights())
    assert larger.add_classes(2).tolist() == [CLASSES, CLASSES + 1]
    for settings in ({}, {"num_live_classes": CLASSES + 1}):
        other = heads.make_head(cluster, f"o{len(settings)}", num_classes=CLASSES + 5, dim=DIM, **settings)
        with pytest.raises(InvalidRows, match=rf"or a larger one with num_live_classes={CLASSES}$"):
            gt.import_class_weights(other, path)


@pytest.mark.parametrize(
    ("name", "tensors", "key", "message"),
    [
        ("a.npy", torch.zeros(CLASSES, 9), None, r"a\.npy has shape \[23, 9\]; the head needs \[n, 8\]"),
        ("a.npy", torch.zeros(CLASSES), None, r"a\.npy has shape \[23\]"),
        ("a.npy", torch.zeros(22, DIM), None, r"a\.npy \[22, 8\] holds 22 classes, table 'w' has 23"),
        ("a.npy", torch.zeros(CLASSES, DIM, dtype=torch.int64), None, r"a\.npy is of int64"),
        ("a.pt", {"x": torch.zeros(CLASSES, 9)}, None, r"a\.pt holds x \[23, 9\]; the head needs a matrix \[n, 8\]"),
        ("a.pt", {"x": matrix(), "y": matrix()}, None, r"holds x \[23, 8\], y \[23, 8\]; name one with key="),
        (
            "a.pt",
            {"x": matrix(), "fc": {"y": matrix()}},
            None,
            r"holds x \[23, 8\], fc.y \[23, 8\]; name one with key=",
        ),
        ("a.pt", {"x": matrix()}, "z", r"has no tensor 'z'; it holds x"),
        ("a.pt", {"x": matrix(), "z": torch.zeros(3, 3)}, "z", r"a\.pt has shape \[3, 3\]"),
        ("a.safetensors", {"x": torch.zeros(CLASSES, 9)}, None, r"a\.safetensors holds x \[23, 9\]"),
        ("a.safetensors", {"x": torch.zeros(CLASSES, DIM, dtype=torch.int8)}, None, r"a\.safetensors is of I8"),
    ],
)
def test_what_does_not_fit_is_named_with_its_shape_and_nothing_is_written(
    name: str, tensors: Any, key: str | None, message: str, cluster: Cluster, tmp_path: Path
) -> None:
    head, path = head_of(cluster), tmp_path / name
    before = head.weights()
    if name.endswith(".npy"):
        np.save(path, tensors.numpy())
    elif name.endswith(".pt"):
        torch.save(tensors, path)
    else:
        save_file(tensors, path)
    with pytest.raises(InvalidRows, match=message):
        gt.import_class_weights(head, path, key=key)
    assert torch.equal(head.weights(), before)


class Attack:
    """Would print when it is unpickled."""

    def __reduce__(self) -> Any:
        return print, ("unpickled",)


def test_files_that_cannot_be_read_are_refused_by_name(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = head_of(cluster)
    for suffix in (".npy", ".pt", ".safetensors"):
        (tmp_path / f"torn{suffix}").write_bytes(b"\x93NUMPY torn")
        with pytest.raises(InvalidArgument, match=rf"torn{suffix}"):
            gt.import_class_weights(head, tmp_path / f"torn{suffix}")
    torch.save({"weight": matrix(), "evil": Attack()}, tmp_path / "evil.pt")
    with pytest.raises(InvalidArgument, match=r"evil\.pt cannot be read as tensors alone"):
        gt.import_class_weights(head, tmp_path / "evil.pt")
    assert "unpickled" not in capsys.readouterr().out
    with pytest.raises(InvalidArgument, match=r"w\.csv is no weight file"):
        gt.import_class_weights(head, tmp_path / "w.csv")
    with pytest.raises(InvalidArgument, match="does not exist"):
        gt.import_class_weights(head, tmp_path / "w.pt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidArgument, match="empty has no weight file"):
        gt.import_class_weights(head, tmp_path / "empty")
    with pytest.raises(InvalidArgument, match="no weight file was given"):
        gt.import_class_weights(head, [])


def test_odd_arrays_are_refused_or_read_as_what_they_are(cluster: Cluster, tmp_path: Path) -> None:
    head, path = head_of(cluster), tmp_path / "w.npy"
    np.save(path, np.asfortranarray(matrix().numpy().astype(">f4")))
    gt.import_class_weights(head, path)
    assert torch.equal(head.weights(), matrix())
    np.save(path, matrix().numpy().astype(np.longdouble))
    with pytest.raises(InvalidRows, match=r"w\.npy is of (float128|longdouble|float96)"):
        gt.import_class_weights(head, path)
    with path.open("wb") as file:
        np.savez(file, a=matrix().numpy())
    with pytest.raises(InvalidArgument, match=r"w\.npy is not a readable .npy file: it begins with b'PK"):
        gt.import_class_weights(head, path)
    for damage in (b"PK\x03\x04torn", b"\x93NUMPY\x01\x00\x10\x00{'descr': (      "):
        path.write_bytes(damage)
        with pytest.raises(InvalidArgument, match=r"w\.npy is not a readable"):
            gt.import_class_weights(head, path)
    for odd in (matrix().to_sparse(), torch.empty(CLASSES, DIM, device="meta")):
        torch.save({"weight": odd}, tmp_path / "w.pt")
        with pytest.raises(InvalidRows, match=r"w\.pt holds a torch\.\w+ tensor on \w+; save a dense one"):
            gt.import_class_weights(head, tmp_path / "w.pt")


def test_a_file_given_twice_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    head = gt.ClassHead(cluster, "double", num_classes=2 * CLASSES, dim=DIM)
    np.save(tmp_path / "w.npy", matrix().numpy())
    with pytest.raises(InvalidArgument, match=r"w\.npy was given twice"):
        gt.import_class_weights(head, [tmp_path / "w.npy", tmp_path / "." / "w.npy"])


def test_values_that_are_not_finite_are_named_with_their_class(cluster: Cluster, tmp_path: Path) -> None:
    head, weights = head_of(cluster, dtype="float16"), matrix()
    weights[17, 3] = 1e6  # beyond float16
    paths = written(tmp_path, "npy", weights, 2)
    with pytest.raises(NonFinite, match=r"rank:1_.*row 5 \(class 17\).*classes below 17 are imported"):
        gt.import_class_weights(head, paths)


def test_a_hashed_table_is_no_matrix(cluster: Cluster, tmp_path: Path) -> None:
    from geartrain.bridge.head.weights import export_rows

    table: Any = cluster.create_table("hashed", dim=4, optimizer=gt.SGD(0.1))
    with pytest.raises(InvalidArgument, match="'hashed' is hashed"):
        export_rows(table, tmp_path / "x.safetensors")


def test_an_export_that_fails_leaves_what_was_there(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, path = head_of(cluster), tmp_path / "w.safetensors"
    path.write_bytes(b"old")

    def fail(*_: object, **__: object) -> None:
        raise gt.errors.ShardUnavailable("gone")

    monkeypatch.setattr(head.table, "pull_into", fail)
    with pytest.raises(gt.errors.ShardUnavailable):
        gt.export_class_weights(head, path)
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["w.safetensors"]


def test_a_full_disk_is_named_with_the_file(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left .*w\.safetensors") as caught:
        gt.export_class_weights(head_of(cluster), tmp_path / "w.safetensors")
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


ROUND_TRIP = """
import json, resource, sys
from pathlib import Path
import geartrain as gt
with gt.local() as cluster:
    head = gt.ClassHead(cluster, "w", num_classes=400_000, dim=128, optimizer=gt.SGD(0.1))
    path = gt.export_class_weights(head, Path(sys.argv[1]) / "w.safetensors")  # 195 MiB; no row exists yet
    print(json.dumps([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10, path.stat().st_size >> 20]))
"""


@pytest.mark.slow
def test_an_export_needs_no_memory_for_the_matrix(tmp_path: Path) -> None:
    base = "import json, resource, torch, geartrain as gt; gt.ClassHead; " + (
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)"
    )
    run = {"capture_output": True, "text": True, "check": True}
    before = int(subprocess.run([sys.executable, "-c", base], **run).stdout)  # type: ignore[call-overload]
    done = subprocess.run([sys.executable, "-c", ROUND_TRIP, str(tmp_path)], **run)  # type: ignore[call-overload]
    peak, size = json.loads(done.stdout)
    assert size == 195
    assert peak - before < 60
