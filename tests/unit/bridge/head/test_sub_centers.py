"""A head whose classes have several centers, against the largest cosine written out in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.bridge.head.loss.batch import Batch, DeviceTargets, Targets
from geartrain.bridge.head.loss.chunk_pass import TensorPass
from geartrain.bridge.head.loss.softmax import OnlineSoftmax
from geartrain.bridge.head.loss.sub_centers import at_centers, nearest_centers
from geartrain.bridge.placements.workspace import Arithmetic, Scratch, Workspace
from tests.support import heads
from tests.support.margin_twins import MarginTwin, twin_step

CLASSES, DIM, BATCH = 60, 6, 14
PLACES: dict[str, dict[str, Any]] = {
    "held": {"rows": "pull"},
    "not cached": {"rows": "pull", "logits_cache_bytes": 0},
    "partly cached": {"rows": "pull", "logits_cache_bytes": 4 * BATCH * 3 * 20},
    "streamed": {"rows": "pull", "rows_cache_bytes": 0},
    "hosted": {"rows": "hosted"},
    "ranks": {"rows": "ranks"},
    "ranks, not cached": {"rows": "ranks", "logits_cache_bytes": 0},
}
SELECTIONS: dict[str, Any] = {
    "full": gt.FullSoftmax(),
    "partial": gt.PartialFC(0.4, seed=3),
    "corrected": gt.PartialFC(0.4, seed=3, corrected=True),
}
OTHERS: list[Any] = [
    gt.CosFace(scale=300, margin=0.2),  # whose exponents are shifted
    gt.AdaFace(scale=12, margin=0.4, momentum=0.7),
    gt.CurricularFace(scale=12, margin=0.3, momentum=0.5),
    gt.FilteredMargin(gt.ArcFace(scale=12, margin=0.3), above=0.3),
    gt.FilteredMargin(gt.CurricularFace(scale=12, margin=0.3), above=0.5),
]


def made(cluster: Any, centers: int = 3, name: str = "h", **more: Any) -> gt.ClassHead:
    wanted: dict[str, Any] = {"num_classes": CLASSES, "dim": DIM, "margin": gt.ArcFace(scale=12, margin=0.3), **more}
    wanted = {"optimizer": gt.SGD(lr=0.5), "initializer": gt.Normal(std=0.3), **wanted}
    return heads.make_head(cluster, name, sub_centers=centers, **wanted)


def centers_of(head: gt.ClassHead) -> Tensor:
    return head.weights().double().view(CLASSES, head.sub_centers, DIM)


def batch(step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    labels[1] = labels[0]
    return torch.randn(BATCH, DIM, generator=generator, dtype=dtype), labels


def check_steps(head: gt.ClassHead, select: Any, dtype: torch.dtype, precise: float = 2e-5) -> None:
    twin, optimizer, rows = MarginTwin(head.margin), gt.RowOptimizer(head), centers_of(head)
    for step in range(2):
        features, labels = batch(step, dtype)
        loss = head(features.requires_grad_(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected, gradient, rows = twin_step(twin, select, features.detach(), labels, rows, step)
        torch.testing.assert_close(loss.detach().double(), expected, rtol=precise, atol=precise)
        assert features.grad is not None
        torch.testing.assert_close(features.grad.double(), gradient, rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(centers_of(head), rows, rtol=1e-4, atol=2e-5)
        rows = centers_of(head)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("selection", SELECTIONS)
def test_every_place_has_the_largest_cosine_and_its_gradient(cluster: Cluster, place: str, selection: str) -> None:
    for centers in (1, 2, 3):
        for dtype in (torch.float32, torch.float64):  # compiled, and in tensor operations
            head = made(cluster, centers, f"{centers}-{dtype}", select=SELECTIONS[selection], **PLACES[place])
            check_steps(head, SELECTIONS[selection], dtype)


@pytest.mark.parametrize("margin", OTHERS, ids=lambda margin: type(margin).__name__)
@pytest.mark.parametrize("place", ["held", "not cached", "streamed", "ranks"])
def test_margins_see_the_cosine_of_the_nearest_center(cluster: Cluster, margin: Any, place: str) -> None:
    select = SELECTIONS["corrected"]
    for dtype in (torch.float32, torch.float64):
        head = made(cluster, 3, str(dtype), margin=margin, select=select, **PLACES[place])
        check_steps(head, select, dtype, 1e-4)


@pytest.mark.parametrize("place", ["held", "not cached", "streamed", "hosted", "ranks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_of_equal_centers_the_first_one_learns(cluster: Cluster, place: str, dtype: torch.dtype) -> None:
    head, single = (made(cluster, centers, str(centers), **PLACES[place]) for centers in (3, 1))
    rows = single.weights().numpy()
    head.table.assign(np.arange(CLASSES), np.tile(rows, 3))
    features, labels = batch(0, dtype)
    losses = [item(features, labels) for item in (head, single)]
    for item, loss in zip((head, single), losses, strict=True):
        loss.backward()
        gt.RowOptimizer(item).step()
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    torch.testing.assert_close(head.weights()[:, 0], single.weights(), rtol=1e-5, atol=1e-6)
    assert np.array_equal(head.weights()[:, 1], rows) and np.array_equal(head.weights()[:, 2], rows)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 4), st.integers(0, 5), st.integers(1, 5), st.randoms(use_true_random=False))
def test_what_is_at_the_centers_is_the_first_of_the_largest(classes: int, size: int, centers: int, random: Any) -> None:
    values_SB = torch.tensor([[float(random.randint(0, 2)) for _ in range(size)] for _ in range(classes * centers)])
    values_SB = values_SB.view(classes * centers, size)
    largest_NB, chosen_NB = nearest_centers(values_SB, centers)
    table = values_SB.numpy().reshape(classes, centers, size)
    assert np.array_equal(largest_NB, table.max(1)) and np.array_equal(chosen_NB, table.argmax(1))
    spread = at_centers(largest_NB + 1, chosen_NB, centers).numpy().reshape(table.shape)
    assert np.array_equal(spread.sum(1), table.max(1) + 1) and ((spread > 0).sum(1) == 1).all()


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize(
    ("matmul", "precise"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 5e-3)], ids=str
)
def test_tensor_operations_follow_the_formula(on_device: bool, matmul: torch.dtype, precise: float) -> None:
    """Of operands of 16 bits, too, and where only a device knows which rows are the targets'."""
    (features, labels), margin = batch(0), gt.ArcFace(scale=12, margin=0.3)
    rows = torch.randn(CLASSES, 3 * DIM, generator=torch.Generator().manual_seed(1))
    arithmetic = Arithmetic(device=torch.device("cpu"), compute=torch.float32, matmul=matmul)
    targets = DeviceTargets(labels) if on_device else Targets(labels.numpy())
    made_of = Batch.of(features, targets, labels.numpy(), margin, CLASSES, arithmetic)
    made_of.centers = 3
    one_pass, work = TensorPass(made_of), Workspace(arithmetic, Scratch())
    softmax = OnlineSoftmax(made_of, 1, want_gradient=True)
    chunks = [(0, 25), (25, CLASSES)]
    for start, stop in chunks:
        one_pass.forward(work, softmax.parts[0], rows[start:stop], start, None)
    losses, by_features = softmax.finish()
    x, w = features.double().requires_grad_(), rows.double().view(CLASSES, 3, DIM).requires_grad_()
    expected = MarginTwin(margin).loss(x, w, labels, labels)
    expected.backward()
    assert x.grad is not None and w.grad is not None and by_features is not None
    factor, _ = made_of.row_factors(torch.tensor(1.0))
    for start, stop in chunks:
        one_pass.overwrite(work, rows[start:stop], start, factor)
    torch.testing.assert_close(losses.mean().double(), expected.detach(), rtol=precise, atol=precise)
    torch.testing.assert_close(by_features.double() / BATCH, x.grad, rtol=precise, atol=precise)
    torch.testing.assert_close(rows.view_as(w).double(), w.grad, rtol=precise, atol=precise)


@pytest.mark.parametrize("rows", ["pull", "hosted", "ranks"])
def test_the_best_classes_are_those_of_the_nearest_centers(rows: str) -> None:
    with gt.local(num_shards=3) as cluster:
        head = made(cluster, rows=rows, select=gt.FullSoftmax())
        head.retire_classes(torch.tensor([7, 8]))
        features, _ = batch(0)
        cosines = torch.einsum("bd,nkd->bnk", F.normalize(features.double()), F.normalize(centers_of(head), dim=2))
        cosines = cosines.amax(2)
        cosines[:, [7, 8]] = -2
        for k in (1, 5, CLASSES - 2):
            scores, ids = head.predict(features, k)
            best = cosines.topk(k)
            torch.testing.assert_close(scores.double(), best.values, rtol=1e-5, atol=1e-6)
            assert torch.equal(ids, best.indices)
        assert head.predict(features[:0], 2)[0].shape == (0, 2)


# Rows in and out.


@pytest.mark.parametrize("rows", ["pull", "hosted", "ranks"])
def test_a_saved_model_goes_on_and_predicts_by_its_nearest_centers(rows: str, tmp_path: Path) -> None:
    backbone = nn.Linear(4, DIM)
    images, labels = torch.randn(BATCH, 4), batch(0)[1]
    with gt.local(num_shards=2) as cluster, gt.local() as other:
        model = nn.Sequential(backbone, made(cluster, rows=rows))
        model[1](backbone(images), labels).backward()
        gt.RowOptimizer(model[1]).step()
        gt.save(model, tmp_path / "m")
        again = nn.Sequential(nn.Linear(4, DIM), made(other, rows=rows))
        gt.load(again, tmp_path / "m")
        assert torch.equal(again[1].weights(), model[1].weights()) and again[1].weights().shape == (CLASSES, 3, DIM)
        with pytest.raises(gt.errors.SpecMismatch):
            gt.load(nn.Sequential(nn.Linear(4, DIM), made(other, 2, "two", rows=rows)), tmp_path / "m")
        scores, ids = model[1].predict(backbone(images), 4)
    loaded = gt.load_model(tmp_path / "m", backbone=nn.Linear(4, DIM))
    assert f"{CLASSES} classes, dim {DIM}" in repr(loaded)
    for answers, row, labels_ in zip(loaded.predict(images, 4), scores, ids, strict=True):
        assert [int(name) for name, _ in answers] == labels_.tolist()
        np.testing.assert_allclose([score for _, score in answers], row.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", ["pull", "ranks"])
def test_a_model_of_rows_as_wide_but_of_other_centers_is_not_loaded(rows: str, tmp_path: Path) -> None:
    with gt.local() as cluster, gt.local() as other:
        saved, mine = nn.Sequential(made(cluster, 3, rows=rows)), nn.Sequential(made(other, 2, rows=rows, dim=9))
        saved[0](*batch(0)).backward()
        gt.RowOptimizer(saved[0]).step()
        gt.save(saved, tmp_path / "m")
        before = mine[0].weights()
        with pytest.raises(gt.errors.SpecMismatch, match="sub_centers 3, this one 2"):
            gt.load(mine, tmp_path / "m")
        assert torch.equal(mine[0].weights(), before)


def test_a_state_is_of_as_many_centers() -> None:
    with gt.local() as cluster:
        head = made(cluster)
        state = head.get_extra_state()
        head.set_extra_state(state)
        with pytest.raises(gt.errors.SpecMismatch, match="sub_centers 2, this one 3"):
            head.set_extra_state({**state, "sub_centers": 2})


@pytest.mark.parametrize("rows", ["pull", "ranks"])
def test_centers_go_out_to_a_file_and_come_back(cluster: Cluster, rows: str, tmp_path: Path) -> None:
    head, again, single = (made(cluster, k, name, rows=rows) for k, name in ((3, "a"), (3, "b"), (1, "c")))
    path = gt.export_class_weights(head, tmp_path / "w.safetensors")
    assert torch.equal(load_file(path)["weight"], head.weights())
    gt.import_class_weights(again, path)
    assert torch.equal(again.weights(), head.weights())
    with pytest.raises(gt.errors.InvalidRows, match=rf"\[n, {DIM}\]"):
        gt.import_class_weights(single, path)
    flat = head.weights().flip(0).reshape(CLASSES * 3, DIM).clone()
    save_file({"weight": flat}, tmp_path / "flat.safetensors")
    gt.import_class_weights(again, tmp_path / "flat.safetensors")
    assert torch.equal(again.weights(), head.weights().flip(0))
    np.save(tmp_path / "plain.npy", single.weights().numpy())
    with pytest.raises(gt.errors.InvalidRows, match=rf"\[20, 3, {DIM}\] holds 20 classes"):
        gt.import_class_weights(again, tmp_path / "plain.npy")
    torch.save(torch.zeros(61, DIM), tmp_path / "odd.pt")
    with pytest.raises(gt.errors.InvalidRows, match=rf"\[n, 3, {DIM}\] or \[n · 3, {DIM}\], 3 centers"):
        gt.import_class_weights(again, tmp_path / "odd.pt")


@pytest.mark.parametrize("rows", ["pull", "ranks"])
def test_the_dominant_centers_make_a_head_of_one_each(cluster: Cluster, rows: str, tmp_path: Path) -> None:
    head, single = made(cluster, rows=rows), made(cluster, 1, "one", rows=rows)
    with torch.no_grad():
        centers, wanted = head.weights(), torch.arange(CLASSES) % 3
        wanted[50:] = 0  # of which there are no images
        labels = torch.arange(50).repeat(3)
        drawn = torch.cat([wanted[:50], wanted[:50], (wanted[:50] + 1) % 3])  # two of three by the dominant one
        features = centers[labels, drawn] * 7 + 0.01 * torch.randn(150, DIM)
    order = torch.randperm(150)
    loader = [(features[part], labels[part]) for part in order.split(40)]
    found = head.dominant_centers(loader, nn.Identity())
    assert torch.equal(found, wanted)
    gt.import_class_weights(single, gt.export_class_weights(head, tmp_path / "w.safetensors", dominant=found))
    assert torch.equal(single.weights(), centers[torch.arange(CLASSES), wanted])
    assert not single.dominant_centers(loader, nn.Identity()).any()
    for wrong in (found[:5], found + 1, found.float()):
        with pytest.raises(gt.errors.InvalidArgument, match=r"dominant is torch.*; it must be .* with 0 … 2"):
            gt.export_class_weights(head, tmp_path / "w.safetensors", dominant=wrong)


@pytest.mark.parametrize("rows", ["pull", "ranks"])
def test_imprinted_and_new_classes_begin_with_one_known_center(cluster: Cluster, rows: str) -> None:
    head = made(cluster, rows=rows, num_live_classes=50)
    first = head.weights()
    pictures, labels = torch.randn(8, DIM), torch.arange(8)
    assert head.imprint([(pictures, labels)], nn.Identity()) == 8
    torch.testing.assert_close(head.weights(labels)[:, 0], F.normalize(pictures))
    assert torch.equal(head.weights(labels)[:, 1:], first[:8, 1:])
    ids = head.add_classes(2, rows=pictures[:2])
    assert torch.equal(head.weights(ids)[:, 0], pictures[:2])
    assert torch.equal(head.weights(ids)[:, 1:], first[ids, 1:])
    assert torch.equal(head.weights(head.add_classes(1)), first[52:53])
    whole = torch.randn(2, 3, DIM)
    assert torch.equal(head.weights(head.add_classes(2, rows=whole)), whole)
    with pytest.raises(gt.errors.InvalidRows, match=rf"\[1, {DIM}\] or \[1, 3, {DIM}\]"):
        head.add_classes(1, rows=torch.zeros(1, 3 * DIM))


def test_each_center_begins_as_that_of_a_class_of_its_own() -> None:
    """Bounds of nn.Linear's values are those of the features' width, not of the row's."""
    with gt.local() as cluster:
        weights = made(cluster, initializer=None).weights()
        assert 0.9 * DIM**-0.5 < float(weights.abs().max()) <= DIM**-0.5
        assert len(torch.unique(weights)) == weights.numel()


def test_what_knows_one_center_only_is_refused() -> None:
    with gt.local() as cluster:
        for named, more in (
            ("margin is None and sub_centers is 3", {"margin": None}),
            ("KNNSoftmax.*sub_centers is 3.*PartialFC", {"select": gt.KNNSoftmax(0.2)}),
            ("label_smoothing is 0.1 and sub_centers is 3", {"label_smoothing": 0.1}),
            ("margin is None and sub_centers is 3|bias is True", {"bias": True}),
            ("dim is 1 and sub_centers is 3", {"dim": 1}),
        ):
            with pytest.raises(gt.errors.InvalidArgument, match=named):
                made(cluster, **more)
        for wrong in (0, 33, 1.5, True):
            with pytest.raises(gt.errors.InvalidArgument, match=r"sub_centers is .* from 1 to 32"):
                made(cluster, wrong)  # type: ignore[arg-type]
        with pytest.raises(gt.errors.InvalidArgument, match="sub_centers is 2; it must be an integer from 1 to 1"):
            made(cluster, 2, dim=40_000)
        head = made(cluster)
        with pytest.raises(gt.errors.InvalidArgument, match="margin is None and sub_centers is 3"):
            head.margin = None
        with pytest.raises(gt.errors.InvalidArgument, match="sub_centers of ClassHead 'h' cannot be set"):
            head.sub_centers = 2
        assert "sub_centers=3" in repr(head)


def test_the_plan_counts_every_center() -> None:
    one, three = (gt.memory_report(num_classes=1000, dim=8, sub_centers=centers) for centers in (1, 3))
    parts_of_one, parts_of_three = ({part.name: part.bytes for part in report.parts} for report in (one, three))
    for part in ("rows", "slots (moments)"):
        assert parts_of_three[part] == 3 * parts_of_one[part] > 0
    assert parts_of_three["updates"] == parts_of_one["updates"]
    assert "width 8 and 3 centers" in str(three) and "centers" not in str(one)
