"""FCCS: rates and batches of a training, its loop over a loader, and going on in the middle of a ramp."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from tests.support.rank_processes import run_ranks

MICRO, SAMPLES, WIDTH, CLASSES = 4, 42, 6, 5
NUMBERS: dict[str, Any] = {
    "warmup_steps": 4,
    "initial_batch": 8,
    "max_batch": 32,
    "initial_steps": 3,
    "total_steps": 11,
    "micro_batch": MICRO,
}
BATCHES = [8, 8, 8, 8, 8, 12, 16, 20, 24, 28, 32]
BATCHES_OF_2_RANKS = [8, 8, 8, 8, 8, 8, 16, 24, 24, 32, 32]
"""By the formula: 8 + 24 · (1 − cos(π · (t − 3) / 8)) / 2 to the nearest multiple of 4, or of 8."""


def sgd(lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=lr)


def samples_of(seed: int = 0) -> TensorDataset:
    torch.manual_seed(seed)
    return TensorDataset(torch.randn(SAMPLES, WIDTH), torch.randint(CLASSES, (SAMPLES,)))


def loader_of(data: TensorDataset, rank: int = 0, ranks: int = 1) -> DataLoader[Any]:
    sampler = DistributedSampler(data, ranks, rank, drop_last=True)
    return DataLoader(data, MICRO, sampler=sampler, drop_last=True)


def test_the_rate_warms_up_and_stays_and_the_batch_grows() -> None:
    optimizer = sgd()
    schedule = gt.FCCS(optimizer, lr=0.8, **NUMBERS)
    rates, batches = [], []
    while not schedule.is_complete:
        rates.append(optimizer.param_groups[0]["lr"])
        batches.append(schedule.batch)
        assert schedule.accumulate * MICRO == schedule.batch == schedule.batch_at(schedule.completed_steps)
        schedule.step()
    assert rates == pytest.approx([0.2, 0.4, 0.6, *[0.8] * 8])
    assert batches == BATCHES
    assert schedule.samples == schedule.total_samples == sum(BATCHES)


def test_each_group_may_keep_the_rate_that_it_has() -> None:
    first, second = sgd(0.4), torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.04))
    schedule = gt.FCCS([first, second], **NUMBERS)
    schedule.step()
    assert first.param_groups[0]["lr"] == pytest.approx(0.2)
    assert float(second.param_groups[0]["lr"]) == pytest.approx(0.02)
    gt.FCCS([first, second], lr=[1.0, 2.0], **NUMBERS)
    assert float(second.param_groups[0]["lr"]) == pytest.approx(0.5)


def test_the_loop_reads_each_pass_in_its_order_and_counts_epochs() -> None:
    data = TensorDataset(torch.arange(SAMPLES))
    schedule = gt.FCCS(sgd(), **NUMBERS)
    seen: list[int] = []
    for step in schedule.steps(loader_of(data)):
        assert len(step) == schedule.accumulate
        taken = [batch for (batch,) in step]
        assert len(taken) == len(step)
        seen += torch.cat(taken).tolist()
        schedule.step()
    expected: list[int] = []
    sampler = DistributedSampler(data, 1, 0)
    for epoch in range(schedule.epoch + 1):
        sampler.set_epoch(epoch)
        expected += list(sampler)[: SAMPLES - SAMPLES % MICRO]
    assert seen == expected[: len(seen)]
    assert len(seen) == schedule.total_samples
    assert schedule.epoch == (len(seen) - 1) // (SAMPLES - SAMPLES % MICRO)


def test_a_state_goes_on_bit_by_bit_in_the_middle_of_a_ramp() -> None:
    data = samples_of()

    def make() -> tuple[nn.Module, torch.optim.Optimizer, gt.FCCS]:
        torch.manual_seed(1)
        model = nn.Linear(WIDTH, CLASSES)
        optimizer = gt.LARS(model.parameters(), lr=2.0)
        return model, optimizer, gt.FCCS(optimizer, **NUMBERS)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: gt.FCCS, until: int) -> None:
        for step in schedule.steps(loader_of(data)):
            for inputs, labels in step:
                (nn.functional.cross_entropy(model(inputs), labels) / len(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if schedule.completed_steps == until:
                return

    whole = make()
    train(*whole, until=NUMBERS["total_steps"])
    first = make()
    train(*first, until=7)  # the batch grows, and an epoch has begun
    saved = json.dumps(first[2].state_dict())
    assert 0 < json.loads(saved)["epoch_samples"] < SAMPLES
    optimizer_state = copy.deepcopy(first[1].state_dict())
    for schedule_first in (True, False):
        model, optimizer, schedule = make()
        model.load_state_dict(first[0].state_dict())
        loads: list[Callable[[], Any]] = [
            lambda schedule=schedule: schedule.load_state_dict(json.loads(saved)),  # type: ignore[misc]
            lambda optimizer=optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer_state)),  # type: ignore[misc]
        ]
        for load in loads if schedule_first else reversed(loads):
            load()
        train(model, optimizer, schedule, until=NUMBERS["total_steps"])
        assert schedule.state_dict() == whole[2].state_dict()
        for own, other in zip(model.parameters(), whole[0].parameters(), strict=True):
            assert torch.equal(own, other)


def test_a_loader_that_knows_its_place_is_not_passed_over() -> None:
    batches = [torch.tensor([number]) for number in range(100)]
    schedule = gt.FCCS(sgd(), **NUMBERS)
    state = {**schedule.state_dict(), "epoch_samples": 3 * MICRO}
    for skip, first in ((True, 3), (False, 0)):
        schedule.load_state_dict(state)
        step = next(schedule.steps(batches, skip=skip))
        assert int(next(iter(step))) == first


def train_head(cluster: Cluster, parts: int, *, scaled: bool = False) -> list[Tensor]:
    """Three steps of a backbone and a class head over the same samples, in so many micro-batches."""
    torch.manual_seed(0)
    backbone = nn.Linear(WIDTH, 8)
    head = gt.ClassHead(
        cluster, "sku", num_classes=CLASSES, dim=8, optimizer=gt.SparseMomentum(0.1), config=gt.HeadConfig(seed=3)
    )
    optimizer = gt.joint(torch.optim.SGD(backbone.parameters(), lr=0.1, momentum=0.9), head)
    size = 24 // parts
    schedule = gt.FCCS(
        optimizer,
        lr=[0.5, 0.25],
        warmup_steps=2,
        initial_batch=24,
        max_batch=24,
        initial_steps=0,
        total_steps=3,
        micro_batch=size,
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaled)
    inputs, labels = torch.randn(72, WIDTH), torch.randint(CLASSES, (72,))
    for step in schedule.steps(list(zip(inputs.split(size), labels.split(size), strict=True))):
        for features, own in step:
            scaler.scale(head(backbone(features), own) / len(step)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        schedule.step()
    return [*(param.detach() for param in backbone.parameters()), head.table.pull(torch.arange(CLASSES))]


def test_micro_batches_of_a_class_head_make_the_step_of_their_mean() -> None:
    found = []
    for parts, scaled in ((1, False), (4, False), (3, True)):
        with gt.local(num_shards=2) as cluster:
            found.append(train_head(cluster, parts, scaled=scaled))
    for other in found[1:]:
        for own, expected in zip(other, found[0], strict=True):
            torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)


def with_scheduler(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)


def test_another_driver_of_the_rate_is_refused() -> None:
    optimizer = sgd()
    for before in (True, False):
        if before:
            scheduler = with_scheduler(optimizer)
        schedule = gt.FCCS(optimizer, lr=0.1, **{**NUMBERS, "warmup_steps": 0})
        if not before:
            scheduler = with_scheduler(optimizer)
        optimizer.step()
        scheduler.step()
        with pytest.raises(gt.errors.InvalidArgument, match=r"param_group 0 .*something else drives it.*LR scheduler"):
            schedule.step()
        assert schedule.completed_steps == 0


def test_groups_that_came_later_are_refused() -> None:
    optimizer = sgd()
    schedule = gt.FCCS(optimizer, **NUMBERS)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(gt.errors.InvalidArgument, match="have 2 param_groups and had 1"):
        schedule.step()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_batch": 4, "initial_batch": 8}, "max_batch is 4; it must be at least initial_batch, 8"),
        ({"max_batch": 30}, "max_batch is 30; it must be a multiple of micro_batch, 4: give 32"),
        ({"initial_batch": 2}, "initial_batch is 2; .* give 4"),
        ({"initial_steps": 11}, "total_steps is 11 and initial_steps 11"),
        ({"warmup_steps": 12}, "warmup_steps is 12 and total_steps 11"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"micro_batch": 0}, "micro_batch is 0; it must be an integer >= 1"),
        ({"lr": -1.0}, r"lr is -1\.0; it must be >= 0"),
        ({"lr": [0.1, 0.2]}, "lr has 2 numbers for 1 param_groups"),
        ({"optimizer": []}, "optimizer is empty"),
        ({"optimizer": nn.Linear(2, 2)}, "it must be an optimizer"),
    ],
)
def test_a_number_that_cannot_be_is_named(changed: dict[str, Any], message: str) -> None:
    arguments = {"optimizer": sgd(), **NUMBERS, **changed}
    with pytest.raises(gt.errors.InvalidArgument, match=message):
        gt.FCCS(**arguments)


def test_epochs_that_cannot_be_are_named() -> None:
    sizes = {"samples_per_epoch": 100, "initial_batch": 8, "max_batch": 32, "micro_batch": 4}
    for passes, message in (
        ({"epochs": 2.0, "initial_epochs": 2.0}, "initial_epochs and epochs are 0, 2 and 2; they must rise"),
        ({"epochs": 2.0, "initial_epochs": 1.0, "warmup_epochs": 1.5}, "they must rise"),
        ({"epochs": 0.01, "initial_epochs": 0.0}, r"epochs is 0\.01, which is 1 samples"),
    ):
        with pytest.raises(gt.errors.InvalidArgument, match=message):
            gt.FCCS.for_epochs(sgd(), **sizes, **passes)  # type: ignore[arg-type]
    schedule = gt.FCCS.for_epochs(sgd(), epochs=4, initial_epochs=1, warmup_epochs=0.5, **sizes)  # type: ignore[arg-type]
    assert 400 - 32 < schedule.total_samples <= 400
    assert schedule.batch_at(schedule.total_steps - 1) == 32


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataLoader(samples_of(), MICRO, drop_last=False), "last batch has 2 samples of 4; give it drop_last=True"),
        (DataLoader(samples_of(), 8, drop_last=True), "batch_size is 8; it must be micro_batch, 4"),
        ([], "the loader gives no micro-batch"),
        (iter([1, 2, 3]), "the loader gives no micro-batch"),
    ],
)
def test_a_loader_that_does_not_fit_is_refused(loader: Any, message: str) -> None:
    schedule = gt.FCCS(sgd(), **NUMBERS)
    with pytest.raises(gt.errors.InvalidArgument, match=message):
        for step in schedule.steps(loader):
            list(step)
            schedule.step()


def test_a_loop_that_forgets_something_is_told() -> None:
    schedule, loader = gt.FCCS(sgd(), **NUMBERS), [1, 2, 3]
    with pytest.raises(gt.errors.InvalidArgument, match=r"called step\(\) 0 times in step 0"):
        for step in schedule.steps(loader):
            list(step)
    step = next(schedule.steps(loader))
    next(iter(step))
    with pytest.raises(gt.errors.InvalidArgument, match="1 of the 2 micro-batches of step 0 were used"):
        schedule.step()
    with pytest.raises(gt.errors.InvalidArgument, match="step 0 is not complete"):
        schedule.state_dict()


def test_a_state_of_other_numbers_is_refused() -> None:
    state = gt.FCCS(sgd(), **NUMBERS).state_dict()
    other = gt.FCCS(sgd(), **{**NUMBERS, "max_batch": 64})
    with pytest.raises(gt.errors.InvalidArgument, match="max_batch is 64, the state's 32"):
        other.load_state_dict(state)
    with pytest.raises(gt.errors.InvalidArgument, match="of 1 param_groups, the optimizers have 2"):
        gt.FCCS([sgd(), sgd()], **NUMBERS).load_state_dict(state)


def train_replica(rank: int, ranks: int) -> list[Tensor]:
    """The parameters after a training in which a micro-batch is the rank's part of 8 samples."""
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(WIDTH, 1).double()
    inputs = torch.randn(300, 8, WIDTH).double().chunk(ranks, dim=1)[rank]
    exchanges: list[int] = []
    if ranks > 1:
        model = DistributedDataParallel(model)
        model.register_comm_hook(None, lambda _, bucket: (exchanges.append(1), allreduce_hook(None, bucket))[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = gt.FCCS(optimizer, **{**NUMBERS, "micro_batch": 8 // ranks})
    assert [schedule.batch_at(step) for step in range(11)] == BATCHES_OF_2_RANKS
    for step in schedule.steps(inputs):
        for batch in step:
            with step.no_sync(model):
                ((model(batch) - batch[:, :1].sin()).square().mean() / len(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    assert len(exchanges) == (NUMBERS["total_steps"] if ranks > 1 else 0)
    return [param.detach() for param in model.parameters()]


def act_as_ranks(rank: int, ranks: int, folder: Path) -> None:
    torch.save(train_replica(rank, ranks), folder / f"replica-{rank}")
    with pytest.raises(gt.errors.SpecMismatch, match="total_steps is 11 on rank 0, 12 on rank 1"):
        gt.FCCS(sgd(), **{**NUMBERS, "total_steps": 11 + rank})
    error = gt.errors.SyncError if rank == 0 else gt.errors.InvalidArgument
    with pytest.raises(error, match=["FCCS was not made: rank 1 failed", "initial_steps is -1"][rank]):
        gt.FCCS(sgd(), **{**NUMBERS, "initial_steps": -rank})
    with pytest.raises(gt.errors.InvalidArgument, match="must be a multiple of 2 ranks x micro_batch, 8: give 16"):
        gt.FCCS(sgd(), **{**NUMBERS, "initial_batch": 12})


def test_ranks_share_a_batch_and_exchange_gradients_once_a_step(tmp_path: Path) -> None:
    run_ranks(act_as_ranks, 2, tmp_path)
    expected = train_replica(0, 1)
    for rank in range(2):
        for own, other in zip(torch.load(tmp_path / f"replica-{rank}"), expected, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-14)
