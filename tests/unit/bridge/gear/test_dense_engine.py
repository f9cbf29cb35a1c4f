"""The slow gear's engine: whose features it computes in one batch, and what it does with gradients and with faults."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from geartrain.ams.values.errors import (
    GeartrainError,
    InternalError,
    InvalidArgument,
    ModuleFailed,
    NonFinite,
    StoreUnavailable,
)
from geartrain.bridge.gear.sample_source import Samples
from tests.support import gear_fakes
from tests.support.gear_fakes import DIM, IMAGES, assert_trained, delivery


class Counted(nn.Linear):
    """Counts its forward passes and the samples in them."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        super().__init__(5, DIM)
        self.batches: list[int] = []

    def forward(self, batch: Tensor) -> Tensor:
        self.batches.append(len(batch))
        return torch.tanh(super().forward(batch))


def sample(number: int) -> Tensor | None:
    if number == 404:
        return None
    if number == 500:
        raise ValueError("not an image")
    if number == 501:
        return torch.zeros(7)
    if number == 666:
        return torch.full((5,), float("nan"))
    return IMAGES[number]


def engine_of(module: nn.Module, samples: Any = sample, **settings: Any) -> Any:
    return gear_fakes.engine_of(module, samples, **settings)


class Fragile(Counted):
    broken = True
    error: BaseException = RuntimeError("device lost")

    def forward(self, batch: Tensor) -> Tensor:
        if self.broken:
            raise self.error
        return super().forward(batch)


@pytest.mark.parametrize("samples", [sample, IMAGES, IMAGES.numpy()], ids=["function", "tensor", "array"])
def test_features_are_those_of_the_module(samples: Any) -> None:
    module = Counted()
    engine, _, _ = engine_of(module, samples, max_batch=4)
    ids = np.array([7, 3, 19, 0, 11, 5])
    reply = engine.features(ids)
    assert not reply.failures and module.batches == [4, 2]
    torch.testing.assert_close(torch.from_numpy(reply.vectors_KD), module(IMAGES[ids]).detach())
    assert reply.times.tolist() == [100.0] * 6 and reply.versions.tolist() == [0] * 6
    if samples is not sample:
        assert engine.features(np.array([20, 4])).failures[20].error == "SampleNotFound"


def test_requests_of_several_threads_become_one_device_batch() -> None:
    module = Counted()
    engine, _, _ = engine_of(module, max_batch=9, max_wait_seconds=60.0)
    parts = [np.array([1, 2, 3, 4]), np.array([3, 4, 5]), np.array([9, 1])]
    with ThreadPoolExecutor(3) as pool:
        replies = list(pool.map(engine.features, parts))  # 4 + 3 + 2 = 9 ids fill the batch: nobody waits a minute
    assert module.batches == [6]
    for ids, reply in zip(parts, replies, strict=True):
        torch.testing.assert_close(torch.from_numpy(reply.vectors_KD), module(IMAGES[ids]).detach())


def test_ids_without_a_feature_are_named_and_the_others_live() -> None:
    engine, _, _ = engine_of(Counted(), max_batch=3)
    ids = np.array([1, 404, 500, 2, 666, 501, 3])
    reply = engine.features(ids)
    errors = {number: failure.error for number, failure in reply.failures.items()}
    assert errors == {404: "SampleNotFound", 500: "SampleDamaged", 501: "SampleDamaged", 666: "NonFinite"}
    for number, failure in reply.failures.items():
        assert str(number) in failure.reason
    torch.testing.assert_close(reply.vectors_KD[[0, 3, 6]], engine.features(np.array([1, 2, 3])).vectors_KD)
    assert not reply.vectors_KD[[1, 2, 4, 5]].any()


def test_one_update_is_the_sum_over_ids_at_todays_weights() -> None:
    module, reference = Counted(), Counted()
    engine, dense, batcher = engine_of(module, max_batch=2)
    ids, gradients = [4, 9, 2], torch.randn(3, DIM)
    engine.add(delivery(ids, gradients, lr=0.5))
    assert engine.apply_due() and not engine.apply_due()
    assert_trained(module, reference, ids, gradients, lr=0.5)
    assert dense.pushed == [0.5] and batcher.settled == 1 and engine.account().applied == 3


def test_an_id_that_fails_in_the_backward_pass_is_counted_and_the_others_are_applied() -> None:
    module, reference = Counted(), Counted()
    engine, _, batcher = engine_of(module)
    engine.add(delivery([4, 404, 2, 666, 500]))
    engine.apply_all()
    assert set(batcher.failed) == {404, 666, 500}
    assert_trained(module, reference, [4, 2], torch.ones(2, DIM))
    account = engine.account()
    assert account.adds_up and account.applied == 2 and account.dropped_failed == 3


def test_a_gradient_that_spoils_the_sum_is_found_among_many() -> None:
    class Steep(nn.Module):
        """Infinite slope at the sample of id 13 alone."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(5, DIM))

        def forward(self, batch: Tensor) -> Tensor:
            root = torch.where(batch[:, :1] == IMAGES[13, 0], 0.0, 1.0)
            return torch.sqrt(root * self.weight.sum()) + batch @ self.weight

    engine, _, batcher = engine_of(Steep())
    engine.add(delivery(range(20)))
    engine.apply_all()
    assert batcher.failed == [13]
    assert engine.account().applied == 19


class Normed(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(nn.Linear(5, DIM), nn.BatchNorm1d(DIM))


@pytest.mark.parametrize("train_mode", ["backward", "always", "never"])
def test_when_batch_statistics_apply_and_when_they_are_learned(train_mode: Any) -> None:
    module = Normed()
    engine, _, _ = engine_of(module, train_mode=train_mode)
    ids = np.arange(8)
    mean = module[1].running_mean.clone()
    vectors = torch.from_numpy(engine.features(ids).vectors_KD)
    assert torch.equal(module[1].running_mean, mean)  # features never teach it
    reference = Normed().train(train_mode == "always")
    torch.testing.assert_close(vectors, reference(IMAGES[ids]).detach())
    engine.add(delivery(ids))
    engine.apply_all()
    assert torch.equal(module[1].running_mean, mean) == (train_mode == "never")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_gives_float32_features_and_about_the_same_update(dtype: torch.dtype) -> None:
    module, reference = Counted(), Counted()
    engine, _, batcher = engine_of(module, autocast=dtype)
    ids = [1, 2, 3]
    vectors = torch.from_numpy(engine.features(np.array(ids)).vectors_KD)
    assert vectors.dtype == torch.float32
    exact = reference(IMAGES[ids])
    torch.testing.assert_close(vectors, exact.detach(), rtol=0.02, atol=0.02)
    assert not torch.equal(vectors, exact.detach())
    engine.add(delivery(ids, torch.full((3, DIM), 1e-3)))
    engine.apply_all()
    exact.backward(torch.full((3, DIM), 1e-3))
    change = (module.weight - Counted().weight) / -0.1
    torch.testing.assert_close(change, reference.weight.grad, rtol=0.05, atol=1e-5)
    assert not batcher.failed


def test_a_float16_overflow_is_computed_again_in_float32() -> None:
    module = Counted()
    engine, _, batcher = engine_of(module, autocast=torch.float16)
    before = module.weight.detach().clone()
    engine.add(delivery([1, 2], torch.full((2, DIM), 1e4)))  # times the scale: beyond float16
    engine.apply_all()
    assert not batcher.failed and not torch.equal(module.weight, before)


def test_a_module_of_another_width_is_named() -> None:
    engine, _, _ = engine_of(nn.Linear(5, DIM + 1))
    with pytest.raises(InvalidArgument, match=r"\(2, 4\) of 2 samples.*\(2, 3\)"):
        engine.features(np.array([1, 2]))


def test_samples_are_kept_up_to_a_bound() -> None:
    asked: list[int] = []

    def counting(number: int) -> Tensor:
        asked.append(number)
        return IMAGES[number]

    samples = Samples(counting, cache_bytes=3 * IMAGES[0].nbytes)
    for ids in ([1, 2, 3], [1, 2, 3], [4], [2, 3], [1]):
        samples.batch(np.array(ids))
    assert asked == [1, 2, 3, 4, 1]


def test_bytes_need_a_decoder_and_a_store_is_read_at_once() -> None:
    class Store:
        calls = 0

        def read(self, ids: Any) -> list[bytes | None]:
            self.calls += 1
            return [None if number == 5 else bytes([number, number]) for number in ids]

    store = Store()
    with pytest.raises(InvalidArgument, match="decode="):
        Samples(store)
    samples = Samples(store, lambda raw: torch.frombuffer(bytearray(raw), dtype=torch.uint8))
    batch, failures = samples.batch(np.array([3, 5, 4]))
    assert batch is not None and batch.tolist() == [[3, 3], [4, 4]] and list(failures) == [5] and store.calls == 1
    for odd in (Samples(store, lambda _: sys.exit(2)), Samples(lambda _: sys.exit(2))):
        assert "SystemExit: 2" in odd.batch(np.array([3]))[1][3].reason
    with pytest.raises(InvalidArgument, match="samples is 7"):
        Samples(7)


def test_the_lead_is_handed_on_while_others_wait() -> None:
    module = Counted()
    started, go = threading.Event(), threading.Event()
    plain = module.forward

    def slow(batch: Tensor) -> Tensor:
        started.set()
        assert go.wait(30)
        return plain(batch)

    module.forward = slow  # type: ignore[method-assign]
    engine, _, _ = engine_of(module)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(engine.features, np.array([1]))
        assert started.wait(30)
        others = [pool.submit(engine.features, np.array([number])) for number in (2, 3)]
        while engine.queued_ids < 2:
            threading.Event().wait(0.001)
        go.set()
        assert len(first.result(30).vectors_KD) == 1
        assert all(len(other.result(30).vectors_KD) == 1 for other in others)
    assert module.batches == [1, 2]


def test_an_update_that_can_never_be_is_counted_as_failed() -> None:
    engine, dense, batcher = engine_of(Counted())
    plain = dense.push

    def refuse(*_: Any, **__: Any) -> None:
        raise NonFinite("row 3 would be infinite")

    dense.push = refuse  # type: ignore[method-assign]
    engine.add(delivery([1, 2]))
    assert engine.apply_due() and batcher.failed == [1, 2]
    dense.push = plain  # type: ignore[method-assign]
    engine.add(delivery([3], sequence=2))
    assert engine.apply_due() and engine.account().adds_up and engine.account().applied == 1


class Broken:
    """A cache whose store does not answer."""

    def lookup(self, *_: Any, **__: Any) -> Any:
        raise StoreUnavailable("redis does not answer")

    def insert(self, *_: Any) -> None:
        raise StoreUnavailable("redis does not answer")

    def report(self) -> dict[str, Any]:
        return {}


def test_a_cache_that_fails_costs_time_and_no_feature(caplog: pytest.LogCaptureFixture) -> None:
    engine, _, _ = engine_of(Counted())
    expected = engine.features(np.array([1, 2])).vectors_KD
    engine.cache = Broken()
    np.testing.assert_array_equal(engine.features(np.array([1, 2])).vectors_KD, expected)
    assert "not looked up" in caplog.text and "not kept" in caplog.text


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (RuntimeError("device lost"), ModuleFailed, "RuntimeError: device lost"),
        (SystemExit(2), ModuleFailed, "SystemExit: 2"),
        (KeyError("of a hook"), InternalError, "a dense update failed: KeyError: 'of a hook'"),
    ],
)
def test_the_thread_of_updates_outlives_what_is_raised(
    error: BaseException, expected: type[GeartrainError], message: str
) -> None:
    module = Fragile()
    module.error = error
    engine, dense, _ = engine_of(module, mode="async", flush_seconds=0.04)
    if expected is InternalError:  # raised beside the module
        dense.refresh = lambda: module(IMAGES[:1]) is None
    engine.deliver(delivery([1]))
    while engine.update_error is None:
        threading.Event().wait(0.001)
    assert engine._updates is not None
    with pytest.raises(expected, match=message):
        engine._updates.wait_until_due(0)
    module.broken = False
    while engine.account().due:
        threading.Event().wait(0.001)
    engine.close()
    assert engine.account().applied == 1
