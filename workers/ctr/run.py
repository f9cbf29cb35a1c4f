"""One training run of a click model, from its first step or its last snapshot to the report."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from rich.console import Console

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.snapshots.snapshot import PendingSnapshot
from geartrain.ams.observe import failpoints
from geartrain.ams.storage.snapshot.folder import Snapshot
from geartrain.ams.storage.snapshot.store import place
from geartrain.ams.values.errors import ConfigError, NonFinite
from geartrain.ams.values.text import counted
from geartrain.workers.atomic import write_json
from geartrain.workers.ctr.designs import Design, layout_of
from geartrain.workers.ctr.loop import CtrTrainer
from geartrain.workers.ctr.metrics import draw_calibration, measured
from geartrain.workers.ctr.options import CtrOptions
from geartrain.workers.ctr.samples.click_samples import ClickSamples, split
from geartrain.workers.ctr.samples.sources import found_again
from geartrain.workers.ctr.state import CtrState
from geartrain.workers.job.folder import Run, put_aside, read_run, write_run
from geartrain.workers.job.live import LiveLine
from geartrain.workers.job.options import JobResult
from geartrain.workers.job.report import diverged, versions
from geartrain.workers.job.snapshots import LOST, GoBack, JobSnapshots, Loss, Moment, stopped_line
from geartrain.workers.job.state import Progress
from geartrain.workers.loggers.protocol import Loggers
from geartrain.workers.loggers.registry import open_loggers


class CtrRun:
    """The pieces of one run, put together."""

    def __init__(
        self,
        options: CtrOptions,
        source: str,
        samples: ClickSamples,
        cluster: Cluster,
        job: str,
        saved: tuple[Snapshot, CtrState] | None,
        console: Console,
        loss: Loss | None = None,
    ) -> None:
        """``saved`` is what it goes on from, its rows restored; ``loss`` is what made it go back, if that was it."""
        self._options = options
        self._cluster = cluster
        self._job = job
        self._saved = saved
        self._console = console
        self._loss = loss
        recipe = options.recipe if saved is None else saved[1].recipe
        design = Design(recipe, layout_of(samples))
        self._data: dict[str, Any] = {"source": found_again(source), **design.layout.to_json()}
        self._train, self._test = split(
            samples,
            recipe.split,
            recipe.seed,
            history=recipe.history,
            fresh=recipe.fresh,
            validation=recipe.validation,
        )
        progress = Progress(step=0, stage_start=0, stage_steps=recipe.steps, table=job)
        if saved is not None:
            progress = self._progress_of(saved[1].progress)
        torch.manual_seed(recipe.seed)
        network = design.network()
        fields = design.fields(cluster, job, reuse=saved is not None)
        self._trainer = CtrTrainer(design, network, fields, self._train, progress)
        self._root = self._new_root() if saved is None else read_run(options.out).snapshots
        minutes = options.snapshot_minutes
        self._snapshots: JobSnapshots[CtrState] = JobSnapshots(
            self,
            self._root,
            keep=options.keep_snapshots,
            increments=options.increments,
            every_seconds=None if minutes is None else 60 * minutes,
            say=self._say,
            watch=cluster.watch_leaves(job),
        )

    def _new_root(self) -> str:
        return str(place(self._options.snapshots or self._options.out / "snapshots"))

    def _progress_of(self, progress: Progress) -> Progress:
        steps = self._options.resume_steps
        if not progress.is_complete:
            if steps not in (None, progress.stage_steps):
                raise ConfigError(
                    f"--steps {steps} is for a run that has ended; {self._options.out} stands at step {progress.step} "
                    f"of {progress.stage_start + progress.stage_steps}. Leave --steps out, and give it after"
                )
            return progress
        run = read_run(self._options.out)
        if run.stage_end > progress.step:  # another stage had begun, and saved nothing yet
            return replace(progress, stage_start=progress.step, stage_steps=run.stage_end - progress.step)
        if self._loss is not None or not run.ended:
            return progress  # only the report is left to do
        return replace(progress, stage_start=progress.step, stage_steps=steps or progress.stage_steps)

    def begin_snapshot(self, root: str, name: str, *, parent: str | None, state: CtrState) -> PendingSnapshot:
        """See ``SnapshotTaker``."""
        tables = [spec.name for part in self._trainer.fields.trained for spec in part.row_keeper.specs()]
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
        """Start or go on, train, and finish. Raises GoBack if a role is lost and there is a snapshot to go back to."""
        options, trainer = self._options, self._trainer
        if self._saved is None:
            if options.overwrite and (aside := put_aside(options.out)) is not None:
                self._say(f"The run that was in {options.out} is now in {aside}")
            write_run(options.out, Run(job=self._job, snapshots=self._root, launch=None, began=time.time()))
        else:
            trainer.restore(self._saved[1])
        self._note_stage(ended=False)
        step = None if self._saved is None else trainer.progress.step
        events = open_loggers(options.loggers, options.out, self._job, step)
        try:
            self._begin()
            with LiveLine(self._console, trainer.progress.stage_start + trainer.progress.stage_steps) as line:
                finished = trainer.run(
                    stop=stop,
                    due=lambda: self._snapshots.is_due,
                    save=partial(self._save, events),
                    line=line,
                    events=events,
                )
            self._save(events)
            self._snapshots.settle()
            report = None
            if finished:
                report = self._report(events)
                self._note_stage(ended=True)
            else:
                self._say(self._stopped_line())
            self._drop_rows()
            return JobResult(finished, report, trainer.progress.step)
        except LOST as exc:
            if stop() and self._snapshots.last is not None:
                self._say(self._stopped_line())
                return JobResult(False, None, trainer.progress.step)
            what, _, _ = str(exc).partition("; ")  # without the remedy: this run has its own
            self._say(f"Lost a part of the cluster at step {trainer.progress.step}: {what}")
            if self._snapshots.last is not None:
                raise GoBack(Loss(trainer.progress.step, time.time())) from exc
            raise
        except NonFinite as exc:
            step, last = trainer.progress.step, self._snapshots.last
            kept = "" if last is None else f"its newest snapshot is that of step {last.progress.step}"
            rates = {"--lr": trainer.recipe.lr, "--row-lr": trainer.recipe.row_lr}
            raise diverged(exc, step, kept, rates) from exc
        finally:
            events.close()

    def _begin(self) -> None:
        trainer = self._trainer
        if self._saved is None:
            what = "of the training part are kept to choose by" if trainer.recipe.validation else "are held out"
            counts = f"{counted(len(self._train), 'sample')}; {len(self._test):,} {what}"
            self._say(f"Training {trainer.recipe.model} on {counts} ({trainer.recipe.split})")
            self._snapshots.require(self._state())
            return
        snapshot, state = self._saved
        self._snapshots.last = Moment(state.progress, time.monotonic())
        lost = ""
        if self._loss is not None:
            steps = counted(self._loss.step - state.progress.step, "step")
            lost = f": {steps} ({self._loss.unix_seconds - snapshot.manifest.created:.0f} s) were lost"
        self._say(f"Going on at step {trainer.progress.step}{lost}")

    def _state(self) -> CtrState:
        return replace(self._trainer.state(self._data), scheduler=self._options.scheduler)

    def _stopped_line(self) -> str:
        return stopped_line(self._trainer.progress.step, self._snapshots.last, self._options.go_on())

    def _save(self, events: Loggers) -> None:
        events.flush()  # what is logged of the steps that the snapshot holds stays as surely as it
        if self._snapshots.last is None or self._snapshots.last.progress != self._trainer.progress:
            failpoints.reach("job.save.before")
            self._snapshots.begin(self._state())
            failpoints.reach("job.save.after")

    def _note_stage(self, *, ended: bool) -> None:
        progress = self._trainer.progress
        end = progress.stage_start + progress.stage_steps
        run = replace(read_run(self._options.out), stage_end=end, ended=ended, scheduler=self._options.scheduler)
        write_run(self._options.out, run)

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
        what = "Validation" if recipe.validation else "Held out"
        self._say(
            f"{what}: AUC {found['auc']:.4f}, log loss {found['log_loss']:.4f} "
            f"({found['log_loss_of_the_mean']:.4f} for the mean click rate), {counted(found['samples'], 'sample')}"
        )
        self._say(f"Trained in {trainer.train_seconds:.0f} s. Snapshots, report and calibration.png are in {out}")
        return report

    def _drop_rows(self) -> None:
        """Leave the memory of the shards to others once a snapshot has the rows."""
        last = self._snapshots.last
        if last is None or last.progress != self._trainer.progress:
            return
        try:
            for part in self._trainer.fields.trained:
                for spec in part.row_keeper.specs():
                    self._cluster.drop_table(spec.name)
        except LOST as exc:
            self._say(f"Tables of {self._job!r} may still be on the cluster: {exc}")

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)
