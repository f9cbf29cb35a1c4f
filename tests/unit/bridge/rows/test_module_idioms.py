"""A module with rows obeys a module's idioms: each idiom, for each kind of module and place of its rows, alone and
under DDP and FSDP2, against the same model with its rows in parameters of plain torch, in float64.

Under DDP and FSDP2 by turns: each pair of idiom and module, of idiom and wrapper, and of module and wrapper occurs.
A cell that cannot be is skipped, and says why. Several ranks: ``test_rank_backbones.py``.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.values.errors import InvalidArgument, SpecMismatch
from tests.support import heads

CLASSES, DIM, INPUTS, SAMPLES, LR = 20, 4, 6, 8, 0.3
SUBJECTS = [
    *(("head", place) for place in heads.PLACES),
    *(("group", place) for place in ("pulled", "hosted", "ranks")),
    ("dense", "pulled"),
    ("gear", "pulled"),
]
WRAPPERS = ("alone", "ddp", "fsdp2")


class Model(nn.Module):
    """Something dense, what has rows, and a factor on the features between them, for gradients by something else."""

    def __init__(self, kind: str, rows: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.kind, self.rows = kind, rows
        self.front = nn.Linear(INPUTS if kind in ("head", "dense") else DIM, DIM)

    def forward(self, given: Tensor, wanted: Tensor, factor: Tensor) -> Tensor:
        if self.kind in ("head", "dense"):
            features = self.front(given) * factor
            if self.kind == "dense":
                return F.mse_loss(self.rows(features), wanted)
            if isinstance(self.rows, nn.Linear):
                return F.cross_entropy(self.rows(features), wanted)
            loss: Tensor = self.rows(features, wanted)
            return loss
        vectors = self.rows({"id": given})["id"] if isinstance(self.rows, gt.EmbeddingGroup) else self.rows(given)
        return F.mse_loss(self.front(vectors * factor), wanted)


class OfSamples(nn.Module):
    """What a slow gear's dense part is, as an ordinary module: ids in, features out."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.layer(gear_samples().to(next(self.layer.parameters()))[ids])
        return found


def gear_samples() -> Tensor:
    return torch.randn(CLASSES, INPUTS, generator=torch.Generator().manual_seed(8))


def gear_layer() -> nn.Linear:
    torch.manual_seed(9)
    return nn.Linear(INPUTS, DIM)


class Subject:
    """A model with rows, its twin in plain torch, and the optimizers of both."""

    def __init__(self, kind: str, place: str, wrapper: str, cluster: Cluster) -> None:
        self.kind, self.place, self.cluster, self.wrapper = kind, place, cluster, wrapper
        rows, twin_rows = getattr(self, f"_{kind}")()
        self.rows = rows
        self.model = Model(kind, rows)
        self.twin = copy.deepcopy(Model(kind, twin_rows)).double()
        self.called: nn.Module = self.model
        if wrapper == "ddp":
            self.called = DistributedDataParallel(self.model)
        elif wrapper == "fsdp2":
            fully_shard(self.model)
        dense = torch.optim.SGD([p for p in self.model.parameters() if kind != "dense" or p is not rows.weight], LR)
        self.optimizers: list[Any]
        if kind == "dense":
            self.optimizers = [dense, self.attached]
        else:
            self.optimizers = [gt.joint(dense, self.rows)]
        self.twin_optimizer = torch.optim.SGD(self.twin.parameters(), LR)
        self.factor, self.twin_factor = (torch.ones(DIM, dtype=kind_) for kind_ in (torch.float32, torch.float64))
        self.factor.requires_grad_(True)
        self.twin_factor.requires_grad_(True)

    def _head(self) -> tuple[nn.Module, nn.Module]:
        head = heads.make_head(
            self.cluster,
            num_classes=CLASSES,
            dim=DIM,
            select=gt.FullSoftmax(),
            margin=None,
            optimizer=gt.SGD(LR),
            initializer=gt.Normal(std=0.5),
            **heads.PLACES[self.place],
        )
        twin = nn.Linear(DIM, CLASSES, bias=False)
        twin.weight.data.copy_(head.weights())
        return head, twin

    def _group(self) -> tuple[nn.Module, nn.Module]:
        field = gt.Field(
            "id",
            dim=DIM,
            num_rows=CLASSES,
            pooling="sum" if self.place == "hosted" else None,
            where="hosted" if self.place == "hosted" else "pull",
        )
        is_here = self.place == "ranks"
        group = gt.EmbeddingGroup(
            None if is_here else self.cluster, "g", [field], optimizer=gt.SGD(LR), rows="ranks" if is_here else "pull"
        )
        twin = nn.Embedding(CLASSES, DIM)
        twin.weight.data.copy_(torch.as_tensor(group.table("id").pull(np.arange(CLASSES))))
        return group, twin

    def _dense(self) -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(5)
        layer = nn.Linear(DIM, 1, bias=False)
        twin = copy.deepcopy(layer)
        self.attached = gt.attach(layer, self.cluster, name="dense", optimizer=gt.SGD(LR))
        return layer, twin

    def _gear(self) -> tuple[nn.Module, nn.Module]:
        gear = gt.SlowGear(
            self.cluster,
            "image",
            dim=DIM,
            build=gear_layer,
            samples=dict(enumerate(gear_samples())).__getitem__,
            optimizer=gt.SGD(LR),
            expire_seconds=0.0,
            gradients_per_id=1,
            mode="sync",
        )
        return gear, OfSamples(gear_layer())

    @property
    def twin_rows(self) -> np.ndarray:
        return torch.cat([item.detach().reshape(-1) for item in self.twin.rows.parameters()]).numpy()

    def rows_now(self) -> np.ndarray:
        if self.kind == "head":
            found = self.rows.weights().numpy()
        elif self.kind == "group":
            found = np.asarray(self.rows.table("id").pull(np.arange(CLASSES)))
        else:
            table = self.cluster.table("dense" if self.kind == "dense" else "image")
            found = table.pull(np.arange(table.spec.num_rows))
        return np.array(found, np.float64).reshape(-1)[: self.twin_rows.size]

    def batch(self, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(SAMPLES, INPUTS, generator=generator)
        ids = torch.randperm(CLASSES, generator=generator)[:SAMPLES]
        targets = torch.randn(SAMPLES, 1 if self.kind == "dense" else DIM, generator=generator)
        return (
            inputs if self.kind in ("head", "dense") else ids,
            ids if self.kind == "head" else targets,
        )

    def loss(self, seed: int = 0) -> Tensor:
        found: Tensor = self.called(*self.batch(seed), self.factor)
        return found

    def twin_loss(self, seed: int = 0) -> Tensor:
        given, wanted = (item.double() if item.is_floating_point() else item for item in self.batch(seed))
        found: Tensor = self.twin(given, wanted, self.twin_factor)
        return found

    def step(self) -> None:
        for item in [*self.optimizers, self.twin_optimizer]:
            item.step()
        for item in [*self.optimizers, self.twin_optimizer]:
            item.zero_grad()

    def require_equal(self) -> None:
        np.testing.assert_allclose(self.rows_now(), self.twin_rows, rtol=0, atol=2e-6)
        fronts = [*self.model.front.parameters()]
        found = [item.full_tensor() if isinstance(item, DTensor) else item for item in fronts]
        for mine, its in zip(found, self.twin.front.parameters(), strict=True):
            torch.testing.assert_close(mine.detach().double(), its.detach(), rtol=0, atol=2e-6)

    def train(self, seed: int = 0) -> None:
        self.loss(seed).backward()
        self.twin_loss(seed).backward()
        self.step()


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each idiom for each subject alone, and under DDP or FSDP2: the other of them for the next subject and idiom."""
    if "subject" in metafunc.fixturenames:
        turn = crc32(metafunc.function.__name__.encode())
        cells = [
            (kind, place, wrapper)
            for number, (kind, place) in enumerate(SUBJECTS)
            for wrapper in ("alone", WRAPPERS[1 + (turn + number) % 2])
            if kind != "dense" or wrapper == "alone"  # which trains whole parameters of its own: another way than these
        ]
        metafunc.parametrize("subject", cells, indirect=True, ids="-".join)


@pytest.fixture
def subject(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[Subject]:
    kind, place, wrapper = request.param
    made = Subject(kind, place, wrapper, cluster)
    yield made
    if kind == "gear":
        made.rows.close()


NO_TWIN_NORM = "what is clipped of a slow gear are the gradients of its features (test_clipping.py)"


def has_norm(subject: Subject) -> bool:
    """Whether the row gradients lie in this process, where a clipper of PyTorch sees their norm."""
    return subject.place in ("held", "pulled")


def test_it_trains_as_parameters_do(subject: Subject) -> None:
    for seed in range(3):
        subject.train(seed)
    subject.require_equal()


@pytest.mark.parametrize("whole", [False, True], ids=["module", "model"])
def test_frozen_rows_stay_and_thawed_ones_move(subject: Subject, whole: bool) -> None:
    model, twin = (subject.model, subject.twin) if whole else (subject.rows, subject.twin.rows)
    subject.train(0)
    before = subject.rows_now()
    model.requires_grad_(False)
    twin.requires_grad_(False)
    assert not any(item.requires_grad for item in model.parameters())
    if subject.wrapper != "ddp" or not whole:  # whose parameters must all have a gradient
        subject.train(1)
    np.testing.assert_array_equal(subject.rows_now(), before)
    model.requires_grad_(True)
    twin.requires_grad_(True)
    subject.train(2)
    subject.require_equal()
    assert not np.array_equal(subject.rows_now(), before)


def test_autograd_grad_of_something_else_leaves_no_row_gradient(subject: Subject) -> None:
    loss, twin_loss = subject.loss(), subject.twin_loss()
    (found,) = torch.autograd.grad(loss, subject.factor, retain_graph=True)
    (expected,) = torch.autograd.grad(twin_loss, subject.twin_factor, retain_graph=True)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6)
    assert all(item.grad is None for item in subject.rows.parameters())
    loss.backward()
    twin_loss.backward()
    subject.step()
    subject.require_equal()


def test_backward_into_something_else_leaves_no_row_gradient(subject: Subject) -> None:
    before = subject.rows_now()
    for loss, factor in ((subject.loss(), subject.factor), (subject.twin_loss(), subject.twin_factor)):
        loss.backward(inputs=[factor], retain_graph=subject.wrapper == "ddp")
        if subject.wrapper == "ddp":  # which waits for its parameters' gradients in every pass
            loss.backward()
            for item in [*subject.optimizers, subject.twin_optimizer]:
                item.zero_grad()
    subject.step()
    np.testing.assert_array_equal(subject.rows_now(), before)
    subject.train(1)
    subject.require_equal()


def test_a_gradient_norm_balanced_by_autograd_grad_trains_as_parameters_do(subject: Subject) -> None:
    """As GradNorm does: gradients of two losses by shared parameters, then one backward pass of their weighted sum."""
    if subject.wrapper == "ddp":
        pytest.skip("DDP takes one forward pass to a backward pass")
    for loss, factor in ((subject.loss, subject.factor), (subject.twin_loss, subject.twin_factor)):
        losses = [loss(seed) for seed in (1, 2)]
        norms = [torch.autograd.grad(item, factor, retain_graph=True)[0].norm() for item in losses]
        (losses[0] * norms[1] + losses[1] * norms[0]).backward()
    subject.step()
    subject.require_equal()


def test_gradients_by_something_else_alone_keep_no_graph_alive(subject: Subject) -> None:
    if subject.kind == "dense":
        pytest.skip("its parameters are ordinary ones")
    if subject.wrapper == "ddp":
        pytest.skip("DDP waits for its parameters' gradients in every pass")
    parts = subject.rows.trained if isinstance(subject.rows, gt.EmbeddingGroup) else [subject.rows]
    for seed in range(5):
        torch.autograd.grad(subject.loss(seed), subject.factor)
    gc.collect()
    assert all(call() is None for part in parts for _, call, _ in part.row_update._passes)
    assert all(len(part.row_update._passes) <= 1 for part in parts)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_of_the_model_drops_row_gradients(subject: Subject, set_to_none: bool) -> None:
    for loss, model in ((subject.loss(1), subject.model), (subject.twin_loss(1), subject.twin)):
        loss.backward()
        model.zero_grad(set_to_none)
    subject.train(0)
    subject.require_equal()


def test_a_gradient_set_to_none_is_dropped(subject: Subject) -> None:
    before = subject.rows_now()
    subject.loss(1).backward()
    for item in subject.rows.parameters():
        assert item.grad is not None
        item.grad = None
    subject.step()
    np.testing.assert_array_equal(subject.rows_now(), before)


def test_rows_frozen_between_forward_and_backward_stay(subject: Subject) -> None:
    if subject.wrapper != "alone":
        pytest.skip("DDP and FSDP2 want the parameters of a pass in its backward")
    before, loss = subject.rows_now(), subject.loss()
    subject.rows.requires_grad_(False)
    loss.backward()
    assert all(item.grad is None for item in subject.rows.parameters())
    subject.step()
    np.testing.assert_array_equal(subject.rows_now(), before)


def test_a_gradient_scaled_in_a_closure_scales_rows(subject: Subject) -> None:
    if not has_norm(subject) or subject.wrapper == "fsdp2" or subject.kind == "dense":
        pytest.skip("where it can be scaled by hand, by the optimizer of both")

    def closure() -> Tensor:
        loss = subject.loss()
        loss.backward()
        for parameter in subject.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        return loss

    subject.optimizers[0].step(closure)
    (subject.twin_loss() * 0.5).backward()
    subject.twin_optimizer.step()
    subject.require_equal()


def test_a_hook_on_the_rows_is_refused(subject: Subject) -> None:
    if subject.kind == "dense":
        pytest.skip("its parameters are ordinary ones")
    for item in subject.rows.parameters():
        with pytest.raises(InvalidArgument, match=r"geartrain\.clip_grad_norm_"):
            item.register_hook(lambda gradient: gradient * 0.1)


def test_micro_batches_are_summed(subject: Subject) -> None:
    for seed in (1, 2):
        subject.loss(seed).backward()
        subject.twin_loss(seed).backward()
    subject.step()
    subject.require_equal()


def test_the_clipper_of_pytorch_over_the_model_is_exact_or_refused(subject: Subject) -> None:
    if subject.kind == "gear":
        pytest.skip(NO_TWIN_NORM)
    before = subject.rows_now()
    subject.loss().backward()
    subject.twin_loss().backward()
    expected = nn.utils.clip_grad_norm_(subject.twin.parameters(), 0.05)
    if not has_norm(subject):
        with pytest.raises(InvalidArgument, match=r"geartrain\.clip_grad_norm_"):
            nn.utils.clip_grad_norm_(subject.model.parameters(), 0.05)
        np.testing.assert_array_equal(subject.rows_now(), before)
        return
    if subject.wrapper == "fsdp2":
        pytest.skip("torch clips no mixture of parameters in parts and whole ones; gt.clip_grad_norm_ does")
    found = nn.utils.clip_grad_norm_(subject.model.parameters(), 0.05)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
    subject.step()
    subject.require_equal()


def test_the_clipper_of_geartrain_is_exact_over_the_model(subject: Subject) -> None:
    if subject.kind == "gear":
        pytest.skip(NO_TWIN_NORM)
    subject.loss().backward()
    subject.twin_loss().backward()
    expected = nn.utils.clip_grad_norm_(subject.twin.parameters(), 0.05)
    found = gt.clip_grad_norm_(subject.model.parameters(), subject.optimizers[-1], 0.05)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
    subject.step()
    subject.require_equal()


@pytest.mark.parametrize(
    "clip",
    [
        lambda parameters: nn.utils.clip_grad_value_(parameters, 0.01),
        lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.01, norm_type=torch.inf),
        lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.01, norm_type=1.0),
        lambda parameters: [torch.clamp(input=item.grad, min=-0.01, max=0.01, out=item.grad) for item in parameters],
    ],
    ids=["value", "inf", "1", "clamp"],
)
def test_what_no_one_factor_can_do_is_refused_before_a_push(
    subject: Subject, clip: Callable[[list[nn.Parameter]], Any]
) -> None:
    if subject.kind == "dense":
        pytest.skip("its parameters are ordinary ones, which torch clips")
    before = subject.rows_now()
    subject.loss().backward()
    with pytest.raises(InvalidArgument, match=r"geartrain\.clip_grad_norm_"):
        clip(list(subject.rows.parameters()))
    np.testing.assert_array_equal(subject.rows_now(), before)


def test_another_gradient_in_the_place_of_the_rows_is_refused_before_a_push(subject: Subject) -> None:
    if subject.kind == "dense":
        pytest.skip("its parameters are ordinary ones, whose gradients may be replaced")
    before, front = subject.rows_now(), subject.twin.front.weight.detach().clone()
    subject.loss().backward()
    for item in subject.rows.parameters():
        shown = item.grad
        item.grad = shown  # itself
        with pytest.raises(InvalidArgument, match=r"geartrain\.clip_grad_norm_"):
            item.grad = torch.ones(1)
        item.grad = None
        with pytest.raises(InvalidArgument, match="a dropped one does not come back"):
            item.grad = shown
    np.testing.assert_array_equal(subject.rows_now(), before)
    mine = subject.model.front.weight
    torch.testing.assert_close((mine.full_tensor() if isinstance(mine, DTensor) else mine).double(), front)


def test_clipping_before_the_last_micro_batch_is_exact_or_refused(subject: Subject) -> None:
    if not has_norm(subject) or subject.wrapper == "fsdp2":
        pytest.skip("nothing but GradScaler changes such gradients")
    subject.loss(1).backward()
    nn.utils.clip_grad_norm_(subject.model.parameters(), 0.01)
    if subject.kind == "dense":
        subject.loss(2).backward()
        return
    with pytest.raises(InvalidArgument, match="clip once, after it"):
        subject.loss(2).backward()


def test_a_checkpointed_part_is_exact(subject: Subject) -> None:
    if subject.wrapper != "alone":
        pytest.skip("what is checkpointed lies inside of what is wrapped; torch's wrappers are not called in it")
    for loss in (subject.loss, subject.twin_loss):
        checkpoint(loss, 1, use_reentrant=False).backward()
    subject.step()
    subject.require_equal()


class Sam(torch.optim.SGD):
    """Sharpness-aware minimisation as it is commonly written: its step needs a closure, and says so late."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "SAM needs a closure"
        raise AssertionError("not reached")


def test_a_dense_optimizer_that_fails_leaves_no_half_step(subject: Subject) -> None:
    if subject.kind == "dense":
        pytest.skip("its own optimizer steps by itself")
    before = subject.rows_now()
    optimizer = gt.joint(Sam(subject.model.front.parameters(), LR), subject.rows)
    subject.loss().backward()
    subject.twin_loss().backward()
    with pytest.raises(AssertionError, match="SAM needs a closure"):
        optimizer.step()
    np.testing.assert_array_equal(subject.rows_now(), before)
    subject.step()  # by another optimizer nothing is lost
    subject.require_equal()


def test_a_step_after_a_failed_dense_one_takes_what_was_changed_since(subject: Subject) -> None:
    if subject.kind == "dense" or subject.wrapper != "alone":
        pytest.skip("of gt.joint alone")
    dense = torch.optim.SGD(subject.model.front.parameters(), LR)
    optimizer = gt.joint(dense, subject.rows)
    subject.loss().backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense, "step", lambda: (_ for _ in ()).throw(MemoryError("planted")))
        with pytest.raises(MemoryError, match="planted"):
            optimizer.step()
    for group in [*optimizer.param_groups, *subject.twin_optimizer.param_groups]:
        group["lr"] = LR / 2
    subject.loss(1).backward()  # nothing was sent: it may still be added to
    for seed in (0, 1):
        subject.twin_loss(seed).backward()
    optimizer.step()
    subject.twin_optimizer.step()
    subject.require_equal()


def test_an_optimizer_of_all_parameters_leaves_rows_to_their_own(subject: Subject) -> None:
    if subject.kind == "dense":
        pytest.skip("its parameters are ordinary ones")
    both = torch.optim.Adam(subject.model.parameters(), LR), gt.RowOptimizer(subject.rows)
    twins = torch.optim.Adam(subject.twin.front.parameters(), LR), torch.optim.SGD(subject.twin.rows.parameters(), LR)
    for seed in range(2):
        subject.loss(seed).backward()
        subject.twin_loss(seed).backward()
        both[0].step()
        both[0].zero_grad()
        both[1].step()
        both[1].zero_grad()
        for item in twins:
            item.step()
            item.zero_grad()
    subject.require_equal()


def test_a_loss_scale_is_taken_off_once_by_the_optimizer_of_the_rows(subject: Subject) -> None:
    if subject.kind == "dense" or subject.wrapper == "fsdp2":
        pytest.skip("a dense table's step takes the scale off itself; GradScaler of DTensors is torch's affair")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    both = torch.optim.SGD(subject.model.parameters(), LR), gt.RowOptimizer(subject.rows)
    scaler.scale(subject.loss()).backward()
    subject.twin_loss().backward()
    for item in both:
        scaler.unscale_(item)
    for item in both:
        scaler.step(item)
    scaler.update()
    subject.twin_optimizer.step()
    subject.require_equal()


def test_a_state_held_in_memory_is_not_taken_over_rows_that_moved(subject: Subject) -> None:
    subject.train(0)
    held = copy.deepcopy(subject.model.state_dict())
    subject.model.load_state_dict(held)  # nothing has moved
    subject.train(1)
    with pytest.raises(SpecMismatch, match=r"geartrain\.save"):
        subject.model.load_state_dict(held)


def test_it_is_in_no_state_dict_and_halves_nothing(subject: Subject) -> None:
    if subject.kind == "dense":
        pytest.skip("its parameters are ordinary ones")
    assert not [name for name in subject.model.state_dict() if "stand_in" in name]
    subject.rows.half()
    assert all(item.dtype == torch.float32 for item in subject.rows.parameters())
    assert sum(item.numel() for item in subject.rows.parameters()) == 0


def test_a_state_of_the_optimizer_from_before_a_scheduler_loads(subject: Subject) -> None:
    for optimizer, twin in zip(subject.optimizers, [subject.twin_optimizer] * 2, strict=False):
        states = [item.state_dict() for item in (optimizer, twin)]
        schedules = [StepLR(item, 1, gamma=0.5) for item in (optimizer, twin)]
        subject.train(0)
        for schedule in schedules:
            schedule.step()
        for item, state in zip((optimizer, twin), states, strict=True):
            item.load_state_dict(state)
        assert [group["lr"] for group in optimizer.param_groups] == [LR] * len(optimizer.param_groups)
