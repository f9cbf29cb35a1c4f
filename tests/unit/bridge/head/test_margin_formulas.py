"""Margins that see more than the angle, against the formulas of their papers in float64, wherever the rows are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.head.loss.batch import Batch, Targets
from geartrain.bridge.head.loss.chunk_pass import pass_for
from geartrain.bridge.head.loss.margins.margin import TargetLogits, changes_negatives
from geartrain.bridge.head.loss.margins.scale import automatic_scale
from geartrain.bridge.placements.workspace import Arithmetic, Scratch, Workspace
from tests.support import heads
from tests.support.margin_twins import MarginTwin, margin_batch, twin_step
from tests.support.rank_processes import run_ranks

CLASSES, DIM, BATCH, STEPS = 80, 6, 14, 4
SELECT = gt.PartialFC(0.5, seed=3, corrected=True)
MARGINS: list[Any] = [
    gt.AdaFace(scale=12, margin=0.4, momentum=0.7),
    gt.MagFace(scale=12, min_margin=0.1, largest_margin=0.5, shortest=2.0, longest=4.0, regulariser=9.0),
    gt.ElasticArcFace(scale=12, margin=0.3, std=0.05, seed=2**40 + 1),
    gt.ElasticCosFace(scale=12, margin=0.2, std=0.05),
    gt.CurricularFace(scale=12, margin=0.3, momentum=0.5),
    gt.FilteredMargin(gt.ArcFace(scale=12, margin=0.3), above=0.3),
    gt.FilteredMargin(gt.AdaFace(scale=12, margin=0.4, momentum=0.7), above=0.2),
    gt.FilteredMargin(gt.CurricularFace(scale=12, margin=0.3, momentum=0.5), above=0.5),
]


def named(margin: Any) -> str:
    if isinstance(margin, gt.FilteredMargin):
        return f"Filtered-{named(margin.margin)}"
    return type(margin).__name__


make_head = partial(
    heads.make_head,
    num_classes=CLASSES,
    dim=DIM,
    select=SELECT,
    optimizer=gt.SGD(lr=0.5),
    initializer=gt.Normal(std=0.3),
)


def batch(step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Features of lengths on both sides of what MagFace clamps, and a class with two samples."""
    generator = torch.Generator().manual_seed(step)
    features = torch.randn(BATCH, DIM, generator=generator) * torch.linspace(0.5, 2.5, BATCH)[:, None]
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    labels[1] = labels[0]
    return features.to(dtype), labels


@pytest.mark.parametrize("place", heads.PLACES)
@pytest.mark.parametrize("margin", MARGINS, ids=named)
def test_every_margin_is_its_papers_formula_in_every_place(cluster: Cluster, margin: Any, place: str) -> None:
    if place == "hosted" and changes_negatives(margin):
        with pytest.raises(InvalidArgument, match=r"Face.*other classes.*rows='pull' or rows='ranks'"):
            make_head(cluster, margin=margin, rows="hosted")
        return
    for dtype in (torch.float32, torch.float64) if place in ("held", "ranks") else (torch.float32,):
        head = make_head(cluster, margin=margin, **heads.PLACES[place], reuse=dtype == torch.float64)
        twin, optimizer, rows = MarginTwin(margin), gt.RowOptimizer(head), head.weights().double()
        for step in range(STEPS):
            features, labels = batch(step, dtype)
            loss = head(features.requires_grad_(), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            expected, gradient, rows = twin_step(twin, SELECT, features.detach(), labels, rows, step)
            precise = 1e-7 if dtype == torch.float64 and place == "held" else 2e-5
            torch.testing.assert_close(loss.detach().double(), expected, rtol=precise, atol=precise)
            assert features.grad is not None
            torch.testing.assert_close(features.grad.double(), gradient, rtol=1e-4, atol=2e-5)
            torch.testing.assert_close(head.weights().double(), rows, rtol=1e-4, atol=2e-5)
            rows = head.weights().double()
        learned = head.get_extra_state()["margin_learned"]
        assert learned == pytest.approx(twin.known, rel=1e-5)


def test_a_margin_that_changes_negatives_has_no_float16_products() -> None:
    arithmetic = Arithmetic(device=torch.device("cpu"), compute=torch.float32, matmul=torch.float16)
    features, labels = batch(0)
    nothing = Targets(np.full(BATCH, -1, np.int64))
    for margin, kind in ((gt.CosFace(64), torch.float16), (gt.CurricularFace(64), torch.float32)):
        begun = margin.for_batch(margin_batch(features.norm(dim=1), labels)) if hasattr(margin, "for_batch") else margin
        made = Batch.of(features, nothing, labels.numpy(), begun, 5, arithmetic)
        assert made.arithmetic.matmul == kind and made.shifted


# Functions of a batch, at the ends of what they are given.


def target_of(margin: Any, norms: Tensor) -> Callable[[Tensor, Tensor], TargetLogits]:
    """The margin's target in a first batch of these lengths."""
    labels = torch.arange(len(norms))
    cos = torch.zeros_like(norms)
    begun = (
        margin.for_batch(margin_batch(norms, labels, target_cos=lambda: cos))
        if hasattr(margin, "for_batch")
        else margin
    )
    return lambda cos_B, norms_B: TargetLogits(*begun.target(cos_B, norms_B, labels))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("margin", MARGINS[:5], ids=named)
def test_everything_is_finite_at_the_ends(margin: Any, dtype: torch.dtype) -> None:
    cos = torch.tensor([-1.0, 1.0, -1.0001, 1.0001, 0.0, 1.0, -1.0], dtype=dtype)
    for norms in (
        torch.tensor([1e-12, 1e-12, 2.0, 4.0, 3.0, 1e6, 1e6], dtype=dtype),
        torch.full((7,), 3.0, dtype=dtype),
    ):
        for value in target_of(margin, norms)(cos, norms):
            assert value is None or (torch.isfinite(value).all() and value.dtype == dtype)
        for value in target_of(margin, norms[:1])(cos[:1], norms[:1]):
            assert value is None or torch.isfinite(value).all()


def test_equal_lengths_and_single_samples_have_the_margin_of_a_usual_image() -> None:
    for norms in (torch.full((5,), 7.3), torch.tensor([0.2])):
        begun = gt.AdaFace(scale=64).for_batch(margin_batch(norms, torch.arange(len(norms))))
        torch.testing.assert_close(begun.quality_B, torch.zeros_like(norms), rtol=0, atol=1e-4)


def test_what_is_not_finite_is_not_learned() -> None:
    known = {"norm_mean": torch.tensor(2.0).double(), "norm_std": torch.tensor(1.0).double()}
    made = margin_batch(torch.tensor([1.0, torch.nan]), torch.arange(2), known=known)
    gt.AdaFace(scale=64).for_batch(made)
    assert {name: float(value) for name, value in made.learned.items()} == {
        "norm_mean": 2.0,
        "norm_std": 1.0,
        "norm_batches": 0.0,
    }
    empty = margin_batch(torch.ones(0), torch.arange(0), known=known)
    gt.AdaFace(scale=64).for_batch(empty)
    assert empty.learned == {}


# Elastic margins.


def test_draws_are_normal_and_a_function_of_seed_step_place_and_class() -> None:
    labels = torch.arange(20_000) % 7
    norms = torch.ones(len(labels))

    def drawn(**more: Any) -> Tensor:
        margin = gt.ElasticCosFace(64, margin=0.5, std=0.1, seed=more.pop("seed", 0))
        return margin.for_batch(margin_batch(norms, labels, **more)).margins_B

    one = drawn(step=5)
    assert float(one.mean()) == pytest.approx(0.5, abs=0.003) and float(one.std()) == pytest.approx(0.1, rel=0.02)
    assert float(((one - 0.5).abs() < 0.1).double().mean()) == pytest.approx(0.6827, abs=0.012)
    torch.testing.assert_close(drawn(step=5, first_sample=7)[:-7], one[7:], rtol=0, atol=0)
    for others in (drawn(step=6), drawn(step=5, seed=2**32), drawn(step=5, first_sample=1)):
        assert float(torch.corrcoef(torch.stack([one, others]))[0, 1]) == pytest.approx(0, abs=0.03)
    assert torch.equal(drawn(training=False), torch.full((20_000,), 0.5).double())


# Filtered margins.


@pytest.mark.parametrize("place", ["held", "streamed", "ranks"])
def test_a_sample_whose_other_classes_are_all_filtered_has_no_loss_and_moves_nothing(
    cluster: Cluster, place: str
) -> None:
    margin = gt.FilteredMargin(gt.ArcFace(scale=64), above=-1.0)
    head = make_head(cluster, margin=margin, **heads.PLACES[place])
    rows, before = gt.RowOptimizer(head), head.weights()
    features, labels = batch(0)
    loss = head(features.requires_grad_(), labels)
    loss.backward()
    rows.step()
    assert float(loss.detach()) == 0.0
    assert features.grad is not None and not features.grad.any()
    assert torch.equal(head.weights(), before)
    assert head.stats is not None and head.stats.accuracy < 1.0


@pytest.mark.parametrize("above", [0.3, -1.0])
def test_the_share_of_smoothed_labels_is_over_filtered_classes_too(above: float) -> None:
    margin = gt.FilteredMargin(gt.CosFace(scale=8, margin=0.2), above)
    settings: dict[str, Any] = {"label_smoothing": 0.1, "optimizer": gt.SGD(1.0), "rows": "ranks"}
    head = heads.make_head(None, "c", num_classes=CLASSES, dim=DIM, margin=margin, **settings)
    features, labels = batch(0, torch.float64)
    optimizer, w, x = gt.RowOptimizer(head), head.weights().double().requires_grad_(), features.clone().requires_grad_()
    loss = head(features.requires_grad_(), labels)
    loss.backward()
    optimizer.step()
    cos = F.normalize(x) @ F.normalize(w).t()
    is_target = F.one_hot(labels, CLASSES).bool()
    target = 8 * (cos[is_target] - 0.2)
    others = (8 * cos).masked_fill((cos > above) | is_target, -torch.inf)
    log_sum = torch.cat([others, target[:, None]], dim=1).logsumexp(1)
    expected = (log_sum - 0.9 * target - 0.1 * 8 * cos.mean(1)).mean()
    expected.backward()
    torch.testing.assert_close(loss.detach(), expected.detach())
    assert w.grad is not None
    torch.testing.assert_close(features.grad, x.grad, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(head.weights().double(), w.detach() - w.grad, rtol=1e-5, atol=1e-6)


def test_a_filtered_class_is_not_pushed_away_and_the_others_are() -> None:
    margin = gt.FilteredMargin(gt.CosFace(scale=8, margin=0.1), above=0.4)
    head = gt.ClassHead(None, "c", num_classes=4, dim=3, margin=margin, optimizer=gt.SGD(1.0), rows="ranks")
    rows = torch.tensor([[1.0, 0.0, 0.0], [0.9, 0.4, 0.0], [0.1, 0.0, 1.0], [-0.5, 0.5, 0.5]])
    head.table.assign(np.arange(4), rows.numpy())
    optimizer = gt.RowOptimizer(head)
    head(torch.tensor([[1.0, 0.1, 0.2]]), torch.tensor([0])).backward()
    optimizer.step()
    assert (head.weights() != rows).any(1).tolist() == [True, False, True, True]


def test_a_cosine_that_crosses_the_threshold_between_the_passes_weighs_no_more_than_all() -> None:
    """The sums lack a class that the second pass, by rounding, finds below the threshold, far above the target."""
    arithmetic = Arithmetic(device=torch.device("cpu"), compute=torch.float32, matmul=torch.float32)
    margin = gt.FilteredMargin(gt.CosFace(scale=64, margin=0.0), above=0.8)
    made = Batch.of(torch.eye(1, 2), Targets(np.array([-1])), np.zeros(1, np.int64), margin, 2, arithmetic)
    made.lse2_B, made.target_weight_B = torch.full((1,), -60.0), torch.full((1,), -1.0)
    rows = torch.tensor([[0.8 - 1e-6, 0.6]])
    pass_for(made).overwrite(Workspace(arithmetic, Scratch()), rows, 0, torch.tensor(1.0))
    assert 0.5 < float(rows.norm()) <= 1.0


def test_a_threshold_and_a_margin_to_filter_are_needed() -> None:
    for above in (1.5, -2.0, float("nan")):
        with pytest.raises(InvalidArgument, match=r"above is .*a cosine, in \[−1, 1\]"):
            gt.FilteredMargin(gt.ArcFace(), above=above)
    for wrong in (None, gt.ArcFace, 0.4):
        with pytest.raises(InvalidArgument, match=r"margin is .*a margin, such as ArcFace\(\)"):
            gt.FilteredMargin(wrong)  # type: ignore[arg-type]


def test_a_filtered_margin_takes_the_scale_of_the_classes() -> None:
    head = gt.ClassHead(None, "c", num_classes=10**5, dim=2, margin=gt.FilteredMargin(gt.ArcFace()), rows="ranks")
    assert head.margin == gt.FilteredMargin(gt.ArcFace(automatic_scale(10**5)), 0.4)


# Several ranks.


@pytest.mark.parametrize("margin", [MARGINS[0], MARGINS[2], MARGINS[4], MARGINS[6]], ids=named)
def test_ranks_have_the_margin_of_the_joint_batch(margin: Any, tmp_path: Path) -> None:
    ranks = 2
    run_ranks(_train_rank, ranks, tmp_path, margin)
    parts = [np.load(tmp_path / f"rank{rank}.npz") for rank in range(ranks)]
    for place in ("ranks", "pull"):
        twin = MarginTwin(margin)
        with gt.local() as cluster:
            rows = make_head(cluster, margin=margin).weights().double()
        for step in range(STEPS):
            features, labels = batch(step)
            expected, gradient, _ = twin_step(twin, SELECT, features, labels, rows, 0)
            found = sum(float(part[f"{place}-loss"][step]) for part in parts)
            assert found == pytest.approx(float(expected), rel=2e-5)
            gradients = np.concatenate([part[f"{place}-gradient-{step}"] for part in parts])
            np.testing.assert_allclose(gradients, gradient, rtol=1e-4, atol=2e-5)
        for part in parts:
            assert dict(zip(part[f"{place}-names"], part[f"{place}-known"], strict=True)) == pytest.approx(
                twin.known, rel=1e-5
            )


def _train_rank(rank: int, ranks: int, folder: Path, margin: Any) -> None:
    """Forward passes of untouched rows; those in a cluster are the same in one of each rank's own."""
    arrays: dict[str, Any] = {}
    with gt.local() as cluster:
        for place in ("ranks", "pull"):
            settings = {"sync": True} if place == "pull" else {}
            head = make_head(cluster, margin=margin, rows=place, **settings)
            losses = []
            for step in range(STEPS):
                features, labels = batch(step)
                share = [slice(0, 5), slice(5, BATCH)][rank] if step % 2 else [slice(0, 0), slice(0, BATCH)][rank]
                own = features[share].clone().requires_grad_()
                loss = head(own, labels[share])
                loss.backward()
                head.row_update.discard()
                assert own.grad is not None
                losses.append(float(loss.detach()) / ranks)  # as averages over the ranks take it
                arrays[f"{place}-gradient-{step}"] = own.grad.numpy() / ranks
            arrays[f"{place}-loss"] = np.array(losses)
            known = head.get_extra_state()["margin_learned"]
            arrays[f"{place}-names"], arrays[f"{place}-known"] = np.array(list(known)), np.array(list(known.values()))
    np.savez(folder / f"rank{rank}.npz", **arrays)


@pytest.mark.parametrize("place", ["held", "streamed", "ranks"])
@pytest.mark.parametrize("margin", [MARGINS[1], MARGINS[4], MARGINS[5]], ids=named)
def test_micro_batches_with_other_active_classes_are_summed(margin: Any, place: str) -> None:
    with gt.local() as cluster:
        head = make_head(cluster, margin=margin, **heads.PLACES[place])
        twin, optimizer, before = MarginTwin(margin), gt.RowOptimizer(head), head.weights().double()
        change = torch.zeros_like(before)
        for number in range(3):
            features, labels = batch(number)
            (head(features.requires_grad_(), labels) * (number + 1)).backward()
            _, gradient, after = twin_step(twin, SELECT, features.detach(), labels, before, 0)
            change += (after - before) * (number + 1)
            assert features.grad is not None
            torch.testing.assert_close(features.grad.double(), gradient * (number + 1), rtol=1e-4, atol=2e-5)
        optimizer.step()
        torch.testing.assert_close(head.weights().double(), before + change, rtol=1e-4, atol=5e-5)
