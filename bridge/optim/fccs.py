"""FCCS: warm up the learning rate, then grow the batch instead of lowering the rate (100M-class paper, sec. 3.4)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from geartrain.ams.values.arguments import integer, real_number
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.text import quoted
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.optim.batch_plan import plan_of_epochs, plan_of_steps
from geartrain.bridge.optim.step_batches import StepBatches

_NOT_MADE = "FCCS was not made"


class FCCS:
    """Schedule of learning rate and batch: a linear warm-up, then a batch that grows along half a cosine.

        schedule = gt.FCCS(optimizer, lr=0.4, warmup_steps=100, initial_batch=64, max_batch=1024,
                           initial_steps=1000, total_steps=2000, micro_batch=64)
        for step in schedule.steps(loader):              # the loader gives micro-batches
            for images, labels in step:
                (criterion(model(images), labels) / len(step)).backward()
            optimizer.step(); optimizer.zero_grad()
            schedule.step()                              # after the optimizer's, as that of a scheduler of PyTorch

    Rate and batch of step t, from 0:

        lr(t)    = lr · min(1, (t + 1) / warmup_steps)
        batch(t) = initial_batch                                         while t < initial_steps, then
                   initial_batch + (max_batch − initial_batch) · (1 − cos(π · (t − initial_steps)
                   / (total_steps − initial_steps))) / 2

    in whole micro-batches of all ranks, the nearest. So a batch never shrinks, and every rank makes as many
    micro-batches. The formula of the batch is lost in the paper's text: this is a reading of its "linear cosine curve".

    A batch is ranks · ``micro_batch`` · :attr:`accumulate` samples: gradients of micro-batches add up. Divide each loss
    by ``len(step)`` (:attr:`accumulate`), so that the step sees the mean over all of them; rows of class heads and
    embeddings do as parameters do. In a loop of your own read :attr:`accumulate` before each step, and call
    :meth:`step` after it. Not thread-safe.

    Args:
        optimizer: One or several whose ``lr`` is set: any of PyTorch, :class:`RowOptimizer`, the result of
            :func:`joint`. Nothing else may set it.
        lr: The rate after the warm-up, of all param_groups, or one for each in order; None: what each group has now.
        warmup_steps: Steps of the warm-up, >= 0.
        initial_batch: Samples of the first steps, over all ranks; a multiple of ranks · ``micro_batch``.
        max_batch: Samples at ``total_steps``, over all ranks; a multiple of the same, >= ``initial_batch``.
        initial_steps: Steps before the batch grows, >= 0.
        total_steps: Steps of the training, > ``initial_steps`` and >= ``warmup_steps``.
        micro_batch: Samples of one forward and backward pass on one rank.
        process_group: The ranks that share the batch; None: all there are. Every rank makes the same FCCS.

    Raises:
        InvalidArgument: a number is out of range. The other ranks raise SyncError.
        SpecMismatch: the ranks gave different numbers.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        lr: float | Sequence[float] | None = None,
        warmup_steps: int,
        initial_batch: int,
        max_batch: int,
        initial_steps: int,
        total_steps: int,
        micro_batch: int,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        link = Communicator(process_group)

        def check() -> None:
            self._optimizers = _optimizers(optimizer)
            self._peaks = _peaks(lr, self._groups)
            self._plan = plan_of_steps(
                warmup_steps=warmup_steps,
                initial_batch=initial_batch,
                max_batch=max_batch,
                initial_steps=initial_steps,
                total_steps=total_steps,
                micro_batch=micro_batch,
                ranks=link.world_size,
            )

        link.run_together(check, _NOT_MADE)
        self._micro_batch = self._plan.quantum // link.world_size
        facts = {**self._plan.settings(), "micro_batch": self._micro_batch, "lr": self._peaks}
        link.require_equal({**facts, "total_samples": self.total_samples}, "FCCS")
        self._rates: list[float] = []
        self._completed_steps = self._samples = self._epoch = self._epoch_samples = 0
        self._open: StepBatches | None = None
        self._set_rates()

    @classmethod
    def for_epochs(
        cls,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        epochs: float,
        samples_per_epoch: int,
        initial_epochs: float,
        initial_batch: int,
        max_batch: int,
        micro_batch: int,
        warmup_epochs: float = 0.0,
        lr: float | Sequence[float] | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> Self:
        """Return the longest schedule that takes at most ``epochs`` passes over ``samples_per_epoch`` samples.

        Args:
            optimizer: As of the class; so are ``lr``, batches and ``process_group``.
            epochs: Epochs of the whole training, > ``initial_epochs``.
            samples_per_epoch: Samples of all ranks in an epoch.
            initial_epochs: Epochs before the batch grows, >= 0.
            warmup_epochs: Epochs of the warm-up, from 0 to ``initial_epochs``.

        Raises:
            InvalidArgument: a number is out of range, or there are too few samples for the initial part and a step.
            SpecMismatch: the ranks gave different numbers.
        """
        link = Communicator(process_group)
        plan = link.run_together(
            lambda: plan_of_epochs(
                epochs=epochs,
                samples_per_epoch=samples_per_epoch,
                initial_epochs=initial_epochs,
                warmup_epochs=warmup_epochs,
                initial_batch=initial_batch,
                max_batch=max_batch,
                micro_batch=micro_batch,
                ranks=link.world_size,
            ),
            _NOT_MADE,
        )
        return cls(optimizer, lr=lr, **plan.settings(), micro_batch=micro_batch, process_group=process_group)

    @property
    def accumulate(self) -> int:
        """Micro-batches of the coming step, on each rank."""
        return self._plan.ramp.at(self._completed_steps)

    @property
    def batch(self) -> int:
        """Samples of the coming step, over all ranks."""
        return self.batch_at(self._completed_steps)

    def batch_at(self, step: int) -> int:
        """Samples of ``step``, over all ranks."""
        return self._plan.ramp.at(integer("step", step, 0)) * self._plan.quantum

    @property
    def completed_steps(self) -> int:
        """Number of completed steps."""
        return self._completed_steps

    @property
    def total_steps(self) -> int:
        """Steps of the training."""
        return self._plan.ramp.total_steps

    @property
    def is_complete(self) -> bool:
        """Whether all steps were made. Those after them have the last rate and batch."""
        return self._completed_steps >= self._plan.ramp.total_steps

    @property
    def samples(self) -> int:
        """Samples of the steps that were made, over all ranks."""
        return self._samples

    @property
    def total_samples(self) -> int:
        """Samples of the whole training, over all ranks."""
        return self._plan.total_samples

    @property
    def epoch(self) -> int:
        """Passes that :meth:`steps` has begun after the first one."""
        return self._epoch

    def step(self) -> None:
        """Count a step of the optimizers, and set the rate of their next one.

        Raises InvalidArgument if other code changed a rate, or if the loop of :meth:`steps` left micro-batches out.
        """
        self._require_rates()
        if self._open is not None and self._open.num_read < len(self._open):
            raise InvalidArgument(
                f"{self._open.num_read} of the {len(self._open)} micro-batches of step {self._completed_steps} were "
                "used; iterate over all of them, then call optimizer.step() and step()"
            )
        self._open = None
        self._samples += self.batch
        self._completed_steps += 1
        self._set_rates()

    def steps(self, loader: Iterable[Any], *, skip: bool = True) -> Iterator[StepBatches]:
        """Yield the micro-batches of each remaining step, over as many passes of ``loader`` as needed.

        Before a pass ``set_epoch(epoch)`` of the loader or its sampler is called, where there is one. Micro-batches are
        read when they are asked for. A step may take them from two passes.

        Args:
            loader: Gives micro-batches of ``micro_batch`` samples, those of this rank; all of one size
                (``drop_last=True``). Resumed runs are bit-identical if its order follows from ``set_epoch``, as that of
                ``DistributedSampler`` does.
            skip: After :meth:`load_state_dict` skip the micro-batches that the epoch had yielded. False: the loader
                resumes by itself (``StatefulDataLoader``).

        Raises:
            InvalidArgument: the loader has another batch size, a smaller last batch, or nothing; the body of the loop
                did not call :meth:`step` once.
        """
        self._require_whole(loader)
        batches = self._read(loader, skip)
        while not self.is_complete:
            count = self._completed_steps
            self._open = StepBatches(batches, self.accumulate)
            yield self._open
            if self._completed_steps != count + 1:
                raise InvalidArgument(
                    f"the loop called step() {self._completed_steps - count} times in step {count}; call it once, "
                    "after optimizer.step()"
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of the schedule as plain values, equal on all ranks. Call it after :meth:`step`.

        Raises InvalidArgument between micro-batches of a step.
        """
        if self._open is not None and self._open.num_read:
            raise InvalidArgument(
                f"step {self._completed_steps} is not complete; take the state after optimizer.step() and step()"
            )
        counts = {"completed_steps": self._completed_steps, "samples": self._samples}
        place = {"epoch": self._epoch, "epoch_samples": self._epoch_samples}
        return {**counts, **place, "lr": list(self._peaks), "settings": self._plan.settings()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a :meth:`state_dict`, before or after the optimizers load theirs.

        The number of ranks and ``micro_batch`` may be others, if batches are multiples of theirs. Raises
        InvalidArgument if a setting is another one; nothing is loaded then.
        """
        for name, value in self._plan.settings().items():
            if state["settings"].get(name) != value:
                raise InvalidArgument(
                    f"{name} is {value}, the state's {state['settings'].get(name)}; make FCCS with the numbers of the "
                    "training that is to go on"
                )
        if len(state["lr"]) != len(self._peaks):
            raise InvalidArgument(
                f"the state is of {len(state['lr'])} param_groups, the optimizers have {len(self._peaks)}; give FCCS "
                "the same optimizers"
            )
        self._completed_steps, self._samples = state["completed_steps"], state["samples"]
        self._epoch, self._epoch_samples = state["epoch"], state["epoch_samples"]
        self._peaks, self._open = list(state["lr"]), None
        self._set_rates()

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def _set_rates(self) -> None:
        factor = min(1.0, (self._completed_steps + 1) / max(1, self._plan.warmup_steps))
        self._rates = [peak * factor for peak in self._peaks]
        for group, rate in zip(self._groups, self._rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _require_rates(self) -> None:
        groups = self._groups
        if len(groups) != len(self._rates):
            raise InvalidArgument(
                f"the optimizers have {len(groups)} param_groups and had {len(self._rates)} when FCCS was made; make "
                "it after the last add_param_group()"
            )
        for number, (group, rate) in enumerate(zip(groups, self._rates, strict=True)):
            # A rate that is a tensor may be on a device; reading it would make the host wait.
            if not isinstance(group["lr"], Tensor) and group["lr"] != rate:
                raise InvalidArgument(
                    f"lr of param_group {number} is {group['lr']}, and FCCS had set {rate}: something else drives it, "
                    "too. Leave out the LR scheduler, or whatever sets lr: FCCS warms it up and keeps it"
                )

    def _require_whole(self, loader: Any) -> None:
        size = getattr(loader, "batch_size", None)
        if isinstance(size, int) and size != self._micro_batch:
            raise InvalidArgument(
                f"the loader's batch_size is {size}; it must be micro_batch, {self._micro_batch}: FCCS makes large "
                "batches of several"
            )
        sampler = getattr(loader, "sampler", None)
        if isinstance(size, int) and getattr(loader, "drop_last", None) is False and hasattr(sampler, "__len__"):
            rest = len(sampler) % size  # type: ignore[arg-type]
            if rest:
                raise InvalidArgument(
                    f"the loader's last batch has {rest} samples of {size}; give it drop_last=True, so that all "
                    "micro-batches count the same"
                )

    def _read(self, loader: Iterable[Any], skip: bool) -> Iterator[Any]:
        while True:
            for source in (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
                if hasattr(source, "set_epoch"):
                    source.set_epoch(self._epoch)  # type: ignore[union-attr]
            seen = self._epoch_samples // self._plan.quantum if skip else 0
            is_new = not self._epoch_samples
            for batch in itertools.islice(loader, seen, None):
                self._epoch_samples += self._plan.quantum
                yield batch
            if is_new and not self._epoch_samples:
                raise InvalidArgument("the loader gives no micro-batch; give one that can be iterated again and again")
            self._epoch, self._epoch_samples, skip = self._epoch + 1, 0, True


def _optimizers(given: Any) -> list[Any]:
    """Return the optimizers of an argument. Raises InvalidArgument."""
    found = list(given) if isinstance(given, list | tuple) else [given]
    for hit in found:
        if not all("lr" in group for group in getattr(hit, "param_groups", [{}])):
            raise InvalidArgument(
                f"optimizer is {quoted(hit)}; it must be an optimizer with an lr in its param_groups, or several"
            )
    if not found:
        raise InvalidArgument("optimizer is empty; give FCCS at least one optimizer")
    return found


def _peaks(lr: float | Sequence[float] | None, groups: list[dict[str, Any]]) -> list[float]:
    """Return the rate of each group after the warm-up. Raises InvalidArgument."""
    if lr is None:
        rates = [float(group["lr"]) for group in groups]
    elif isinstance(lr, list | tuple):
        rates = [real_number("lr", rate) for rate in lr]
        if len(rates) != len(groups):
            raise InvalidArgument(f"lr has {len(rates)} numbers for {len(groups)} param_groups; give one for each")
    else:
        rates = [real_number("lr", lr)] * len(groups)
    for rate in rates:
        if not 0 <= rate < float("inf"):
            raise InvalidArgument(f"lr is {rate}; it must be >= 0 and finite")
    return rates
