"""Ranks that fail in the exchange of sparsified gradients: a typed error on every live rank, and a way to go on."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import geartrain as gt
from geartrain.ams.values.errors import InvalidArgument, NonFinite, RankLost, SpecMismatch, SyncError
from geartrain.bridge.parallel.topk import bucket, selection
from tests.support.dying import Dies
from tests.support.rank_processes import on_ranks, run_ranks
from tests.unit.bridge.parallel.topk.test_topk_gradients import LR, SIZE, SPARSITY, Made, Tensors, made, step_of


def weights_of(parts: Made) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in parts[0].parameters()]


def saved(parts: Made) -> dict[str, Any]:
    parts[2].merge()
    return copy.deepcopy(parts[2].state_dict())


@on_ranks(2)
def test_a_residual_that_is_not_finite_is_named_and_a_loaded_state_goes_on(rank: int) -> None:
    """With a GradScaler, too: no scale would make it finite again."""
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0)):
        parts = made(scaler=scaler)
        step_of(parts, 0, rank, scale=1.0 if scaler is None else 2.0)
        state = saved(parts)
        if rank == 1:
            parts[2]._attached.state.residual["large"][3] = torch.nan  # type: ignore[attr-defined]
        before = weights_of(parts)
        with pytest.raises(NonFinite, match=r"momentum or the residual of parameter 'large' .* on rank 1, or would"):
            step_of(parts, 1, rank)
        assert all(torch.equal(item, other) for item, other in zip(before, weights_of(parts), strict=True))
        assert parts[2].skipped_steps == 0
        for _ in range(2):
            with pytest.raises(InvalidArgument, match=r"call load_state_dict\(\) on every rank"):
                step_of(parts, 1, rank)
        bad = copy.deepcopy(state)
        bad["residual"]["large"][3] = torch.inf
        with pytest.raises(NonFinite, match="saved gradient state of 'large' holds NaN or infinity"):
            parts[2].load_state_dict(bad)
        parts[2].load_state_dict(state)
        step_of(parts, 1, rank)
        assert parts[2].steps == 2


@on_ranks(2)
def test_a_rank_that_fails_tells_the_others(rank: int) -> None:
    parts = made()
    step_of(parts, 0, rank)
    state, before = saved(parts), weights_of(parts)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:

            def lacks_memory(*_: object, **__: object) -> None:
                raise MemoryError("no room")

            patch.setattr(bucket.CompiledCompaction, "compact", lacks_memory)
        with pytest.raises(MemoryError if rank == 1 else SyncError, match=r"no room|rank 1 failed; its error tells"):
            step_of(parts, 1, rank)
    assert all(torch.equal(item, other) for item, other in zip(before, weights_of(parts), strict=True))
    parts[2].load_state_dict(state)
    step_of(parts, 1, rank)


@on_ranks(2)
def test_a_state_that_one_rank_alone_loads_is_refused_on_every_rank(rank: int) -> None:
    """In the warm-up, where the number of steps decides how much travels; then other values with the same number."""
    parts = made(sparsity=0.95, warmup_steps=4)
    step_of(parts, 0, rank)
    state = saved(parts)
    for step in range(1, 3):
        step_of(parts, step, rank)
    before = weights_of(parts)
    if rank == 1:
        parts[2].load_state_dict(state)
    for _ in range(2):
        with pytest.raises(SpecMismatch, match="after 3 and 1 steps; rank 1 alone loaded one"):
            step_of(parts, 3, rank)
    if rank == 0:
        other = copy.deepcopy(state)
        other["momentum"]["small"][0] += 1
        parts[2].load_state_dict(other)
    with pytest.raises(SpecMismatch, match=r"after 1 and 1 steps\. Call"):
        step_of(parts, 3, rank)
    assert all(torch.equal(item, other) for item, other in zip(before, weights_of(parts), strict=True))
    if rank == 1:  # with a residual of a tensor that is dense, which no other state leaves behind
        parts[2].load_state_dict({**state, "residual": {**state["residual"], "small": torch.ones(3)}})
    parts[2].load_state_dict(state)
    step_of(parts, 3, rank)
    parts[2].merge()
    assert parts[2].steps == 2


@on_ranks(2)
def test_joining_ranks_are_refused(rank: int) -> None:
    """Ranks with fewer batches would send zeros, and lose what they keep; with as many, nobody does."""
    parts = made()
    with parts[0].join():
        step_of(parts, 0, rank)
    step_of(parts, 1, rank)
    error, told = (SyncError, "rank 1 failed") if rank == 0 else (InvalidArgument, "no more batches, and others have")
    with pytest.raises(error, match=told), parts[0].join():
        for step in range(2, 4 - rank):
            step_of(parts, step, rank)


class DiesBetweenBuckets(Tensors):
    dies = False

    def forward(self, large: Tensor, small: Tensor) -> Tensor:
        first = Dies.apply(self.large) if self.dies else self.large
        return (first * large).sum() + (self.small * small).sum()


def die_between_buckets(rank: int, folder: Path) -> None:
    """One bucket was told of before the rank is killed, the other never."""
    selection.SMALL = 3
    model = DistributedDataParallel(DiesBetweenBuckets(), bucket_cap_mb=1e-5)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    parts = model, optimizer, gt.TopKGradients(sparsity=SPARSITY).attach(model, optimizer)
    for step in range(2):
        step_of(parts, step, rank)
    before = weights_of(parts)
    model.module.dies = rank == 2
    with pytest.raises(RankLost, match="a rank died"):
        step_of(parts, 2, rank)
    assert all(torch.equal(item, other) for item, other in zip(before, weights_of(parts), strict=True))
    with pytest.raises((InvalidArgument, RankLost)):
        gt.save(model, folder / "saved", state={"topk": parts[2]})
    (folder / f"told-{rank}").touch()
    dist.destroy_process_group()
    os._exit(0)  # the group is not whole


def test_a_rank_that_dies_between_buckets_is_a_typed_error_on_all_others(tmp_path: Path) -> None:
    run_ranks(die_between_buckets, 3, tmp_path)
    assert {path.name for path in tmp_path.glob("told-*")} == {"told-0", "told-1"}
    assert not list(tmp_path.glob("saved/model.json"))


@on_ranks(2)
def test_momentum_that_comes_later_and_a_scaler_that_is_off(rank: int) -> None:
    """A scheduler or a loaded state gives the optimizer momentum; a GradScaler that is off skips nothing."""
    parts = made()
    step_of(parts, 0, rank)
    before = weights_of(parts)
    parts[1].param_groups[0]["momentum"] = 0.9 * rank
    told = r"SGD has momentum=0\.9 .*give momentum=0 to the optimizer" if rank else "rank 1 failed; its error tells why"
    with pytest.raises(InvalidArgument if rank else SyncError, match=told):
        step_of(parts, 1, rank)
    assert all(torch.equal(item, other) for item, other in zip(before, weights_of(parts), strict=True))
    parts[1].param_groups[0]["momentum"] = 0
    step_of(parts, 1, rank)
    parts = made(scaler=torch.amp.GradScaler("cpu", enabled=False))
    with pytest.raises(NonFinite, match=r"gradient of parameter 'large' .* on rank 1"):
        step_of(parts, 0, rank, **({"large": torch.full((SIZE,), torch.nan)} if rank == 1 else {}))
    assert all(bool(torch.isfinite(parameter).all()) for parameter in parts[0].parameters())


def warm_up(rank: int, ranks: int, folder: Path) -> None:
    """On two ranks the first level is sparse, on four it is dense, and sparse again at the next one."""
    settings = {"sparsity": 0.95, "warmup_steps": 4, "weight_decay": 0.1}
    parts = made(**settings)
    if ranks == 2:
        step_of(parts, 0, rank)
        gt.save(parts[0], folder / "saved", state={"topk": parts[2]})
        return
    gt.load(parts[0], folder / "saved", state={"topk": parts[2]})
    waiting = parts[2].state_dict()["residual"]["large"].clone()
    assert waiting.any()
    step_of(parts, 1, rank)
    assert not parts[2]._attached.state.residual["large"].any()  # type: ignore[attr-defined]
    for step in range(2, 6):
        step_of(parts, step, rank)
    assert parts[2]._attached.state.residual["large"].any()  # type: ignore[attr-defined]


def test_a_warm_up_goes_on_on_more_ranks_for_which_its_level_is_dense(tmp_path: Path) -> None:
    run_ranks(warm_up, 2, tmp_path)
    run_ranks(warm_up, 4, tmp_path)
