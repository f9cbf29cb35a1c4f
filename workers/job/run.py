"""One training run of any job, from its first step or its last snapshot to the report."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from rich.text import Text

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.observe import failpoints, traces
from geartrain.ams.storage.snapshot.store import place
from geartrain.ams.values.errors import (
    GeartrainError,
    NonFinite,
    SnapshotError,
    SnapshotFailed,
    TableNotFound,
    TrainingDiverged,
)
from geartrain.ams.values.scheduler_messages import JobCondition, JobReport
from geartrain.ams.values.text import counted, lasting
from geartrain.workers.atomic import write_json
from geartrain.workers.job.folder import (
    Run,
    has_run,
    has_snapshot,
    move_aside,
    read_run,
    write_run,
)
from geartrain.workers.job.interruption import Interruption, Stopped
from geartrain.workers.job.keys import as_json, write_recipe
from geartrain.workers.job.live import ProgressLine
from geartrain.workers.job.metrics import COUNTERS
from geartrain.workers.job.options import JobResult, SnapshotSettings
from geartrain.workers.job.snapshots import LOST, JobSnapshots, Loss, ResumeFromSnapshot, SnapshotMoment
from geartrain.workers.job.trainer import Attempt, Trainer, versions
from geartrain.workers.loggers.registry import open_loggers, require_libraries


class TrainingRun:
    """Trains with a :class:`Trainer`, and handles run folder, snapshots, numbers and report."""

    def __init__(
        self,
        attempt: Attempt,
        trainer: Trainer,
        *,
        launch: str | None = None,
        loss: Loss | None = None,
        seconds: dict[str, float] | None = None,
    ) -> None:
        """``launch`` names the launcher; ``loss`` is the loss that made the job go back, if any; ``seconds`` are those
        of earlier phases."""
        self._attempt = attempt
        self._options = options = attempt.options
        self._trainer = trainer
        self._launch = launch
        self._loss = loss
        self._seconds = seconds or {}
        self._takes_part = attempt.ranks.is_first or trainer.all_take_part
        settings: SnapshotSettings = trainer.recipe.snapshots
        COUNTERS.job = trainer.progress.table
        self._state: JobCondition = "training"
        self._numbers: dict[str, float] = {}
        """Newest displayed numbers."""
        cluster = attempt.cluster if self._is_first else None
        watch = None if cluster is None else cluster.report_job(trainer.progress.table, self._job_report)
        self._snapshots = JobSnapshots(
            trainer,
            str(place(options.snapshot_root)) if attempt.state is None else read_run(options.out).snapshots,
            is_first=self._is_first,
            keep=settings.keep,
            increments=settings.increments,
            every_seconds=None if settings.minutes is None else 60 * settings.minutes,
            say=attempt.print_line,
            watch=watch,
            on_wait=trainer.keep_lease,
        )

    def _job_report(self) -> JobReport:
        """Return the report for the scheduler, from another thread."""
        trainer, settings = self._trainer, self._trainer.recipe.snapshots
        progress, state = trainer.progress, self._state
        numbers, (metric, metric_value) = self._numbers, trainer.metric
        rate = numbers.get("steps_per_second", 0.0)
        pauses = [60 * settings.minutes] if settings.minutes is not None else []
        pauses += [settings.steps / rate] if rate else []
        # the first report comes before there are any
        snapshots: JobSnapshots | None = getattr(self, "_snapshots", None)
        return JobReport(
            state="saving" if state == "training" and snapshots is not None and snapshots.is_writing else state,
            step=progress.step,
            last_step=progress.last_step,
            steps_per_second=rate,
            loss=numbers.get("loss"),
            snapshot_every_seconds=min(pauses, default=0.0),
            lost_at_step=None if self._loss is None else self._loss.step,
            metric=metric,
            metric_value=metric_value,
            metrics={
                name.replace("_", " "): value for name, value in trainer.metrics.items() if name != metric.lower()
            },
            samples_per_second=numbers.get("samples_per_second", 0.0),
            pull_ms=numbers.get("pull_ms"),
            push_ms=numbers.get("push_ms"),
        )

    @property
    def _is_first(self) -> bool:
        return self._attempt.ranks.is_first

    def execute(self, stop: Interruption) -> JobResult:
        """Start or resume, train, and finish. Raises ResumeFromSnapshot if a role is lost and there is a snapshot."""
        trainer, ranks, say = self._trainer, self._attempt.ranks, self._attempt.print_line
        self._stop = stop
        stop.is_saving = lambda: self._snapshots.is_writing
        names = self._options.loggers if self._is_first else ()
        require_libraries(names)  # before another run is put aside for this one
        if self._is_first:
            if self._attempt.state is None:
                self._claim_folder()
            self._record_stage(ended=False)
        step = None if self._attempt.state is None else trainer.progress.step
        lost = (*LOST, TableNotFound) if trainer.is_restored else LOST
        trainer.events = open_loggers(names, self._options.out, trainer.progress.table, step)
        try:
            self._start(stop)
            if self._is_first:
                self._record_stage(over=False, launch=self._launch, began=time.time())
            stop.saved = self._saved
            finished, report = self._trained_to_the_end(stop, lost)
            stop.doing = "waited for the other ranks"
            if report is not None:
                trainer.events.flush()  # reports a log that cannot be written before
                self._record_stage(ended=True)
            self._state = "ended" if finished else "stopped"
            if not finished:
                say(self._stopped_line())
            ranks.barrier("end of the training")  # the other ranks keep their clients until the first is done
            if self._is_first and not finished and trainer.has_others:
                say("The rows stay in the cluster until the run is resumed and ends: other workers may train on them")
            elif self._is_first:
                self._drop_rows()
            return JobResult(finished, report, trainer.progress.step)
        except lost as exc:
            if stop() and self._snapshots.last is not None:
                self._state = "stopped"
                say(self._stopped_line())
                return JobResult(False, None, trainer.progress.step)
            self._print_lost_role(exc)
            if self._snapshots.last is not None:
                self._state = "recovering"
                raise ResumeFromSnapshot(Loss(trainer.progress.step, time.time())) from exc
            self._state = "failed"
            raise
        except ResumeFromSnapshot:
            raise
        except BaseException as exc:
            if isinstance(exc, Exception):  # not where a person wants to stop at once
                with suppress(GeartrainError):
                    trainer.leave()  # else other workers wait until the lease ends
            self._state = "stopped" if isinstance(exc, KeyboardInterrupt) else "failed"
            raise
        finally:
            trainer.events.close()
            said = stop.saved()
            stop.saved, stop.is_saving = (lambda: said), (lambda: False)  # the model is freed with this object

    def _trained_to_the_end(
        self, stop: Interruption, lost: tuple[type[Exception], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Train, save and test; return whether the run has finished, and its report. All of it is done again where the
        scheduler restores the job meanwhile.
        """
        for tries_left in reversed(range(self._options.max_recoveries + 1)):
            try:
                return self._trained_once(stop)
            except lost as exc:
                if stop() or not tries_left:
                    raise
                stop.doing = "waited until the scheduler has restored the job"
                if not self._trainer.goes_on_restored():
                    raise
                self._print_lost_role(exc)
                if self._is_first:
                    self._record_stage(over=False)
        raise AssertionError("the last try has returned or raised")

    def _trained_once(self, stop: Interruption) -> tuple[bool, dict[str, Any] | None]:
        trainer = self._trainer
        try:
            stop.doing = "did a step"
            finished = self._train(stop)
            if finished:
                stop.doing = "looked at what it had trained"
                if self._is_first:  # it may have ended early, and must not count as a further stage
                    self._record_stage(ended=False, over=True)
                trainer.trained()
        except NonFinite as exc:
            raise self._diverged(exc) from exc
        self._save_last(finished=finished)
        trainer.leave()
        if not finished:
            return False, None
        try:
            with stop.at_once("tested the model"):
                failpoints.reach("job.report.before")
                return True, self._report() if self._takes_part else None
        except Stopped:
            return False, None

    def _print_lost_role(self, exc: BaseException) -> None:
        what, _, _ = str(exc).partition("; ")  # without the remedy: this job has its own
        self._attempt.print_line(f"Lost a part of the cluster at step {self._trainer.progress.step}: {what}")

    def _claim_folder(self) -> None:
        options, out = self._options, self._options.out
        root = str(place(options.snapshot_root))
        if options.overwrite and (aside := move_aside(out)) is not None:
            self._attempt.print_line(f"The run that was in {out} is now in {aside}")
        self._drop_leftovers()
        out.mkdir(parents=True, exist_ok=True)
        job = self._trainer.progress.table
        write_run(out, Run(job=job, snapshots=root, launch=self._launch, began=time.time()))

    def _drop_leftovers(self) -> None:
        """Drop the tables of a run of this folder that died before its first snapshot."""
        cluster, out = self._attempt.cluster, self._options.out
        if cluster is None or not self._options.continues or not has_run(out):
            return
        died = read_run(out)
        if not has_snapshot(died):
            drop_tables(cluster, died.job)

    def _record_stage(self, **changed: Any) -> None:
        progress, out = self._trainer.progress, self._options.out
        end = progress.stage_start + progress.stage_steps
        write_run(out, replace(read_run(out), stage_end=end, scheduler=self._options.scheduler, **changed))

    def _start(self, stop: Callable[[], bool]) -> None:
        trainer, state = self._trainer, self._attempt.state
        self._stop.doing = "prepared its first step" if state is None else "went back to its snapshot"
        if state is None:
            trainer.start(stop)
            self._attempt.print_line(trainer.epochs(trainer.progress.stage_steps))
            if self._is_first:
                write_recipe(self._options.out, trainer.recipe)
            now = trainer.state(self._options)
            if self._takes_part:
                try:
                    self._snapshots.require(now)  # a snapshot to go back to
                except SnapshotError as exc:
                    raise SnapshotFailed(
                        f"a training begins with a snapshot, and there is none: {exc}. Snapshots are written by the "
                        "shards: give a folder or URL that they and this worker see alike (--snapshots)"
                    ) from exc
                trainer.begun()
            return
        trainer.restore(state)
        if self._is_first:
            write_recipe(self._options.out, trainer.recipe)
        self._snapshots.last = SnapshotMoment(state.progress, time.monotonic())
        step, lost = trainer.progress.step, ""
        if self._loss is not None and self._attempt.snapshot is not None:
            seconds = self._loss.unix_seconds - self._attempt.snapshot.manifest.created
            lost = f": {counted(self._loss.step - step, 'step')} ({seconds:.0f} s) were lost"
        self._attempt.print_line(f"Going on at step {step}{lost}")

    def _train(self, stop: Callable[[], bool]) -> bool:
        """Train to the end of the stage; return False if it was stopped before."""
        trainer = self._trainer
        progress, console = trainer.progress, self._attempt.console
        with ProgressLine(console, progress.step, progress.last_step, is_shown=self._is_first) as line:

            def show(step: int, numbers: dict[str, float]) -> None:
                self._numbers, COUNTERS.loss, COUNTERS.figures = numbers, numbers["loss"], trainer.metrics
                trainer.events.scalars("train", numbers, step)
                line.show(step, numbers)

            return trainer.run(
                stop=stop, due=lambda: self._is_first and self._snapshots.is_due, save=self._save, show=show
            )

    def _save(self, *, required: bool = False) -> None:
        """Begin a snapshot. Of a ``required`` one return once it is complete, or raise its error."""
        self._snapshots.wait()
        with self._trainer.alone():
            state = self._trainer.state(self._options)
            if not self._takes_part:
                return
            self._trainer.events.flush()  # the log of the snapshot's steps must be as durable as the snapshot
            failpoints.reach("job.save.before")
            with traces.span("snapshot", step=state.progress.step):
                self._snapshots.start(state, is_required=required)
            failpoints.reach("job.save.after")
        if required:
            self._snapshots.confirm(state)

    def _save_last(self, *, finished: bool) -> None:
        """Save the present state, and write the model of that step.

        If the step cannot be saved, a ``finished`` training has not ended: raises SnapshotFailed on every rank.
        """
        step = self._trainer.progress.step
        failure: SnapshotFailed | None = None
        try:
            try:
                self._save(required=True)
            except SnapshotError:
                if not self._trainer.is_restored:
                    raise
                self._save(required=True)  # one of the scheduler has ended it
        except SnapshotError as exc:
            failure = SnapshotFailed(f"step {step} is not saved: {exc}; {self._saved()}")
        if finished:
            self._attempt.ranks.raise_on_all_ranks(failure, f"step {step} is not saved", SnapshotFailed)
        if failure is not None:
            self._attempt.print_line(str(failure))
        elif self._takes_part:
            self._stop.doing = "wrote the model"
            self._trainer.saved()

    def _report(self, **more: Any) -> dict[str, Any] | None:
        """Test the model and write the report; None on a rank that only takes part in the test."""
        trainer, out = self._trainer, self._options.out
        with trainer.phases.measured("evaluation"):
            found = trainer.report()
        if found is None:
            return None
        seconds = {**self._seconds, **trainer.phases.seconds}
        report = {
            "recipe": as_json(trainer.recipe),
            "steps": trainer.progress.step,
            "steps_per_epoch": trainer.steps_per_epoch,
            "epochs": trainer.batches_before(trainer.progress.step) / trainer.steps_per_epoch,
            "train_seconds": trainer.train_seconds - seconds["evaluation"],
            "samples_per_second": trainer.samples_per_second,
            "phases": seconds,
            "versions": versions(trainer.device),
            **found,
            **more,
        }
        write_json(out / "report.json", report)
        state, whole = self._attempt.state, report["train_seconds"]
        since = f" ({lasting(whole - sum(state.phases.values()))} since step {state.progress.step})" if state else ""
        epochs = trainer.epochs(trainer.progress.step)
        self._attempt.print_line(
            Text.assemble(
                (f"Trained in {lasting(whole)}", "green"), f"{since}, {epochs}. {trainer.conclude()} are in {out}"
            )
        )
        return report

    def _diverged(self, exc: NonFinite) -> TrainingDiverged:
        """Return the error to raise where values became NaN, once the best earlier model has its report."""
        trainer, last = self._trainer, self._snapshots.last
        step = trainer.progress.step
        kept = trainer.diverged()
        if kept:
            self._report(diverged_at=step)
        elif last is not None:
            kept = f"its newest snapshot is that of step {last.progress.step}"
        self._attempt.ranks.barrier("report")  # torchrun ends the others with the first to fail: not while it writes
        what, _, _ = str(exc).partition("; ")  # without the remedy: this one has its own
        rates = trainer.rates()
        lower = " ".join(f"--set {key}={float(f'{rate / 3:.1g}'):g}" for key, rate in rates.items())
        had = ", ".join(f"{rate:g}" for rate in rates.values())
        return TrainingDiverged(
            f"the training diverged at step {step} ({what}){f'; {kept}' if kept else ''}. Start again with a lower "
            f"rate, such as {lower} (it was {had})"
        )

    def _drop_rows(self) -> None:
        """Free the shards' memory once a snapshot has the rows."""
        last, cluster = self._snapshots.last, self._attempt.cluster
        if cluster is None or last is None or last.progress != self._trainer.progress:
            return
        try:
            for name in self._trainer.tables():
                cluster.drop_table(name)
        except LOST as exc:
            self._attempt.print_line(f"Tables of {self._trainer.progress.table!r} may still be on the cluster: {exc}")

    @property
    def _how_to_continue(self) -> str:
        return f"Go on with: {self._options.continue_command(self._attempt.ranks.launcher)}"

    def _saved(self) -> str | None:
        last = self._snapshots.saved
        if not self._takes_part:  # and only begins to train once there is one
            return f"what is saved, the first rank says. {self._how_to_continue}"
        return None if last is None else f"saved is step {last.progress.step}. {self._how_to_continue}"

    def _stopped_line(self) -> str:
        step, last = self._trainer.progress.step, self._snapshots.last
        if last is None or last.progress.step != step:
            saved = 0 if last is None else last.progress.step
            return f"Stopped at step {step}; saved is step {saved}. {self._how_to_continue}"
        return f"Stopped at step {step} and saved. {self._how_to_continue}"


def drop_tables(cluster: Cluster, job: str) -> None:
    """Drop all tables of a job."""
    for name in cluster.table_incarnations():
        if name == job or name.startswith(f"{job}/"):
            cluster.drop_table(name)
