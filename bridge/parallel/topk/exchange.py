"""Exchange of the gradients in DDP's buckets, from the backward pass to the optimizer's step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.parallel.topk.bucket import (
    FAILED,
    NOT_STEPPED,
    WELL,
    BucketLayout,
    BucketWork,
    SgdSettings,
    is_state_error,
    tensor_of,
)
from geartrain.bridge.parallel.topk.failures import (
    no_more_batches,
    not_exchanged,
    not_finite,
    not_stepped,
    raise_after_backward,
    require_alike,
)
from geartrain.bridge.parallel.topk.requirements import (
    require_no_momentum,
    require_plain,
    require_types,
    trained_parameters,
)
from geartrain.bridge.parallel.topk.selection import sent_counts, sparsity_at
from geartrain.bridge.parallel.topk.state import GradientState, digest_of


@dataclass(frozen=True)
class Settings:
    """Settings that all ranks agree on."""

    sparsity: float
    warmup_steps: int
    update: SgdSettings
    clip: float | None


class GradientExchange:
    """Communication hook of one model.

    For each bucket it accumulates, selects and starts to send. It receives the ranks' messages at the last bucket, so
    that a step with any failed bucket changes nothing. On a CPU a thread does this work during the rest of the backward
    pass, over another process group than DDP's, which may be in use meanwhile.

    Attributes: ``steps``, ``skipped_steps``, ``state``, ``link``, ``is_merged``.
    """

    def __init__(
        self,
        settings: Settings,
        model: DistributedDataParallel,
        named: nn.Module,
        optimizer: Any,
        grad_scaler: Any,
    ) -> None:
        """Attach as ``TopKGradients.attach`` does; ``named`` has the parameters of ``model`` by their names."""
        self.steps = 0
        self.skipped_steps = 0
        self.is_merged = True
        self._settings = settings
        self._scaler = grad_scaler if grad_scaler is not None and grad_scaler.is_enabled() else None
        self._may_be_unused = bool(model.find_unused_parameters or getattr(model, "static_graph", False))
        parameters = trained_parameters(model, named)
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        on_host = all(parameter.device.type == "cpu" for parameter in parameters.values())
        self.link = Communicator(model.process_group)
        self.link = self.link.apart() if on_host else self.link
        self._thread = ThreadPoolExecutor(1, "geartrain-topk") if on_host else None
        self._buckets: list[BucketWork] = []
        self._layouts: dict[int, tuple[tuple[float, list[int]], BucketLayout]] = {}
        self._scale: Tensor | None = None
        self._factor: Tensor | None = None
        self._asked: Future[None] | None = None
        self._awaits_step = False
        self._broken = False
        self._loaded = 0
        """Digest of the state loaded since the last step; 0: none was loaded."""
        self._refusal: Exception | None = None
        """Error for which the backward pass in progress exchanges nothing."""

        def check() -> Optimizer:
            require_types(parameters, settings.sparsity)
            return require_plain(optimizer, parameters)

        self._optimizer = self.link.run_together(check, "gradients are not sparsified")
        shapes = str([(name, tuple(parameter.shape), str(parameter.dtype)) for name, parameter in parameters.items()])
        agreed = {**asdict(settings), "parameters": hashlib.sha256(shapes.encode()).hexdigest()[:16]}
        self.link.require_equal(agreed, "sparsified gradients")
        numels = [parameter.numel() for parameter in parameters.values()]
        ks = sent_counts(numels, settings.sparsity, self.link.world_size)
        sparse = {name for name, k, numel in zip(parameters, ks, numels, strict=True) if k < numel}
        self.state = GradientState(parameters, sparse, decays=settings.update.weight_decay > 0)
        try:
            model.register_comm_hook(self, _on_bucket)
        except RuntimeError as exc:
            raise InvalidArgument(
                f"the model refuses a communication hook ({exc}); attach to a DistributedDataParallel that has none"
            ) from exc
        self._optimizer.register_step_post_hook(self._stepped)

    def load(self, saved: Mapping[str, Mapping[str, Any]], steps: int) -> None:
        """Load a state. On an error, as of ``GradientState.load``, nothing is changed."""
        self.state.load(saved)
        self.steps = steps
        self.is_merged = True
        self._awaits_step = self._broken = False
        self._loaded = digest_of(saved)

    def merge(self) -> None:
        """Replace momentum and residuals on every rank by their mean over the ranks, unless all are equal already."""
        self.link.run_together(self.require_between_steps, "the residuals were not merged")
        if not self.link.agree(self.is_merged):
            self.state.average(self.link)
        self.is_merged = True

    def require_between_steps(self) -> None:
        """Raise InvalidArgument after a failed step, or between ``backward()`` and the optimizer's step."""
        self.require_usable()
        if self._awaits_step:
            raise InvalidArgument(
                "backward() has taken elements out of the residuals that optimizer.step() has not applied yet; save "
                "after the step"
            )

    def require_usable(self) -> None:
        """Raise InvalidArgument after a failed step."""
        if self._broken:
            raise InvalidArgument(
                "an earlier step of TopKGradients failed on some rank, and the elements that it took from the "
                "residuals are lost: call load_state_dict() on every rank before the next backward()"
            )

    def _stepped(self, *_: object) -> None:
        self._awaits_step = False

    def on_bucket(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Start to exchange a bucket; DDP calls it for each in order, once the bucket's gradients are complete."""
        if torch._C._current_graph_task_id() < 0:
            self._refuse_to_join()
        if bucket.index() == 0:
            self._start_backward(bucket.buffer().device)
        buffer = bucket.buffer()
        work = BucketWork(
            self._layout(bucket),
            buffer,
            self.state,
            self.link,
            update=self._settings.update,
            may_be_unused=self._may_be_unused,
        )
        self._buckets.append(work)
        if self._settings.clip is None:
            self._start(work)
        elif bucket.is_last():
            factor = self._clipping(self._settings.clip)
            self._factor = factor if self._factor is None else self._factor * factor
            for held in self._buckets:
                self._start(held)
        if bucket.is_last():
            self._finish()
        return work.future

    def _start_backward(self, device: torch.device) -> None:
        failure: Exception | None = None
        try:
            self.require_usable()
            require_no_momentum(self._optimizer)
        except InvalidArgument as exc:
            failure = exc
        self._buckets = []
        self._factor = self._refusal = None
        if self._scaler is not None:
            self._scale = self._scaler.scale(torch.ones((), device=device))
            self._factor = 1 / self._scale
        numbers = [failure is None, self._loaded, self.steps]

        def ask() -> None:
            try:
                require_alike(self.link.exchange(numbers), failure)
            except Exception as exc:  # of any kind: DDP must end its pass before it is raised
                self._refusal = exc

        self._asked = self._done_beside(ask)

    def _refuse_to_join(self) -> NoReturn:
        """Raise on every rank: this one has left its loop in ``model.join()``, so that DDP sends zeros for it."""
        failure = no_more_batches()
        require_alike(self.link.exchange([False, self._loaded, self.steps]), failure)
        raise failure

    def _clipping(self, clip: float) -> Tensor:
        """Return the factor that clips the norm of this rank's unscaled gradient to clip · √R."""
        norms = torch.stack([_norm_of(bucket.buffer) for bucket in self._buckets])
        norm = torch.linalg.vector_norm(norms)
        if self._factor is not None:
            norm = norm * self._factor
        most = clip * self.link.world_size**0.5
        # A factor of NaN would spread to all gradients, and the error would name another parameter.
        factor: Tensor = (most / norm).clamp(max=1).nan_to_num(0.0)
        return factor

    def _start(self, bucket: BucketWork) -> None:
        status = NOT_STEPPED if self._awaits_step else WELL
        keep = self._scaler is not None
        factor = self._factor

        def begin() -> None:
            if self._refusal is None:
                bucket.start(status, factor, keep=keep)

        bucket.begun = self._done_beside(begin)

    def _done_beside(self, work: Callable[[], None]) -> Future[None] | None:
        """Run ``work`` on the thread, after its earlier work; without a thread, now."""
        if self._thread is not None:
            return self._thread.submit(work)
        work()
        return None

    def _layout(self, bucket: Any) -> BucketLayout:
        """Return a bucket's layout, which changes with DDP's new buckets after the first step, and in the warm-up."""
        parameters = bucket.parameters()
        sparsity = sparsity_at(self.steps, self._settings.sparsity, self._settings.warmup_steps)
        made_for = (sparsity, [id(parameter) for parameter in parameters])
        known = self._layouts.get(bucket.index())
        if known is None or known[0] != made_for:
            names = [self._names[id(parameter)] for parameter in parameters]
            ks = sent_counts([parameter.numel() for parameter in parameters], sparsity, self.link.world_size)
            known = self._layouts[bucket.index()] = made_for, BucketLayout(names, parameters, ks)
        return known[1]

    def _finish(self) -> None:
        """Receive the ranks' messages, at the last bucket, and complete the futures that DDP waits for."""
        buckets, self._buckets = self._buckets, []
        try:
            failure = self._apply_results(buckets)
        except Exception as exc:  # of any kind: DDP must end its pass before it is raised
            failure = exc
        if failure is not None:
            self._broken = self._broken or self._refusal is None
            self._refusal = None  # it holds its caller's frames, and DDP in them
            for bucket in buckets:
                bucket.buffer.zero_()
        for bucket in buckets:
            bucket.future.set_result(bucket.buffer)
        if failure is not None:
            raise_after_backward(failure)

    def _apply_results(self, buckets: list[BucketWork]) -> Exception | None:
        """Receive the ranks' messages and write the updates to the buckets; return the error that every rank raises."""
        begun = [task for task in (self._asked, *(bucket.begun for bucket in buckets)) if task is not None]
        wait(begun)
        for task in begun:
            task.result()
        if self._refusal is not None:
            return self._refusal
        statuses = torch.stack([bucket.receive() for bucket in buckets]).cpu().tolist()  # the only host wait of a pass
        of_means = self.link.world_size  # place of the means' status: it does not tell whose part is not finite
        troubles = [
            (bucket, None if rank == of_means else rank, status)
            for bucket, of_bucket in zip(buckets, statuses, strict=True)
            for rank, status in enumerate(of_bucket)
            if status != WELL
        ]
        own = next((bucket.failure for bucket in buckets if bucket.failure is not None), None)
        if own is not None:
            return own
        if failed := [rank for _, rank, status in troubles if status == FAILED and rank is not None]:
            return not_exchanged(failed[0])
        early = [rank for _, rank, status in troubles if status == NOT_STEPPED and rank is not None]
        if early or self._awaits_step:
            return not_stepped(early[0] if early else self.link.rank)
        if not troubles:
            for bucket in buckets:
                bucket.apply()
                if self._scale is not None:
                    bucket.buffer.mul_(self._scale)
            self.state.discard()
            self.steps += 1
            self._loaded = 0
            self.is_merged, self._awaits_step = self.link.world_size == 1, True
            return None
        of_state = [trouble for trouble in troubles if is_state_error(trouble[2])]
        if self._scaler is not None and not of_state:
            self.state.restore()
            for bucket in buckets:
                bucket.buffer.fill_(torch.inf)
            self.skipped_steps += 1
            return None
        work, rank, status = (of_state or troubles)[0]
        return not_finite(work.layout.names[tensor_of(status)], rank, of_state=bool(of_state))


def _on_bucket(exchange, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, as objects
    return exchange.on_bucket(bucket)


def _norm_of(buffer: Tensor) -> Tensor:
    """Return the 2-norm, float32, accumulated in at least float32."""
    wide = torch.float64 if buffer.dtype == torch.float64 else torch.float32
    norm: Tensor = torch.linalg.vector_norm(buffer, dtype=wide)
    return norm.float()
