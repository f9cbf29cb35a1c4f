"""What kernels do for each sample of a head, in Triton's interpreter, beside the formulas in numpy and float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from geartrain.ams.programs.selection import SamplingCorrection
from geartrain.bridge.head.loss.margins.angular import CombinedMargin
from geartrain.bridge.kernels import sample_terms
from geartrain.bridge.kernels.launch import interpreted

SIZES = [1, 130, 1029]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ignored", [None, -100])
def test_labels_are_settled(size: int, ignored: int | None) -> None:
    labels = torch.from_numpy(np.random.default_rng(size).integers(0, 50, size))
    labels[size // 2] = 50
    labels[size // 3] = -100 if size < 1000 else 2**63 - 1
    with interpreted():
        made = sample_terms.prepare_labels(labels, 50, ignored, 10, 20, 4)
    good = (labels >= 0) & (labels < 50)
    counts = torch.where(good, 1.0, torch.where(labels == (ignored or 99), 0.0, torch.nan))
    torch.testing.assert_close(made.counts_B, counts, equal_nan=True)
    torch.testing.assert_close(made.num_counted, counts.sum(), equal_nan=True)
    assert float(made.divisor) == 4 * float(made.rank_divisor) == max(1, int((counts == 1).sum()))
    stand_in = labels[good].max() if good.any() else torch.tensor(0)
    torch.testing.assert_close(made.labels_B, labels.where(good, stand_in))
    is_here = good & (labels >= 10) & (labels < 30)
    torch.testing.assert_close(made.positions_B, torch.where(is_here, labels - 10, -1))


@pytest.mark.parametrize("size", SIZES)
def test_rows_are_found(size: int) -> None:
    generator = np.random.default_rng(size)
    numbers = torch.from_numpy(np.sort(generator.choice(3000, size, replace=False)))
    wanted = torch.from_numpy(generator.integers(-5, 3005, 200))
    for count in (None, torch.tensor(size // 2), torch.tensor(0)):
        valid = numbers if count is None else numbers[: int(count)]
        places = {int(number): place for place, number in enumerate(valid)}
        expected = torch.tensor([places.get(int(number), -1) for number in wanted])
        with interpreted():
            torch.testing.assert_close(sample_terms.find_rows(wanted, numbers, count), expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_active", [20, 49])
def test_the_weight_of_sampled_classes_is_that_of_the_host(size: int, num_active: int) -> None:
    labels = np.random.default_rng(size).integers(0, 15, size)
    expected = SamplingCorrection.of(labels, num_active, 50)
    with interpreted():
        found = sample_terms.sampled_weight(torch.from_numpy(labels), num_active, 50)
    assert expected is not None and float(found) == pytest.approx(expected.log2_weight, abs=3e-7)


@pytest.mark.parametrize("margin", [None, (0.5, 0.0), (0.0, 0.35), (math.pi, 0.1)], ids=str)
def test_losses_and_their_slopes_are_those_of_the_margin(margin: tuple[float, float] | None) -> None:
    cos_B = torch.linspace(-1, 1, 300, dtype=torch.float64).requires_grad_()
    scale = 16.0 if margin else 1.0
    if margin is None:
        target_B = cos_B
    else:
        combined = CombinedMargin(scale, 1.0, *margin)
        values, slopes, *_ = combined.target(cos_B.detach())
        target_B = values + slopes * (cos_B - cos_B.detach())
    others_B = torch.rand(300, dtype=torch.float64).mul_(50)
    others_B[7] = 0.0
    loss_B = torch.logsumexp(torch.stack([others_B.log(), target_B]), 0) - target_B
    loss_B.sum().backward()
    angle = None if margin is None else sample_terms.TargetAngle(scale, *margin)
    with interpreted():
        made = sample_terms.losses(cos_B.detach().float(), others_B, None, None, 0.0, None, angle)
    torch.testing.assert_close(made.losses_B.double(), loss_B.detach(), rtol=2e-5, atol=2e-5)
    assert cos_B.grad is not None
    inside = slice(2, -2)  # beside ± 1 sin θ is what rounding leaves of it
    expected_B = cos_B.grad[inside] / scale
    torch.testing.assert_close(made.target_weight_B[inside].double(), expected_B, rtol=2e-4, atol=2e-4)
    shares_B = torch.exp2(-made.lse2_B.double())
    torch.testing.assert_close(made.coefficients_B.double()[8:], shares_B[8:], rtol=1e-5, atol=0)


@pytest.mark.parametrize("way", ["mean", "samples", "ranks"])
@pytest.mark.parametrize("size", SIZES)
def test_factors_of_rows_are_those_of_a_batch(size: int, way: str) -> None:
    lse2_B, slopes_B = torch.rand(size), -torch.rand(size)
    ends_R, counted = torch.tensor([size // 3, size // 3, size]), torch.tensor(size - 0.5)
    upstream = {"mean": torch.tensor(2.5), "samples": torch.randn(size), "ranks": torch.tensor([3.0, 9.0, -4.0])}[way]
    with interpreted():
        ends = ends_R if way == "ranks" else None
        found = sample_terms.row_factors(upstream, ends, 16.0, counted, lse2_B, slopes_B)
        spoilt = sample_terms.row_factors(upstream * torch.nan, ends, 16.0, counted, lse2_B, slopes_B)
    by_B = torch.stack([upstream[int((ends_R <= b).sum())] for b in range(size)]) if way == "ranks" else upstream
    largest = upstream if way == "mean" else by_B.abs().max()
    divisor = 1.0 if way == "samples" else counted.clamp(min=1)
    torch.testing.assert_close(found[0], largest * 16.0 / divisor)
    assert (found[1] is None) == (way == "mean")
    if found[1] is not None:
        torch.testing.assert_close(found[1], by_B / largest)
    torch.testing.assert_close(found[2], found[0] + lse2_B @ slopes_B + counted)
    assert not spoilt[2].isfinite()


@pytest.mark.parametrize("has_own", [False, True])
def test_parts_of_a_gradient_are_added_up(has_own: bool) -> None:
    """As many as a large head has of them on a GPU."""
    torch.manual_seed(0)
    parts_PBD, rows_BD, numbers_XB = torch.randn(5, 7, 20), torch.randn(7, 20), torch.rand(4, 7)
    own = (rows_BD, sample_terms.Losses(*numbers_XB)) if has_own else None
    expected_BD = parts_PBD.double().sum(0)
    if has_own:
        expected_BD = expected_BD * numbers_XB[3].unsqueeze(1) + rows_BD * numbers_XB[2].unsqueeze(1)
    with interpreted():
        found_BD = sample_terms.finish_gradient(parts_PBD.clone(), own, scale=3.0)
    assert torch.allclose(found_BD.double(), 3 * expected_BD, rtol=1e-5, atol=1e-5)
