"""Base of the trainers: the part of a job that differs by kind; :class:`geartrain.workers.job.run.TrainingRun` has the
rest.

Everything random is a function of (seed, step), so that a resumed run continues as if it had never stopped.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import PIL
import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.snapshots.snapshot import PendingSnapshot
from geartrain.ams.observe import failpoints, traces
from geartrain.ams.storage.snapshot.folder import Snapshot
from geartrain.ams.values.rpc import version
from geartrain.ams.values.text import counted
from geartrain.bridge.rows.optimizer import RowOptimizer
from geartrain.bridge.rows.serialization import random_state, set_random_state, state_from_bytes, state_to_bytes
from geartrain.workers.data.streams import JointOrder
from geartrain.workers.job.metrics import COUNTERS, RecentSteps, StepTimer
from geartrain.workers.job.options import JobOptions
from geartrain.workers.job.ranks import JobRanks
from geartrain.workers.job.state import JobProgress, JobState
from geartrain.workers.loggers.protocol import Loggers

SHOW_EVERY = 10
"""Steps between two readings of the loss, which on an accelerator synchronize the host."""


@dataclass
class Phases:
    """Seconds of each part of a run, in the order in which they first ended."""

    seconds: dict[str, float] = field(default_factory=dict)
    _running: list[tuple[str, float]] = field(default_factory=list)
    """Name of each entered block, with its start time less the seconds known then; innermost last."""

    @contextmanager
    def measured(self, name: str) -> Iterator[None]:
        """Add the time of the block to ``name``, without that of nested phases: their sum is the whole."""
        self._running.append((name, time.perf_counter() - sum(self.seconds.values())))
        try:
            yield
        finally:
            self._add(self.seconds, *self._running.pop())

    def so_far(self) -> dict[str, float]:
        """Return the seconds, with those of the blocks in progress."""
        found = {**self.seconds}
        for name, started in reversed(self._running):
            self._add(found, name, started)
        return found

    @staticmethod
    def _add(seconds: dict[str, float], name: str, started: float) -> None:
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started - sum(seconds.values())


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """Context of a trainer: one attempt at a job, from its beginning or a snapshot."""

    options: JobOptions
    """Options with the recipe: of a resumed run that of its snapshot."""
    progress: JobProgress
    snapshot: Snapshot | None = None
    """Snapshot whose rows are in the cluster again."""
    state: JobState | None = None
    """State of ``snapshot``."""
    is_kept: bool = False
    """Whether the scheduler keeps rows and cursors, which may be of later steps."""
    cluster: Cluster | None
    """Cluster of the rows; None: the ranks have them."""
    ranks: JobRanks
    console: Console

    def print_line(self, line: str | Text) -> None:
        """Print a line for the user."""
        self.console.print(line, highlight=False, soft_wrap=True)


class Trainer:
    """Trains a network and the rows before or behind it on samples in the order of (seed, step)."""

    job: ClassVar[str]
    """Name of the job in ``geartrain worker``."""
    recipe_class: ClassVar[type]
    in_one_process: ClassVar[bool] = True
    """Whether it can only be trained by one process."""
    steps_in_backward: bool = False
    """Whether rows are written at the end of the backward pass, while the ranks' gradients travel."""
    cluster: Cluster | None = None
    """Cluster of its rows; None: the ranks have them, or its owner needs no snapshots of it."""
    is_restored: bool = False
    """Whether the scheduler restores the job, at any moment."""

    def __init__(
        self,
        recipe: Any,
        num_samples: int,
        optimizer: torch.optim.Optimizer,
        rows: RowOptimizer,
        progress: JobProgress,
        *,
        ranks: JobRanks | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.recipe = recipe
        self.num_samples = num_samples
        self.steps_per_epoch = num_samples / recipe.batch_size
        if not progress.stage_steps:
            progress = replace(progress, stage_steps=math.ceil(recipe.epochs * self.steps_per_epoch))
        self.progress = progress
        self.wants_snapshot = False
        """Set by :meth:`between`: a snapshot of the present model is wanted."""
        self.ranks = ranks or JobRanks()
        self.device = device or torch.device("cpu")
        self.phases = Phases()
        self._timer = StepTimer()
        self.samples_per_second = 0.0
        self.metric: tuple[str, float | None] = "", None
        """Name and newest value of the validation metric; empty: there was none yet."""
        self.metrics: Mapping[str, float] = {}
        """All metrics of that validation, by name."""
        self.events = Loggers()
        self.order = JointOrder(num_samples, recipe.batch_size, recipe.seed)
        self.optimizer = optimizer
        self.rows = rows
        self._row_lr = rows.param_groups[0]["lr"]

    @staticmethod
    def require(options: JobOptions) -> None:
        """Raise ConfigError, before anything is written, for options that are evidently wrong."""

    @staticmethod
    def load(options: JobOptions, state: JobState | None, console: Console) -> Any:
        """Return the training samples, from which, after an :class:`Attempt`, the job's trainer is made."""
        raise NotImplementedError

    @classmethod
    def usual_recipe(cls, data: str | None, stated: Mapping[str, Any]) -> dict[str, Any]:
        """Return the default recipe, given the ``stated`` keys: keys that differ from its class's defaults."""
        del data, stated
        return {}

    def epochs(self, steps: int) -> str:
        """Return the number of passes over the samples in so many steps, in words."""
        batches = self.batches_before(steps)
        times = (
            f"{batches / self.steps_per_epoch:.1f} epochs, each once through the {counted(self.num_samples, 'sample')}"
        )
        size = counted(self.recipe.batch_size, "sample") + " and more" * (batches > steps)
        return f"{counted(steps, 'step')} of {size}: {times}"

    @property
    def train_seconds(self) -> float:
        """Time of all parts so far."""
        return sum(self.phases.seconds.values())

    @property
    def all_take_part(self) -> bool:
        """Whether every rank must take part in reading or snapshotting rows; else the first one does so alone."""
        return False

    def batches_before(self, step: int) -> int:
        """Return the batches of ``recipe.batch_size`` in the steps before ``step``."""
        return step

    def has_samples(self) -> bool:
        """Return whether the next step's samples are there, after a wait of up to half a second. If no more come, end
        the stage by its ``progress``.
        """
        return True

    def loss(self, step: int) -> Tensor:
        """Return the loss of the batch of ``step``."""
        raise NotImplementedError

    def modules(self) -> dict[str, Any]:
        """Return the objects with a ``state_dict``, by their names in snapshots."""
        raise NotImplementedError

    def data(self) -> dict[str, Any]:
        """Return JSON for snapshots that identifies the samples."""
        return {}

    def files(self) -> dict[str, bytes]:
        """Return files for snapshots in formats of their own."""
        return {}

    def tables(self) -> list[str]:
        """Names of the tables of its rows."""
        raise NotImplementedError

    def state(self, options: JobOptions) -> JobState:
        """Return everything but the rows, between two steps. Every rank calls this; the first one's is complete."""
        random = self.ranks.gather_bytes(state_to_bytes(random_state(self.device)))
        kept = {**self.modules(), "optimizer": self.optimizer}
        return JobState(
            job=self.job,
            recipe=self.recipe,
            progress=self.progress,
            cursor=self.order.cursor(self.batches_before(self.progress.step)),
            data=self.data(),
            tensors={
                **{name: module.state_dict() for name, module in kept.items()},
                "random": [state_from_bytes(of_rank) for of_rank in random],
            },
            files=self.files(),
            scheduler=options.scheduler,
            phases=self.phases.so_far(),
        )

    def restore(self, state: JobState) -> None:
        """Restore a state whose rows are in place already.

        Ranks that did not exist when it was taken start with random numbers of their own. Raises ConfigError if the
        state is that of other samples.
        """
        self.order.require(state.cursor, self.batches_before(self.progress.step))
        self.phases.seconds = {**state.phases}
        self.optimizer.load_state_dict(state.tensors["optimizer"])
        for name, module in self.modules().items():
            if name in state.tensors:
                module.load_state_dict(state.tensors[name])
        random = state.tensors["random"]
        if self.ranks.rank < len(random):
            set_random_state(random[self.ranks.rank], self.device)
        else:
            mixed = np.random.SeedSequence([self.recipe.seed, self.progress.step, self.ranks.rank])
            torch.manual_seed(int(mixed.generate_state(1, np.uint64)[0]) >> 1)

    def start_snapshot(self, root: str, name: str, *, parent: str | None, state: JobState) -> PendingSnapshot:
        """Freeze the rows and ``state`` as the snapshot ``root``/``name``; with ``parent``, rows written since."""
        assert self.cluster is not None
        return self.cluster.snapshot(
            root,
            name,
            parent=parent,
            step=state.progress.step,
            values=state.values(),
            files=state.all_files(),
            tables=self.tables(),
            graphs=False,  # a head's own graph is among the files
            when_frozen=self.require_alone,
        )

    def start(self, stop: Callable[[], bool]) -> None:
        """Prepare the first step of a new run; slow parts end when ``stop`` returns True."""

    def begun(self) -> None:
        """Run once there is a snapshot of the start."""

    def between(self) -> None:
        """Run after every step but the last, before its snapshot; every rank calls it.

        It may set :attr:`wants_snapshot`, and end the stage by its ``progress``.
        """

    def trained(self) -> None:
        """Run once the stage has ended, in this process or, if only the report was missing, in an earlier one."""

    def saved(self) -> None:
        """Run once the last snapshot of this process is complete."""

    @staticmethod
    def is_kept(options: JobOptions, cluster: Cluster, job: str) -> bool:
        """Return whether the scheduler keeps rows and cursors of the job, so that a resumed run restores none."""
        del options, cluster, job
        return False

    def alone(self) -> AbstractContextManager[None]:
        """Let no other worker of the job train meanwhile, so that a snapshot begun here is one moment of all."""
        return nullcontext()

    def require_alone(self) -> None:
        """Raise an error if rows and state of a snapshot may differ, since others went on after :meth:`alone` began."""

    @property
    def has_others(self) -> bool:
        """Whether other workers have trained on the rows, and may do so again."""
        return False

    def keep_lease(self) -> None:
        """Keep this worker's share of the samples during another wait; let no other worker wait for its steps."""

    def goes_on_restored(self) -> bool:
        """Wait until the scheduler has restored the job, and be ready to :meth:`run` again; False: it does not."""
        return False

    def leave(self) -> None:
        """Release unread samples to the other workers."""

    def report(self) -> dict[str, Any] | None:
        """Test the trained model; return its entries in the report, beside the keys of every report.

        None on a rank that only takes part in the test.
        """
        return {}

    def conclude(self) -> str:
        """Return the line that ends a finished run, after "Trained in ... s"."""
        return "Snapshots and report"

    def diverged(self) -> str:
        """Return a sentence on what is left besides snapshots after the training met NaN."""
        return ""

    def rates(self) -> dict[str, float]:
        """Return the learning rates that a person may lower, by their keys."""
        return {"lr": self.recipe.lr}

    def run(
        self,
        *,
        stop: Callable[[], bool] = lambda: False,
        due: Callable[[], bool] = lambda: False,
        save: Callable[[], None] = lambda: None,
        show: Callable[[int, dict[str, float]], None] = lambda step, numbers: None,  # noqa: ARG005
    ) -> bool:
        """Train to the end of the stage; return False if ``stop`` ended it before.

        ``save`` runs on every rank, every ``recipe.snapshots.steps`` steps and after a step before which a rank was
        ``due``.
        """
        before, seconds = self.progress.step, self.train_seconds
        with self.phases.measured("steps"):
            finished = self._steps(stop, due, save, show)
        elapsed = self.train_seconds - seconds
        batches = self.batches_before(self.progress.step) - self.batches_before(before)
        if batches:  # else it only looked for what a restore has left
            self.samples_per_second = batches * self.recipe.batch_size / max(elapsed, 1e-9)
        return finished

    def _steps(
        self,
        stop: Callable[[], bool],
        due: Callable[[], bool],
        save: Callable[[], None],
        show: Callable[[int, dict[str, float]], None],
    ) -> bool:
        recent, first = RecentSteps(self.recipe.batch_size), self.progress.step
        saved = first
        while not self.progress.is_complete:
            is_told, is_due = self.ranks.any_of(stop(), due())
            if is_told:
                return False
            if not self.has_samples():
                if is_due and saved < self.progress.step:  # with samples that arrive over time, do not wait for more
                    save()
                    saved = self.progress.step
                continue
            failpoints.reach("job.step.before")
            self._timer = StepTimer()
            with traces.span("step", step=self.progress.step):
                loss = self.step(self.progress.step)
            if loss is None:
                continue
            self._timer.ended("update")
            step = self.progress.step + 1
            before, batches = self.batches_before(step - 1), self.batches_before(step)
            COUNTERS.step_done(self._timer.seconds, (batches - before) * self.recipe.batch_size)
            self.progress = replace(self.progress, step=step)
            if step == first + 1:
                recent.rates(step, batches)  # start here: the first step of a process is slower
            if step % SHOW_EVERY == 0 or self.progress.is_complete:
                numbers = {
                    "loss": float(loss),
                    "epoch": batches / self.steps_per_epoch,
                    **recent.rates(step, batches),
                    "lr": self.optimizer.param_groups[0]["lr"],
                }
                show(step, numbers)
            if self.progress.is_complete:
                break
            self.between()
            if is_due or self.wants_snapshot or step % self.recipe.snapshots.steps == 0:
                save()
                saved = step
            self.wants_snapshot = False
        return True

    def step(self, step: int) -> Tensor | None:
        """Make one update; return the loss. None: the job was taken back, and the samples come again."""
        factor = self.recipe.rate_factor(*self.progress.part)
        self.optimizer.param_groups[0]["lr"] = self.recipe.lr * factor
        for group in self.rows.param_groups:
            group["lr"] = self._row_lr * factor
        loss = self.backward(step)
        self._timer.ended("backward")
        self.update()
        return loss

    def backward(self, step: int) -> Tensor:
        """Make the gradients of ``step``; return the loss."""
        loss = self.loss(step)
        self.optimizer.zero_grad()
        self.rows.zero_grad()
        if self.steps_in_backward:
            self.rows.step_in_backward(loss)
        self._timer.ended("forward")
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def update(self) -> None:
        """Apply the gradients, once."""
        self.optimizer.step()
        if not self.steps_in_backward:
            self.rows.step()


def versions(device: torch.device, precision: str = "float32") -> dict[str, str]:
    """Return the versions and settings on which figures depend."""
    return {
        "geartrain": version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "pillow": PIL.__version__,
        "device": str(device),
        "threads": str(torch.get_num_threads()),
        "precision": precision,
    }
