"""Imprinting any number of classes: one pass over the images, in bounded memory, all of it or nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from geartrain.ams.values.errors import InvalidArgument, NonFinite
from geartrain.ams.values.optimizers.registry import SparseMomentum
from geartrain.ams.values.specs import Normal
from geartrain.bridge.head.class_head import ClassHead
from geartrain.bridge.head.imprinting import imprint
from geartrain.bridge.head.imprinting.class_sums import ClassSums
from geartrain.bridge.head.loss.margins.angular import ArcFace
from tests.support import heads
from tests.support.rank_processes import on_ranks
from tests.support.reference import FakeCluster, FakeTable

CLASSES, DIM = 500, 8
A_FEW = 40 * (4 * DIM + 128)
"""Bytes for the sums of 40 classes."""


def make_head(**settings: Any) -> tuple[ClassHead, FakeTable]:
    cluster = FakeCluster()
    defaults = {"margin": ArcFace(scale=64), "optimizer": SparseMomentum(0.1), "initializer": Normal()}
    head = heads.make_head(cluster, "classes", num_classes=CLASSES, dim=DIM, **{**defaults, **settings})
    return head, cluster.tables["classes"]


def images(seed: int = 0, batches: int = 30, size: int = 64) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of the classes 100 … 499, in any order."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, DIM, generator=generator), torch.randint(100, CLASSES, (size,), generator=generator))
        for _ in range(batches)
    ]


class Counted:
    """A loader that counts how often it is read."""

    def __init__(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._batches = batches
        self.passes = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self.passes += 1
        return iter(self._batches)


def test_the_bar_is_on_stderr(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(imprint, "_BAR_AFTER_SECONDS", -1.0)
    head, _ = make_head()
    head.imprint(images(), nn.Identity())
    told = capsys.readouterr()
    assert told.err and not told.out


@pytest.mark.parametrize("memory_bytes", [1, A_FEW, 1 << 20])
def test_images_are_read_once_however_little_memory_there_is(memory_bytes: int) -> None:
    (head, table), loader = make_head(), Counted(images())
    before = table.rows.copy()
    num = head.imprint(loader, nn.Identity(), memory_bytes=memory_bytes)
    assert loader.passes == 1
    features, labels = (torch.cat(parts) for parts in zip(*images(), strict=True))
    sums = torch.zeros(CLASSES, DIM, dtype=torch.float64).index_add_(0, labels, features.double())
    met = np.unique(labels.numpy())
    assert num == len(met) > 300
    expected = nn.functional.normalize(sums).numpy()[met]
    np.testing.assert_allclose(table.rows[met], expected, rtol=1e-4, atol=1e-5)
    others = np.setdiff1d(np.arange(CLASSES), met)
    np.testing.assert_array_equal(table.rows[others], before[others])


def test_what_can_be_read_only_once_is_imprinted() -> None:
    heads = [make_head() for _ in range(2)]
    for head, _ in heads[:1]:
        head.imprint(images(), nn.Identity())
    assert heads[1][0].imprint(iter(images()), nn.Identity(), memory_bytes=A_FEW) > 300
    np.testing.assert_allclose(heads[1][1].rows, heads[0][1].rows, rtol=1e-4, atol=1e-5)


class Sum(nn.Module):
    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return first + second


@pytest.mark.parametrize("is_mapping", [False, True])
def test_a_backbone_of_several_tensors_is_given_them_as_its_forward_takes_them(is_mapping: bool) -> None:
    (head, table), (other, others) = make_head(), make_head()
    several = [
        ({"second": batch / 4, "first": batch} if is_mapping else (batch, batch / 4), labels)
        for batch, labels in images()
    ]
    assert head.imprint(several, Sum()) == other.imprint(
        [(1.25 * batch, labels) for batch, labels in images()], nn.Identity()
    )
    np.testing.assert_allclose(table.rows, others.rows, atol=1e-6)
    with pytest.raises(InvalidArgument, match="a tensor, a tuple of tensors or a dict of them"):
        head.imprint([("a.png", torch.tensor([3]))], Sum())


def test_memory_and_disk_are_those_of_the_classes_that_have_images() -> None:
    """A hundred million classes, of which a hundred have images, and memory for ten of them."""
    dim, classes = 64, np.arange(100) * 999_983
    with ClassSums(100_000_000, dim, 10 * (4 * dim + 128)) as sums:
        for _ in range(3):
            sums.add(torch.ones(100, dim), classes)
        file = sums._file
        assert file is not None
        assert Path(f"/proc/self/fd/{file.fileno()}").stat().st_blocks * 512 < 2 << 20
        assert bool((sums.of(classes) == 3).all())
        assert not sums.of(classes + 1).any()


@pytest.mark.parametrize("memory_bytes", [A_FEW, 1 << 20])
def test_a_feature_that_is_not_finite_leaves_every_class_as_it_was(memory_bytes: int) -> None:
    head, table = make_head()
    before, loader = table.rows.copy(), images()
    loader[-1][0][7, 3] = torch.nan
    with pytest.raises(NonFinite, match=f"feature of class {int(loader[-1][1][7])} .*No class was changed"):
        head.imprint(loader, nn.Identity(), memory_bytes=memory_bytes)
    np.testing.assert_array_equal(table.rows, before)


def test_a_disk_without_room_leaves_every_class_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    head, table = make_head()
    before = table.rows.copy()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(InvalidArgument, match=r"missing cannot take them .*16,000 bytes for 500 classes.*Set TMPDIR"):
        head.imprint(images(), nn.Identity(), memory_bytes=A_FEW)
    np.testing.assert_array_equal(table.rows, before)


def test_what_all_means_share_is_taken_off() -> None:
    (head, table), common = make_head(), 50 * torch.ones(DIM)
    own = torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(0))
    assert head.imprint([(common + own, torch.arange(CLASSES))], nn.Identity()) == CLASSES
    rows = torch.from_numpy(table.rows).double()
    direction = nn.functional.normalize(nn.functional.normalize(common + own).double().sum(0), dim=0)
    assert float((rows @ direction).abs().max()) < 1e-5
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(CLASSES, dtype=torch.float64), rtol=1e-5, atol=0)
    assert abs(float((rows @ rows.T).fill_diagonal_(0).mean())) < 0.02
    found = (nn.functional.normalize(common + own).double() @ rows.T).argmax(1)
    assert float((found == torch.arange(CLASSES)).double().mean()) > 0.9


def test_a_few_classes_among_others_keep_what_they_share() -> None:
    (head, table), features = make_head(), torch.ones(3, DIM) + 0.01 * torch.eye(3, DIM)
    assert head.imprint([(features, torch.arange(3))], nn.Identity()) == 3
    np.testing.assert_allclose(table.rows[:3], nn.functional.normalize(features).numpy(), rtol=1e-5)


def test_features_that_are_all_alike_change_nothing_and_imprint_says_so() -> None:
    head, table = make_head()
    before = table.rows.copy()
    assert head.imprint([(torch.rand(1, DIM).expand(CLASSES, DIM), torch.arange(CLASSES))], nn.Identity()) == 0
    np.testing.assert_array_equal(table.rows, before)


@on_ranks(2)
def test_ranks_imprint_the_classes_that_any_of_them_has(rank: int) -> None:
    for rows in ("pull", "ranks"):
        settings: dict[str, Any] = {"num_classes": CLASSES, "dim": DIM, "rows": rows}
        head = heads.make_head(FakeCluster() if rows == "pull" else None, "classes", sync=rows == "pull", **settings)
        before = head.weights()
        loader = Counted(images(seed=rank, batches=4))
        num = head.imprint(loader, nn.Identity(), memory_bytes=A_FEW if rank else 1 << 20)
        assert loader.passes == 1
        both = [*images(0, 4), *images(1, 4)]
        features, labels = (torch.cat(parts) for parts in zip(*both, strict=True))
        sums = torch.zeros(CLASSES, DIM).index_add_(0, labels, features)
        met = labels.unique()
        assert num == len(met) if rows == "pull" else num > 0
        expected = before.clone()
        expected[met] = nn.functional.normalize(sums[met])
        if rank == 0 or rows == "ranks":  # a fake cluster is each rank's own, and rank 0 writes
            torch.testing.assert_close(head.weights(), expected, rtol=1e-4, atol=1e-5)
