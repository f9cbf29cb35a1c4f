"""``geartrain worker ctr``: samples in, a run folder with snapshots and a report out."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from geartrain.ams.client.cluster import Cluster, connect, local
from geartrain.ams.client.snapshot import PendingSnapshot
from geartrain.ams.storage.snapshot.store import place
from geartrain.ams.values.errors import ConfigError
from geartrain.ams.values.text import counted, quoted
from geartrain.workers.atomic import write_json
from geartrain.workers.ctr.loop import CtrTrainer
from geartrain.workers.ctr.metrics import draw_calibration, measured
from geartrain.workers.ctr.movielens import find_movielens, read_movielens
from geartrain.workers.ctr.recipe import CtrRecipe, fields_of, network_of, with_weights
from geartrain.workers.ctr.samples import ClickSamples, split
from geartrain.workers.ctr.state import CtrState, newest_state
from geartrain.workers.job.folder import Run, put_aside, read_run, require_new_run, sole_trainer, write_run
from geartrain.workers.job.interruption import interruption
from geartrain.workers.job.live import LiveLine
from geartrain.workers.job.options import JobResult
from geartrain.workers.job.report import versions
from geartrain.workers.job.snapshots import JobSnapshots
from geartrain.workers.job.state import Progress
from geartrain.workers.loggers.protocol import Loggers
from geartrain.workers.loggers.registry import open_loggers, require_loggers

MOVIELENS = "movielens"


@dataclass(frozen=True, kw_only=True)
class CtrOptions:
    """Where and how a training of a click model runs."""

    out: Path
    """Run folder."""
    recipe: CtrRecipe
    data: str | None = None
    """``movielens``, or a folder with its files; None: that of the resumed run."""
    cache: Path = Path(".cache")
    """Where what is downloaded is kept."""
    resume: bool = False
    """Go on with the run in ``out``: to the end of its stage, or if that was reached, through another one."""
    resume_steps: int | None = None
    """Steps of that other stage; as many as before by default."""
    overwrite: bool = False
    """Start over where ``out`` holds a run already."""
    keep_snapshots: int = 2
    scheduler: str | None = None
    """host:port of a cluster's scheduler; by default one shard is embedded in this process."""
    loggers: tuple[str, ...] = ("tensorboard",)

    def __post_init__(self) -> None:
        require_loggers(self.loggers)


def train_clicks(options: CtrOptions, console: Console) -> JobResult:
    """Train, evaluate on what is held out, and save. Raises ConfigError before anything is written."""
    if not options.resume and not options.overwrite:
        require_new_run(options.out)
    saved = newest_state(read_run(options.out).snapshots) if options.resume else None
    with ExitStack() as stack:
        stack.enter_context(sole_trainer(options.out))
        source = options.data if saved is None else saved[1].data["source"]
        recipe = options.recipe if saved is None else saved[1].recipe
        samples = load_samples(source, options.cache, console)
        job = f"{options.out.name or 'run'}-{secrets.randbits(32):08x}" if saved is None else saved[1].progress.table
        cluster = stack.enter_context(_opened(options, job))
        if saved is not None:
            cluster.restore(saved[0].path, replace=True)
        stop = stack.enter_context(interruption())
        state = None if saved is None else saved[1]
        return _CtrRun(options, recipe, str(source), samples, cluster, job, state, console).execute(stop)


def load_samples(source: str | None, cache: Path, console: Console) -> ClickSamples:
    """The samples that ``--data`` names. Raises ConfigError."""
    if source is None:
        raise ConfigError(f"which samples? Give --data {MOVIELENS}, or a folder with the files of MovieLens-100K")
    if source == MOVIELENS:
        return read_movielens(find_movielens(cache, lambda line: console.print(line, highlight=False)))
    if not Path(source).is_dir():
        raise ConfigError(f"--data is {quoted(source)}; it must be {MOVIELENS}, or a folder with its files")
    return read_movielens(Path(source))


def _opened(options: CtrOptions, job: str) -> Cluster:
    if options.scheduler is None:
        return local(num_shards=1)
    return connect(options.scheduler, stream=f"{job}/rank0")


class _CtrRun:
    """One run, from its first step or its last snapshot to the report."""

    def __init__(
        self,
        options: CtrOptions,
        recipe: CtrRecipe,
        source: str,
        samples: ClickSamples,
        cluster: Cluster,
        job: str,
        saved: CtrState | None,
        console: Console,
    ) -> None:
        self._options = options
        self._cluster = cluster
        self._job = job
        self._saved = saved
        self._console = console
        samples = with_weights(samples, recipe)
        names = list(samples.fields)
        path = source if source == MOVIELENS else str(Path(source).resolve())
        self._data: dict[str, Any] = {"source": path, "fields": names}
        self._train, self._test = split(samples, recipe.split, recipe.seed)
        progress = Progress(step=0, stage_start=0, stage_steps=recipe.steps, table=job)
        if saved is not None:
            progress = self._progress_of(saved.progress)
        torch.manual_seed(recipe.seed)
        network = network_of(recipe, names)
        fields = fields_of(recipe, names, cluster, job, reuse=saved is not None)
        self._trainer = CtrTrainer(recipe, network, fields, self._train, progress)
        root = str(place(options.out / "snapshots")) if saved is None else read_run(options.out).snapshots
        self._root = root
        self._snapshots: JobSnapshots[CtrState] = JobSnapshots(self, root, keep=options.keep_snapshots, say=self._say)

    def _progress_of(self, progress: Progress) -> Progress:
        steps = self._options.resume_steps
        if not progress.is_complete:
            if steps not in (None, progress.stage_steps):
                raise ConfigError(
                    f"--steps {steps} is for a run that has ended; {self._options.out} stands at step {progress.step} "
                    f"of {progress.stage_start + progress.stage_steps}. Leave --steps out, and give it after"
                )
            return progress
        if not read_run(self._options.out).ended:
            return progress  # only the report is left to do
        return replace(progress, stage_start=progress.step, stage_steps=steps or progress.stage_steps)

    def begin_snapshot(self, root: str, name: str, *, parent: str | None, state: CtrState) -> PendingSnapshot:
        """See ``SnapshotTaker``."""
        tables = [spec.name for part in self._trainer.fields for spec in part.row_keeper.specs()]
        return self._cluster.snapshot(
            root,
            name,
            parent=parent,
            step=state.progress.step,
            values=state.values(),
            files=state.files(),
            tables=tables,
            graphs=False,
        )

    def execute(self, stop: Callable[[], bool]) -> JobResult:
        """Start or go on, train, and finish."""
        options, trainer = self._options, self._trainer
        if self._saved is None:
            if options.overwrite and (aside := put_aside(options.out)) is not None:
                self._say(f"The run that was in {options.out} is now in {aside}")
            write_run(options.out, Run(job=self._job, snapshots=self._root, launch=None, began=time.time()))
        else:
            trainer.restore(self._saved)
        self._note_stage(ended=False)
        step = None if self._saved is None else trainer.progress.step
        events = open_loggers(options.loggers, options.out, self._job, step)
        try:
            if self._saved is None:
                counts = f"{counted(len(self._train), 'sample')}; {len(self._test):,} are held out"
                self._say(f"Training {trainer.recipe.model} on {counts} ({trainer.recipe.split})")
                self._snapshots.require(trainer.state(self._data))
            else:
                self._say(f"Going on at step {trainer.progress.step}")
            with LiveLine(self._console, trainer.progress.stage_start + trainer.progress.stage_steps) as line:
                finished = trainer.run(stop, partial(self._save, events), line, events)
            self._save(events)
            self._snapshots.settle()
            if not finished:
                self._drop_rows()
                where = f" --scheduler {options.scheduler}" if options.scheduler else ""
                self._say(
                    f"Stopped at step {trainer.progress.step} and saved. Go on with: geartrain worker ctr --resume "
                    f"{options.out}{where}"
                )
                return JobResult(False, None, trainer.progress.step)
            report = self._report(events)
            self._note_stage(ended=True)
            self._drop_rows()
            return JobResult(True, report, trainer.progress.step)
        finally:
            events.close()

    def _save(self, events: Loggers) -> None:
        events.flush()  # what is logged of the steps that the snapshot holds stays as surely as it
        if self._snapshots.last is None or self._snapshots.last.progress != self._trainer.progress:
            self._snapshots.begin(self._trainer.state(self._data))

    def _note_stage(self, *, ended: bool) -> None:
        progress = self._trainer.progress
        end = progress.stage_start + progress.stage_steps
        write_run(self._options.out, replace(read_run(self._options.out), stage_end=end, ended=ended))

    def _report(self, events: Loggers) -> dict[str, Any]:
        trainer, out, started = self._trainer, self._options.out, time.perf_counter()
        found = measured(trainer.predict(self._test), self._test.clicks)
        numbers = {name: found[name] for name in ("auc", "log_loss")}
        events.scalars("held_out", numbers, trainer.progress.step)
        recipe = trainer.recipe
        title = f"{recipe.model}, {recipe.split} split: AUC {found['auc']:.4f}, log loss {found['log_loss']:.4f}"
        draw_calibration(out / "calibration.png", found["calibration"], title)
        report = {
            "held_out": found,
            "recipe": recipe.to_json(),
            "steps": trainer.progress.step,
            "train_seconds": trainer.train_seconds,
            "evaluation_seconds": time.perf_counter() - started,
            "versions": versions(torch.device("cpu"), bfloat16=False),
        }
        write_json(out / "report.json", report)
        self._say(
            f"Held out: AUC {found['auc']:.4f}, log loss {found['log_loss']:.4f} "
            f"({found['log_loss_of_the_mean']:.4f} for the mean click rate), {counted(found['samples'], 'sample')}"
        )
        self._say(f"Trained in {trainer.train_seconds:.0f} s. Snapshots, report and calibration.png are in {out}")
        return report

    def _drop_rows(self) -> None:
        """Leave the memory of the shards to others once a snapshot has the rows."""
        last = self._snapshots.last
        if last is not None and last.progress == self._trainer.progress:
            for part in self._trainer.fields:
                for spec in part.row_keeper.specs():
                    self._cluster.drop_table(spec.name)

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)
