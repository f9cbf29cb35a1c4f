"""The passes that kernels make, by their references: what the passes over chunks compute."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import geartrain as gt
from geartrain.bridge.head.backends.ranks import fused, passes, selector
from geartrain.bridge.head.loss.margins.angular import added_angles
from geartrain.bridge.head.loss.margins.margin import TargetLogits
from geartrain.bridge.kernels.launch import interpreted
from tests.support.heads import make_batch, make_head
from tests.support.rank_processes import run_ranks

NUM, DIM, SIZE = 700, 24, 10
COMMON: dict[str, Any] = {"num_classes": NUM, "dim": DIM, "initializer": gt.Normal(0.1)}
CASES: dict[str, dict[str, Any]] = {
    "linear": {"margin": None, "optimizer": gt.SGD(0.5)},
    "margin": {"margin": gt.ArcFace(scale=64), "optimizer": gt.SparseMomentum(0.1, 0.9, weight_decay=1e-4)},
    "sampled": {"margin": gt.CosFace(scale=16), "select": gt.PartialFC(0.6), "optimizer": gt.Adagrad(0.1)},
    "sampled, corrected": {"margin": None, "select": gt.PartialFC(0.6), "optimizer": gt.AdamW(0.01)},
    "trained lengths": {"margin": gt.MagFace(scale=16), "optimizer": gt.SGD(0.5)},
    "each loss": {"margin": gt.ArcFace(scale=16), "optimizer": gt.SGD(0.5), "reduction": "none"},
    "biases": {"margin": None, "bias": True, "optimizer": gt.SGD(0.5)},
    "nothing kept": {"margin": gt.ArcFace(scale=16), "optimizer": gt.SGD(0.5), "logits_cache_bytes": 0},
    "some kept": {"margin": None, "optimizer": gt.SGD(0.5), "logits_cache_bytes": 300 * SIZE * 4},
    "16 bits": {"margin": gt.ArcFace(scale=64), "optimizer": gt.SparseMomentum(0.1, 0.9), "dtype": "bfloat16"},
}

EIGHT_BITS: list[dict[str, Any]] = [
    {"margin": None, "optimizer": gt.SGD(0.5)},
    {"margin": None, "optimizer": gt.SGD(0.5), "initializer": gt.Constant(0.0)},
    {"margin": gt.ArcFace(scale=16), "optimizer": gt.SparseMomentum(0.1, 0.9), "slot_dtype": "int8"},
    {"margin": gt.CosFace(scale=16), "optimizer": gt.Adagrad(0.1), "select": gt.PartialFC(0.6)},
    {"margin": None, "optimizer": gt.SparseMomentum(0.1, 0.9), "slot_dtype": "int8", "dtype": "bfloat16"},
]


def results(case: str, *, is_fused: bool, rank: int = 0, ranks: int = 1, **more: Any) -> dict[str, Tensor]:
    """Of three steps, each of two micro-batches where ``parts`` says so, and clipped where ``clip`` does."""
    parts, clip = more.pop("parts", 1), more.pop("clip", None)
    steps = more.pop("steps", 3)
    options = {"select": gt.FullSoftmax()} | COMMON | CASES[case] | more
    head = make_head(on_device=True, fused=is_fused, **options)
    rows, found = gt.RowOptimizer(head), {}
    for step in range(steps):
        features, labels = make_batch(SIZE, head.num_classes, head.dim, step)
        labels[0] = labels[1]
        own, mine = features.detach()[rank::ranks].requires_grad_(), labels[rank::ranks]
        for x, y in zip(own.chunk(parts), mine.chunk(parts), strict=True):
            loss = head(x, y)
            (loss * torch.arange(1.0, loss.numel() + 1).view_as(loss)).sum().backward()
        assert bool(head.row_update._pending._fused) == is_fused
        if clip is not None:
            found[f"norm {step}"] = gt.clip_grad_norm_([], rows, clip)
        rows.step()
        rows.zero_grad()
        found |= {f"loss {step}": loss.detach(), f"gradient {step}": own.grad}
        found[f"highest {step}"] = torch.tensor(head.stats.highest_other or 0.0)
    return found | {"rows": head.weights().float()}


def compare(case: str, tolerance: float = 4e-5, **more: Any) -> None:
    expected, found = (results(case, is_fused=is_fused, **more) for is_fused in (False, True))
    for name, value in expected.items():
        if "highest" in name and not value:  # some is known where chunks do not look for it
            continue
        gap = float((found[name] - value).abs().max() / value.abs().max().clamp(min=1e-9))
        assert gap < tolerance, f"{name} is off by {gap}"


@pytest.fixture(autouse=True)
def _small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "RANGE_BYTES", 256 * SIZE * 4)


@pytest.mark.parametrize("case", CASES)
def test_losses_gradients_and_rows_are_those_of_chunks(case: str) -> None:
    compare(case, 5e-3 if case == "16 bits" else 4e-5)  # Adagrad's first step makes much of a last bit


@pytest.mark.parametrize("is_by_kernels", [False, True], ids=["tensors", "kernels"])
@pytest.mark.parametrize("options", EIGHT_BITS, ids=str)
def test_rows_of_eight_bits_are_those_of_chunks(options: dict[str, Any], is_by_kernels: bool) -> None:
    small = {"num_classes": 150} if is_by_kernels else {}
    more = {"dtype": "float8_e4m3fn", "steps": 1, "dim": 40} | small | options
    expected = results("linear", is_fused=False, **more)
    with interpreted() if is_by_kernels else contextlib.nullcontext():
        found = results("linear", is_fused=True, **more)
    rows, others = found.pop("rows"), expected["rows"]
    # Rounded by the same chance; a gradient's last bit may decide.
    assert ((rows - others).abs() > 1e-6 * others.abs()).float().mean() < 2e-3
    for name, value in found.items():
        if "highest" not in name or expected[name]:
            torch.testing.assert_close(value, expected[name], rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("late", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("case", ["linear", "margin"])
def test_micro_batches_of_one_active_set_are_summed_and_clipped(case: str, late: bool) -> None:
    compare(case, parts=2, clip=0.01, late=late)
    compare(case, clip=0.01, late=late)


@pytest.mark.parametrize("case", ["linear", "nothing kept"])
def test_micro_batches_of_other_sizes_are_summed_by_the_same_ranges(case: str) -> None:
    compare(case, parts=3, clip=0.01)


def test_micro_batches_with_other_classes_go_to_chunks() -> None:
    head = make_head(fused=True, **COMMON, **CASES["sampled"])
    other = make_head(on_device=True, **COMMON, **CASES["sampled"])
    for item in (head, other):
        rows = gt.RowOptimizer(item)
        for seed in range(2):
            item(*make_batch(SIZE, NUM, DIM, seed)).backward()
        rows.step()
    torch.testing.assert_close(head.weights(), other.weights())


@pytest.mark.parametrize(
    "options",
    [
        {"margin": gt.CurricularFace(scale=16)},
        {"margin": gt.ArcFace(scale=16), "sub_centers": 2},
        {"margin": None, "label_smoothing": 0.1},
        {"margin": None, "optimizer": gt.SparseMomentum(0.1, 0.9, untouched="elapsed")},
    ],
    ids=str,
)
def test_what_kernels_do_not_know_is_left_to_chunks(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "FusedPass", None)
    head = make_head(fused=True, **COMMON, **options)
    head(*make_batch(SIZE, NUM, DIM)).backward()


def test_features_that_are_not_finite_change_no_row() -> None:
    head = make_head(fused=True, late=True, **COMMON, **CASES["margin"])
    rows, before = gt.RowOptimizer(head), head.weights()
    head.backend.update.check_finite = lambda: None
    features, labels = make_batch(SIZE, NUM, DIM)
    labels[3] = NUM
    head(features, labels).backward()
    rows.step()
    torch.testing.assert_close(head.weights(), before, rtol=0, atol=0)
    with pytest.raises(gt.errors.InvalidIds, match=f"label {NUM} at index 3"):
        head(features, labels)


@pytest.mark.parametrize("late", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("case", ["linear", "margin", "sampled", "sampled, corrected", "trained lengths"])
def test_kernels_compute_the_same(case: str, late: bool) -> None:
    small = {"num_classes": 150, "select": CASES[case].get("select", gt.FullSoftmax())}
    expected = results(case, is_fused=True, steps=1, late=late, **small)
    with interpreted():
        found = results(case, is_fused=True, steps=1, late=late, **small)
    for name, value in expected.items():
        if "highest" in name and not value:
            continue
        gap = float((found[name] - value).abs().max() / value.abs().max().clamp(min=1e-9))
        assert gap < 3e-5, f"{name} is off by {gap}"


def on_two_ranks(rank: int) -> None:
    fused.RANGE_BYTES = 256 * SIZE * 4
    for case in ("linear", "margin", "sampled, corrected", "trained lengths"):
        compare(case, rank=rank, ranks=2, late=case == "margin")


def test_two_ranks_compute_the_same(tmp_path: Path) -> None:
    run_ranks(on_two_ranks, 2, tmp_path)


def with_padding(rank: int) -> None:
    """Two micro-batches whose classes together are just as many as there are places for those of one."""

    def trained(room: int, *, is_fused: bool) -> tuple[Tensor, int]:
        selector.room_for = lambda *_: room
        head = make_head(on_device=True, fused=is_fused, **COMMON, **CASES["sampled"])
        rows = gt.RowOptimizer(head)
        for seed in (2 * rank, 2 * rank + 1):
            head(*make_batch(SIZE, NUM, DIM, seed)).backward()
        num = head.row_update._pending._active.num
        rows.step()
        return head.weights(), num

    expected, num = trained(NUM // 2, is_fused=False)
    for is_fused in (False, True):
        torch.testing.assert_close(trained(num, is_fused=is_fused)[0], expected)


def test_padding_is_no_class_of_several_micro_batches(tmp_path: Path) -> None:
    run_ranks(with_padding, 2, tmp_path)


def without_rows(rank: int) -> None:
    """The last of three ranks has none of four classes, and no samples."""
    for is_interpreted in (False, True):
        found = []
        for is_fused in (False, True):
            head = make_head(on_device=True, fused=is_fused, **COMMON | {"num_classes": 4}, **CASES["sampled"])
            rows = gt.RowOptimizer(head)
            for step in range(2):
                features, labels = make_batch(4 * (rank < 2), 4, DIM, step)
                labels %= 2
                with interpreted() if is_fused and is_interpreted else contextlib.nullcontext():
                    head(features, labels).backward()
                    gt.clip_grad_norm_([], rows, 0.1)
                    rows.step()
                rows.zero_grad()
            found.append(head.weights())
        torch.testing.assert_close(*found)


def test_a_rank_without_rows_and_samples_takes_part(tmp_path: Path) -> None:
    run_ranks(without_rows, 3, tmp_path)


def test_a_margin_that_derives_from_a_known_one_has_its_own_formula() -> None:
    class Own(gt.ArcFace):
        def target(self, cos_B: Tensor, norms_B: Tensor | None = None, labels_B: Tensor | None = None) -> TargetLogits:
            del norms_B, labels_B
            return TargetLogits(2 * cos_B, torch.full_like(cos_B, 2.0))

    assert added_angles(gt.ArcFace(margin=0.3)) == (0.3, 0.0)
    assert added_angles(gt.CosFace(margin=0.2)) == (0.0, 0.2)
    assert added_angles(Own()) is None
