"""The sampler: the classes that the host chooses, by tensor operations and by kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.ams.kernels.ops import sample_ids
from geartrain.ams.programs.selection import positives_and_sample
from geartrain.bridge.kernels.sampling import SampledIds, filled_by_sample, room_for, sample_ids_on

CPU = torch.device("cpu")
SEEDS = st.integers(-(2**63), 2**64 - 1)
STEPS = st.integers(0, 2**40)


@settings(max_examples=60, deadline=None)
@given(num_ids=st.integers(1, 80) | st.integers(1, 70_000), share=st.floats(0, 1), seed=SEEDS, step=STEPS)
def test_the_sample_is_that_of_every_process(num_ids: int, share: float, seed: int, step: int) -> None:
    count = int(num_ids * share)
    found = sample_ids_on(CPU, num_ids, count, seed, step)
    np.testing.assert_array_equal(found.numpy(), sample_ids(num_ids, count, seed, step))


def require(sample: SampledIds, ids: np.ndarray, num_given: int, start: int, stop: int, room: int) -> None:
    """That it has those of the ids in [start, stop), and padding."""
    here = ids[(ids >= start) & (ids < stop)][:room] - start
    assert int(sample.num_given) == num_given and int(sample.num) == len(here) and len(sample.ids_A) == room
    np.testing.assert_array_equal(sample.ids_A[: len(here)].cpu(), here)
    assert (sample.ids_A[len(here) :] == stop - start - 1).all()


@settings(max_examples=100, deadline=None)
@given(data=st.data(), num_ids=st.integers(2, 300), seed=st.integers(0, 2**64 - 1), step=STEPS)
def test_ids_are_filled_up_as_on_the_host(data: st.DataObject, num_ids: int, seed: int, step: int) -> None:
    labels = np.array(data.draw(st.lists(st.integers(0, num_ids - 1), max_size=30)), np.int64)
    budget, start = data.draw(st.integers(1, num_ids - 1)), data.draw(st.integers(0, num_ids - 1))
    stop = data.draw(st.integers(start, num_ids))
    expected = positives_and_sample(labels, num_ids, budget, seed, step).ids
    room = data.draw(st.sampled_from([3, room_for(len(labels), budget, num_ids, stop - start)]))
    padded = torch.from_numpy(np.concatenate([labels, [num_ids, -1, num_ids + 7]]))
    found = filled_by_sample(padded, num_ids, budget, seed, step, start=start, stop=stop, room=room)
    require(found, expected, len(np.unique(labels)), start, stop, room)


@pytest.mark.parametrize(
    ("num_ids", "budget", "num_given", "start", "stop"),
    [(1000, 100, 7, 0, 1000), (4097, 2000, 500, 33, 2900), (40_000, 3000, 0, 31, 32), (70, 5, 40, 0, 70)],
)
def test_a_kernel_chooses_what_the_host_does(
    kernel_device: torch.device, num_ids: int, budget: int, num_given: int, start: int, stop: int
) -> None:
    labels = np.random.default_rng(num_ids).integers(0, num_ids, num_given)
    given = torch.from_numpy(np.concatenate([labels, labels[:5], [num_ids, -1]])).to(kernel_device)
    room = room_for(len(labels), budget, num_ids, stop - start)
    expected = positives_and_sample(labels, num_ids, budget, 2**64 - 3, 9).ids
    for places in (room, 3):
        found = filled_by_sample(given, num_ids, budget, 2**64 - 3, 9, start=start, stop=stop, room=places)
        require(found, expected, len(np.unique(labels)), start, stop, places)


@pytest.mark.parametrize(
    ("num_ids", "budget", "num_given", "start", "stop"), [(1000, 100, 7, 0, 400), (4097, 2000, 500, 33, 2900)]
)
def test_a_kernel_chooses_for_its_part_the_draws_that_count(
    kernel_device: torch.device, num_ids: int, budget: int, num_given: int, start: int, stop: int
) -> None:
    labels = np.random.default_rng(num_ids).integers(0, num_ids, num_given)
    drawn, own = sample_ids(num_ids, budget, 3, 9), labels[(labels >= start) & (labels < stop)]
    fresh = np.flatnonzero(~np.isin(drawn, labels))
    num_draws = fresh[budget - len(np.unique(labels)) - 1] + 1
    told: list[torch.Tensor] = []

    def limit(is_own_N: torch.Tensor) -> torch.Tensor:
        told.append(is_own_N)
        return torch.tensor(num_draws, device=kernel_device)

    expected = positives_and_sample(labels, num_ids, budget, 3, 9).ids
    expected = expected[(expected >= start) & (expected < stop)] - start
    given, where = torch.from_numpy(own).to(kernel_device), {"start": start, "stop": stop, "room": stop - start}
    found = filled_by_sample(given, num_ids, budget, 3, 9, **where, limit=limit)
    np.testing.assert_array_equal(found.ids_A[: int(found.num)].cpu(), expected)
    is_own = (drawn >= start) & (drawn < stop) & ~np.isin(drawn, labels)
    np.testing.assert_array_equal(told[0].cpu(), is_own)


def test_there_is_room_for_any_sample() -> None:
    assert room_for(10, 50, 1000, 1000) == 50 and room_for(60, 50, 1000, 1000) == 60
    assert room_for(0, 10**6, 10**7, 10**7 // 8) < 1.04 * 10**6 / 8
    assert room_for(5, 900, 1000, 7) == 7
    ids = np.sort(sample_ids(10**6, 10**5, 1, 2))
    most = max(np.histogram(ids, bins=1000, range=(0, 10**6))[0])
    assert most < room_for(0, 10**5, 10**6, 1000) < 3 * 100
