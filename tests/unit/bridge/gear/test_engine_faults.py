"""What one fault costs a slow gear's engine: no update made twice, no sample that spoils those of others."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.ams.values.errors import InvalidArgument, ModuleFailed, ShardUnavailable
from geartrain.bridge.gear.coalescer import Coalescer
from geartrain.bridge.gear.sample_source import Samples
from tests.support import gear_fakes
from tests.support.gear_fakes import DIM, IMAGES, delivery

NAN, ODD = 13, 17


class Normed(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(nn.Linear(5, DIM), nn.BatchNorm1d(DIM))


class Picky(nn.Linear):
    """Raises if the sample of one id is in the batch."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error or IndexError("index out of range in self")
        torch.manual_seed(2)
        super().__init__(5, DIM)

    def forward(self, batch: Tensor) -> Tensor:
        if bool((batch[:, 0] == IMAGES[ODD, 0]).any()):
            raise self.error
        return super().forward(batch)


def sample(number: int) -> Tensor:
    return torch.full((5,), float("nan")) if number == NAN else IMAGES[number]


def engine_of(module: nn.Module, **settings: Any) -> Any:
    return gear_fakes.engine_of(module, sample, **settings)


def test_an_update_whose_new_weights_cannot_be_pulled_is_not_pushed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, dense, batcher = engine_of(Picky())
    engine.add(delivery([1, 2]))
    refreshes = [0]

    def refresh() -> bool:
        refreshes[0] += 1
        if refreshes[0] == 2:  # the one behind the push
            raise ShardUnavailable("shard 0 does not answer")
        return False

    monkeypatch.setattr(dense, "refresh", refresh)
    with pytest.raises(ShardUnavailable):
        engine.apply_due()
    assert batcher.settled == 0
    assert engine.apply_due() and batcher.settled == 1
    assert len(dense.pushed) == 1 and dense.version == 1


def test_what_is_repeated_is_what_was_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, dense, batcher = engine_of(Normed())
    engine.add(delivery([1, 2, 3]))
    dense.fails = 1
    with pytest.raises(ShardUnavailable):
        engine.apply_due()
    monkeypatch.setattr(Samples, "batch", lambda *_: pytest.fail("its gradient is known"))
    assert engine.apply_due() and batcher.settled == 1
    assert int(dense.module[1].num_batches_tracked) == 1  # type: ignore[index]


@pytest.mark.parametrize("train_mode", ["backward", "always"])
def test_a_sample_that_is_not_finite_spoils_neither_statistics_nor_the_others_of_its_batch(train_mode: Any) -> None:
    module = Normed()
    engine, _, batcher = engine_of(module, train_mode=train_mode)
    ids = [0, 1, 2, NAN, 4, 5, 6, 7]
    reply = engine.features(np.array(ids))
    assert list(reply.failures) == [NAN] and np.isfinite(reply.vectors_KD).all()
    engine.add(delivery(ids))
    engine.apply_all()
    assert batcher.failed == [NAN] and engine.account().applied == 7
    assert all(bool(torch.isfinite(value).all()) for value in module.state_dict().values())
    assert int(module[1].num_batches_tracked) > 0


@pytest.mark.parametrize("train_mode", ["backward", "always"])
def test_one_sample_alone_takes_the_statistics_that_were_learned(train_mode: Any) -> None:
    module, reference = Normed(), Normed().eval()
    engine, _, batcher = engine_of(module, train_mode=train_mode)
    vectors = torch.from_numpy(engine.features(np.array([3])).vectors_KD)
    torch.testing.assert_close(vectors, reference(IMAGES[[3]]).detach())
    engine.add(delivery([3]))
    engine.apply_all()
    reference(IMAGES[[3]]).sum().backward()
    torch.testing.assert_close(module[0].weight.grad, reference[0].weight.grad)
    assert batcher.settled == 1 and torch.equal(module[1].running_mean, reference[1].running_mean)


def test_a_batch_is_cut_into_parts_of_about_the_same_size() -> None:
    sizes: list[int] = []
    module = Picky()
    module.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    engine, _, _ = engine_of(module, max_batch=8)
    engine.add(delivery([0, 1, 2, 3, 4, 5, 6, 7, 8]))
    engine.apply_all()
    assert sizes == [5, 4]


@pytest.mark.parametrize("error", [IndexError("index out of range in self"), SystemExit(2)])
def test_a_sample_that_the_module_cannot_take_is_blamed_alone(error: BaseException) -> None:
    engine, _, batcher = engine_of(Picky(error))
    reply = engine.features(np.array([0, 1, ODD, 2, 4]))
    assert list(reply.failures) == [ODD] and f"{type(error).__name__}: {error}" in reply.failures[ODD].reason
    torch.testing.assert_close(reply.vectors_KD[[0, 1, 3, 4]], engine.features(np.array([0, 1, 2, 4])).vectors_KD)
    engine.add(delivery([0, 1, ODD, 2, 4]))
    engine.apply_all()
    assert batcher.failed == [ODD] and engine.account().applied == 4
    with pytest.raises(ModuleFailed, match=type(error).__name__):
        engine.features(np.array([ODD]))


def test_what_the_module_raises_of_every_sample_is_nobodys_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, batcher = engine_of(Picky())
    with monkeypatch.context() as patch:
        patch.setattr(Picky, "forward", lambda *_: (_ for _ in ()).throw(RuntimeError("device lost")))
        engine.add(delivery([0, 1, 2]))
        for failing in (lambda: engine.features(np.arange(3)), engine.apply_due):
            with pytest.raises(ModuleFailed, match="of 3: RuntimeError: device lost; see that its module takes"):
                failing()
    assert engine.apply_due() and batcher.settled == 1 and not batcher.failed


def test_an_interrupted_thread_takes_no_others_with_it() -> None:
    """The thread that leads a batch gets Ctrl-C; another has a request in the same batch."""
    asked: list[list[int]] = []

    def compute(ids: Any) -> Any:
        asked.append(ids.tolist())
        if len(asked) == 1:
            raise KeyboardInterrupt
        return ids * 10

    coalescer: Coalescer[Any] = Coalescer(
        compute, lambda result, positions, _: result[positions], max_ids=4, max_wait_seconds=60.0
    )
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(coalescer.get, np.array([1, 2]))
        while not coalescer.queued_ids:
            threading.Event().wait(0.001)
        second = pool.submit(coalescer.get, np.array([3, 4]))
        with pytest.raises(KeyboardInterrupt):
            first.result(30)
        third = pool.submit(coalescer.get, np.array([5, 6]))
        assert second.result(30).tolist() == [30, 40] and third.result(30).tolist() == [50, 60]
    assert asked[0] == [1, 2, 3, 4]


def test_what_cannot_be_applied_at_the_end_is_kept_for_another_try() -> None:
    engine, dense, _ = engine_of(Picky())
    engine.add(delivery([1, 2]))
    dense.fails = 1
    with pytest.raises(ShardUnavailable):
        engine.close()
    with pytest.raises(InvalidArgument, match="was closed"):
        engine.deliver(None)  # type: ignore[arg-type]
    engine.close()
    assert engine.account().applied == 2
    engine.close()


def test_nobody_has_to_close_a_slow_gear_but_is_told_of_what_was_left(caplog: pytest.LogCaptureFixture) -> None:
    with gt.local() as cluster:
        image = gt.SlowGear(cluster, "image", dim=DIM, build=Picky, samples=IMAGES, gradients_per_id=9)
        rows = gt.RowOptimizer(image)
        image(torch.tensor([1, 2])).sum().backward()
        rows.step()
        thread = image._port._updates._thread  # type: ignore[attr-defined]
        del image, rows
        gc.collect()
        thread.join(30)
        assert not thread.is_alive() and "2 gradients will not be applied: close() of the slow gear" in caplog.text


_UNCLOSED = """
import threading, numpy, torch
from tests.unit.bridge.gear.test_engine_faults import Picky, delivery, engine_of

class Busy(Picky):
    def forward(self, batch):
        started.set()
        for _ in range(300):
            torch.randn(300, 300) @ torch.randn(300, 300)
        return super().forward(batch)

started = threading.Event()
engine, _, _ = engine_of(Busy(), mode="async")
engine.add(delivery([1, 2]))
engine.apply_soon()
started.wait(30)
"""


def test_a_process_that_forgets_to_close_ends_in_peace() -> None:
    ended = subprocess.run([sys.executable, "-c", _UNCLOSED], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
