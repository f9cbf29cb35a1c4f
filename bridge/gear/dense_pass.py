"""Forward and backward passes of the dense part over ids: the only code that runs the user's module.

Legend: B samples of one device batch, D width of a dense feature, K distinct ids.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from geartrain.ams.values.errors import GeartrainError, InvalidArgument, ModuleFailed, NonFinite, SampleDamaged
from geartrain.ams.values.gear_messages import Failure, without
from geartrain.ams.values.specs import Ids
from geartrain.bridge.gear.config import SlowGearConfig
from geartrain.bridge.gear.sample_source import SHOWN, Samples
from geartrain.bridge.rows.transfers import download, upload

R = TypeVar("R")
_HALF_SCALE = 4096.0
"""Loss scale of float16 gradients, so that small ones do not vanish."""


class DensePass:
    """A module over the samples of ids. It runs under :attr:`lock`, which must also be held to change the weights.

    ``train_mode`` says when the module is in ``train()``. ``"backward"``: only in backward passes, so that features are
    those of an evaluation, and BatchNorm learns its statistics from the batches of backward passes. ``"always"``: also
    when features are computed (with their batch's statistics and dropout; running statistics are restored, so that
    every step counts once, in its backward pass). ``"never"``: statistics stay as they are and get no gradient. For a
    batch of one sample, which BatchNorm refuses, the learned statistics are used. With ``autocast`` (bfloat16, float16)
    the module runs in mixed precision; float16 gradients are scaled, and a batch that overflows is computed again in
    float32.
    """

    def __init__(
        self,
        module: nn.Module,
        samples: Samples,
        dim: int,
        config: SlowGearConfig,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        """``device`` None: that of the module."""
        first = next(module.parameters(), None)
        own = torch.device("cpu") if first is None else first.device
        self.device = own if device is None else torch.device(device)
        self.module = module.to(self.device)
        self.dim = dim
        self.max_batch = config.max_batch
        self.lock = threading.RLock()
        self._samples = samples
        self._autocast = config.autocast
        self._train_mode = config.train_mode
        self.on_recomputed: Callable[[Ids, Tensor], None] | None = None
        """Receives the ids [B] and features [B, D] of every backward pass, unless ``train_mode="backward"`` makes them
        differ from those of :meth:`features`."""

    def features(self, ids: Ids) -> tuple[Tensor, dict[int, Failure]]:
        """Compute the features [K, D] float32 of ``ids`` on the host; rows of ids that failed are zeros.

        ceil(K / max_batch) forward passes without a graph, and more to find samples that make a batch fail. Raises
        ModuleFailed if all samples of a batch fail, and InvalidArgument if the module does not return [B, D].
        """
        out_KD = torch.zeros(len(ids), self.dim, dtype=torch.float32, device="cpu")
        failures: dict[int, Failure] = {}
        for start in range(0, len(ids), self.max_batch):
            part = ids[start : start + self.max_batch]
            batch, failed = self._samples.batch(part)
            good = without(part, failed)
            if batch is not None:
                with _failures_named(len(part)):
                    vectors_BD, spoiled = self._computed(part[good], batch)
                failed |= spoiled
                positions = start + np.flatnonzero(good)
                out_KD[torch.from_numpy(positions)] = vectors_BD
            failures |= failed
        if failures:
            out_KD[torch.from_numpy(np.flatnonzero(~without(ids, failures)))] = 0.0
        return out_KD, failures

    def _computed(self, ids: Ids, batch: Tensor) -> tuple[Tensor, dict[int, Failure]]:
        """Return the features of samples. Raises the module's exception if every sample fails alone, too."""
        try:
            with self.lock, torch.no_grad(), self._mode(self._train_mode == "always", keeps_buffers=True):
                vectors_BD = download(self._forward(batch, self._autocast))
            failed = _non_finite(ids, torch.isfinite(vectors_BD).all(dim=1))
            if len(ids) == 1 or not self._spoils(failed, ids, self._train_mode == "always"):
                return vectors_BD, failed
        except GeartrainError:
            raise
        except (Exception, SystemExit):  # of any kind, from the user's module
            if len(ids) == 1:
                raise
        halves = _by_halves(
            ids,
            lambda part: self._computed(ids[part], batch[part]),
            lambda part, exc: (torch.zeros(len(part), self.dim, dtype=torch.float32, device="cpu"), _raised(part, exc)),
        )
        return torch.cat([vectors for vectors, _ in halves]), halves[0][1] | halves[1][1]

    def backward(self, ids: Ids, gradients_KD: Tensor) -> dict[int, Failure]:
        """Set ``.grad`` of the parameters to the sum over ``ids`` of gradient · ∂feature/∂parameter.

        One caller at a time. Uses the current weights, in ceil(K / max_batch) forward and backward passes, between
        which features may be computed. Ids in the result contribute nothing to the sum: their sample, feature or part
        of the sum is missing or not finite. Raises as :meth:`features`.
        """
        failures: dict[int, Failure] = {}
        self.module.zero_grad(set_to_none=True)
        num_batches = max(1, -(-len(ids) // self.max_batch))
        for part in np.array_split(np.arange(len(ids)), num_batches):  # equal parts: no rest of one or two samples
            gradients_BD = gradients_KD[torch.from_numpy(part).to(gradients_KD.device)]
            with _failures_named(len(part)):
                failures |= self._backward_batch(ids[part], gradients_BD)
        return failures

    def _backward_batch(self, ids: Ids, gradients_BD: Tensor) -> dict[int, Failure]:
        batch, failures = self._samples.batch(ids)
        if batch is None:
            return failures
        good = without(ids, failures)
        ids, gradients_BD = ids[good], gradients_BD[torch.from_numpy(good).to(gradients_BD.device)]
        bad: dict[int, Failure] | None = {}
        try:
            for autocast in dict.fromkeys((self._autocast, None)):
                bad = self._try_backward(ids, batch, gradients_BD, autocast)
                if bad is None:
                    return failures
        except GeartrainError:
            raise
        except (Exception, SystemExit):  # from the user's module
            if len(ids) == 1:
                raise
            return failures | self._backward_halves(ids, gradients_BD)
        if len(ids) == 1:
            return failures | (bad or _not_finite(ids, "gradient"))
        if not bad or self._spoils(bad, ids, self._train_mode != "never"):
            return failures | self._backward_halves(ids, gradients_BD)
        rest = without(ids, bad)  # repeated without the bad ones
        chosen = torch.from_numpy(rest).to(gradients_BD.device)
        return failures | bad | (self._backward_batch(ids[rest], gradients_BD[chosen]) if rest.any() else {})

    def _backward_halves(self, ids: Ids, gradients_BD: Tensor) -> dict[int, Failure]:
        first, second = _by_halves(ids, lambda part: self._backward_batch(ids[part], gradients_BD[part]), _raised)
        return first | second

    def _spoils(self, failed: dict[int, Failure], ids: Ids, in_training: bool) -> bool:
        """Return whether one sample may have made all others fail, through the statistics of their batch."""
        return len(failed) == len(ids) and in_training and bool(self._norms())

    def _norms(self) -> list[nn.Module]:
        return [module for module in self.module.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]

    def _try_backward(
        self, ids: Ids, batch: Tensor, gradients_BD: Tensor, autocast: torch.dtype | None
    ) -> dict[int, Failure] | None:
        """Add to the gradients of the parameters; return None if they are finite.

        Otherwise nothing has changed, and the result names the features that are not finite, if any.
        """
        with self.lock:
            kept = [buffer.clone() for buffer in self.module.buffers()]
            bad: dict[int, Failure] | None = {}
            try:
                bad = self._add_gradients(ids, batch, gradients_BD, autocast)
            finally:
                if bad is not None:  # do not learn statistics from samples that are not in the update
                    self._restore(kept)
            return bad

    def _add_gradients(
        self, ids: Ids, batch: Tensor, gradients_BD: Tensor, autocast: torch.dtype | None
    ) -> dict[int, Failure] | None:
        scale = _HALF_SCALE if autocast is torch.float16 else 1.0
        with torch.enable_grad(), self._mode(self._train_mode != "never"):
            vectors_BD = self._forward(batch, autocast)
            finite_B = torch.isfinite(vectors_BD.detach()).all(dim=1)
            if self.device.type == "cpu" and (bad := _non_finite(ids, finite_B)):  # a device is asked only once, later
                return bad
            parameters = [p for p in self.module.parameters() if p.requires_grad]
            grads = torch.autograd.grad(
                vectors_BD, parameters, upload(gradients_BD, self.device).float() * scale, allow_unused=True
            )
        sound = [torch.isfinite(grad).all().reshape(1) for grad in grads if grad is not None]
        host = download(torch.cat([finite_B, *sound]))
        if bad := _non_finite(ids, host[: len(ids)]):
            return bad
        if self.on_recomputed is not None and self._train_mode != "backward":
            self.on_recomputed(ids, vectors_BD.detach())
        if not bool(host[len(ids) :].all()):
            return {}
        for parameter, grad in zip(parameters, grads, strict=True):
            if grad is not None:
                grad = grad if scale == 1.0 else grad / scale
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        return None

    def _forward(self, batch: Tensor, autocast: torch.dtype | None) -> Tensor:
        batch = upload(batch, self.device)
        context: AbstractContextManager[object] = (
            nullcontext() if autocast is None else torch.autocast(self.device.type, autocast)
        )
        with context:
            vectors_BD = self._called(batch)
        if not isinstance(vectors_BD, Tensor) or vectors_BD.shape != (len(batch), self.dim):
            shape = tuple(vectors_BD.shape) if isinstance(vectors_BD, Tensor) else type(vectors_BD).__name__
            raise InvalidArgument(
                f"the dense module made {shape} of {len(batch)} samples; it must make ({len(batch)}, {self.dim})"
            )
        return vectors_BD.float()

    def _called(self, batch: Tensor) -> Any:
        try:
            return self.module(batch)
        except ValueError:  # BatchNorm refuses one sample: use its learned statistics
            if len(batch) > 1 or not self.module.training or not (norms := self._norms()):
                raise
        for norm in norms:
            norm.eval()
        return self.module(batch)

    @contextmanager
    def _mode(self, training: bool, *, keeps_buffers: bool = False) -> Iterator[None]:
        kept = [buffer.clone() for buffer in self.module.buffers()] if training and keeps_buffers else []
        self.module.train(training)
        try:
            yield
        finally:
            self._restore(kept)

    def _restore(self, kept: list[Tensor]) -> None:
        with torch.no_grad():
            for buffer, value in zip(self.module.buffers(), kept, strict=False):
                buffer.copy_(value)


@contextmanager
def _failures_named(num_samples: int) -> Iterator[None]:
    try:
        yield
    except GeartrainError:
        raise
    except (Exception, SystemExit) as exc:  # of any kind, from the user's module
        raise ModuleFailed(
            f"the dense part fails on every sample of a batch of {num_samples}: {type(exc).__name__}: {exc}; see that "
            "its module takes what samples= and decode= make, and that its device has room for them"
        ) from exc


def _by_halves(ids: Ids, work: Callable[[slice], R], failed: Callable[[Ids, BaseException], R]) -> list[R]:
    """Find samples that make a batch fail, by halving it. Raises the module's exception if every sample fails alone."""
    results: list[R] = []
    errors: list[BaseException] = []
    half = len(ids) // 2
    for part in (slice(None, half), slice(half, None)):
        try:
            results.append(work(part))
        except GeartrainError:
            raise
        except (Exception, SystemExit) as exc:
            errors.append(exc)
            results.append(failed(ids[part], exc))
    if len(errors) == 2:
        raise errors[0]
    return results


def _raised(ids: Ids, error: BaseException) -> dict[int, Failure]:
    words = f"{type(error).__name__}: {error}"[:SHOWN]
    return {
        number: Failure(SampleDamaged.__name__, f"the dense part fails on the sample of id {number}: {words}")
        for number in ids.tolist()
    }


def _not_finite(ids: Ids, what: str) -> dict[int, Failure]:
    reason = "is not finite; lower the learning rate, or look at its sample"
    return {number: Failure(NonFinite.__name__, f"the {what} of id {number} {reason}") for number in ids.tolist()}


def _non_finite(ids: Ids, finite_B: Tensor) -> dict[int, Failure]:
    return {} if bool(finite_B.all()) else _not_finite(ids[~finite_B.numpy()], "dense feature")
