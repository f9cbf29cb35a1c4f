"""One training run, from its first step or its last snapshot to the report."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import nn

from geartrain.ams.observe import failpoints
from geartrain.ams.storage.snapshot.folder import Snapshot
from geartrain.ams.storage.snapshot.store import place
from geartrain.ams.values.errors import ConfigError, NonFinite, TrainingDiverged
from geartrain.ams.values.text import counted
from geartrain.bridge.rows.native_types import has_fast_bfloat16
from geartrain.bridge.rows.state import random_state, state_from_bytes, state_to_bytes
from geartrain.workers.devices import choose_device
from geartrain.workers.job.best import IMPRINTED, START, TRAINED, BestModel
from geartrain.workers.job.folder import Run, put_aside, read_run, require_new_snapshots, write_run
from geartrain.workers.job.live import LiveLine
from geartrain.workers.job.loop import Trainer
from geartrain.workers.job.options import JobData, JobOptions, JobResult
from geartrain.workers.job.ranks import JobRanks
from geartrain.workers.job.report import Evaluation, diverged, write_report
from geartrain.workers.job.rows.job_rows import JobRows
from geartrain.workers.job.snapshots import LOST, GoBack, JobSnapshots, Loss, Moment, stopped_line
from geartrain.workers.job.state import JobState, Progress, find_state, state_of
from geartrain.workers.job.sweep import MOST_CLASSES, best_rate, find_rate, write_trials
from geartrain.workers.loggers.protocol import Loggers
from geartrain.workers.loggers.registry import open_loggers
from geartrain.workers.models.backbones import build_backbone
from geartrain.workers.models.networks import require_features
from geartrain.workers.models.saved_model import Model, load_model, save_model_of_head
from geartrain.workers.recipes.graph_lines import GraphLines

_NAMED = 5


@dataclass(frozen=True)
class _Saved:
    """What a run goes on from."""

    snapshot: Snapshot
    state: JobState


class TrainingRun:
    """The pieces of one job, put together."""

    def __init__(
        self,
        job: str,
        options: JobOptions,
        data: JobData,
        rows: JobRows,
        ranks: JobRanks,
        console: Console,
        *,
        launch: str | None,
        again: bool = False,
        loss: Loss | None = None,
    ) -> None:
        """``job`` is its name, also that of its table.

        ``launch`` names the launcher; ``again``: nobody asked for more, this job itself begins once more, and ``loss``
        is what made it go back, if that was it.
        """
        self._job = job
        self._options = options
        self._data = data
        self._rows = rows
        self._ranks = ranks
        self._console = console
        self._launch = launch
        self._again = again
        self._loss = loss
        self._best: BestModel | None = None
        self._evaluation: Evaluation | None = None
        self._events = Loggers()
        self._unreadable_said = 0
        self._device = choose_device(options.device, ranks.local_rank)
        self._bfloat16 = options.dtype == "bfloat16" or (options.dtype == "auto" and has_fast_bfloat16(self._device))
        self._saved = self._find_saved()
        progress = self._first_progress()
        recipe = options.recipe if self._saved is None else self._saved.state.recipe
        self._recipe = recipe = replace(recipe, rows=options.rows or recipe.rows)
        self._settings, backbone = self._build_backbone()
        snapshot = None if self._saved is None else self._saved.snapshot
        self._head = rows.open(recipe, progress.table, len(data.class_names), snapshot)
        self._together = self._head.backend.local is not None
        self._takes_part = ranks.is_first or self._together
        self._head.select.report_progress(GraphLines(len(data.class_names), self._say))
        self._trainer = Trainer(
            backbone=backbone,
            head=self._head,
            recipe=recipe,
            images=data.train,
            progress=progress,
            ranks=ranks,
            device=self._device,
            row_times=rows.times,
            bfloat16=self._bfloat16,
        )
        root = self._new_root() if self._saved is None else read_run(options.out).snapshots
        minutes = options.snapshot_minutes
        self._snapshots = JobSnapshots(
            rows,
            root,
            is_first=ranks.is_first,
            keep=options.keep_snapshots,
            increments=options.increments,
            every_seconds=None if minutes is None else 60 * minutes,
            say=self._say,
            watch=rows.watch,
        )

    def _new_root(self) -> str:
        return str(place(self._options.snapshots or self._options.out / "snapshots"))

    def _find_saved(self) -> _Saved | None:
        if not self._options.resume:
            return None
        run, fallback = read_run(self._options.out), self._options.allow_fallback
        # One rank looks for the newest: a snapshot that appears meanwhile must not part them.
        newest = find_state(run.snapshots, self._job, allow_fallback=fallback) if self._ranks.is_first else None
        name = self._ranks.gather_json(newest[0].name if newest else "")[0]
        snapshot, state = newest or state_of(run.snapshots, name, self._job)
        if state.class_names != self._data.class_names:
            raise ConfigError(
                f"the run knows {counted(len(state.class_names), 'class', 'classes')}, the data have others "
                f"({len(self._data.class_names)}): bring the old ones back, or start a new run"
            )
        return _Saved(snapshot, state)

    def _first_progress(self) -> Progress:
        if self._saved is None:
            return Progress(step=0, stage_start=0, stage_steps=self._options.recipe.steps, table=self._job)
        run, progress = read_run(self._options.out), self._saved.state.progress
        if not progress.is_complete:
            self._require_same_steps(progress)
            return progress
        if run.stage_end > progress.step:  # another stage had begun, and saved nothing yet
            return replace(progress, stage_start=progress.step, stage_steps=run.stage_end - progress.step)
        if self._again or not run.ended:
            return progress  # the training is done, and only the rest is left to do
        steps = self._options.resume_steps or self._saved.state.recipe.steps
        return replace(progress, stage_start=progress.step, stage_steps=steps)

    def _require_same_steps(self, stage: Progress) -> None:
        asked = self._options.resume_steps
        if asked is not None and asked != stage.stage_steps and not self._again:
            raise ConfigError(
                f"--steps {asked} is for a run that has ended; {self._options.out} stands at step {stage.step} of "
                f"{stage.stage_start + stage.stage_steps}. Leave --steps out to train it to its end, and give it after"
            )

    def _build_backbone(self) -> tuple[dict[str, Any], nn.Module]:
        own = self._options.backbone
        if self._saved is not None:
            settings, name = self._saved.state.backbone_settings, self._saved.state.recipe.backbone
            if own not in (None, name):
                raise ConfigError(f"the run was trained with --backbone {name}, not {own}; leave it out")
            backbone = build_backbone(name, settings, own=own)
            backbone.load_state_dict(self._saved.state.backbone)
            return settings, backbone
        recipe, look = self._options.recipe, self._options.preprocessing
        settings = {"channels": look.channels, "image_size": look.size, "dim": recipe.dim}
        sized = {**settings, "width": recipe.width} if recipe.backbone == "stroke_net" else settings
        torch.manual_seed(recipe.seed)
        backbone = build_backbone(recipe.backbone, sized, own=own)
        require_features(backbone, recipe.backbone, **settings)
        return sized, backbone

    def execute(self, stop: Callable[[], bool], seconds: dict[str, float]) -> JobResult:
        """Start or go on, train, and finish."""
        trainer, first = self._trainer, self._ranks.is_first
        was_complete = trainer.progress.is_complete
        if first:
            if self._saved is None:
                self._claim_folder()
            else:
                self._note_stage(ended=False)
        step = None if self._saved is None else trainer.progress.step
        names = self._options.loggers if first else ()
        self._events = events = open_loggers(names, self._options.out, trainer.progress.table, step)
        self._evaluation = evaluation = self._asked_here(events)
        if first and self._data.chooses_model:
            folder, tell = self._options.out / "model", self._ranks.any if self._together else bool
            self._best = BestModel(folder, self._job, evaluation.look, self._write_model, tell)
        try:
            self._begin(evaluation, stop)
            try:
                finished = self._train(stop, events)
                if finished and not was_complete:
                    self._consider(TRAINED)
                    if self._recipe.imprint:
                        trainer.imprint()
                        self._consider(IMPRINTED)
                elif finished and self._best is not None and self._best.best is None:  # the model there is lost
                    self._consider(IMPRINTED if self._recipe.imprint else TRAINED)
            except NonFinite as exc:
                raise self._diverged(exc, evaluation, seconds) from exc
            self._save(last=True)
            report = self._conclude(evaluation, seconds) if self._takes_part and finished else None
            if report is not None:
                self._note_stage(ended=True)
            if not finished:
                self._say(self._stopped_line())
            self._ranks.barrier("end of the training")  # the other ranks keep their clients until the first is done
            if first:
                self._drop_rows()
            return JobResult(finished, report, trainer.progress.step)
        except LOST as exc:
            if stop() and self._snapshots.last is not None:
                self._say(self._stopped_line())
                return JobResult(False, None, trainer.progress.step)
            what, _, _ = str(exc).partition("; ")  # without the remedy: this job has its own
            self._say(f"Lost a part of the cluster at step {trainer.progress.step}: {what}")
            self._go_back(exc)
            raise
        finally:
            events.close()

    def _train(self, stop: Callable[[], bool], events: Loggers) -> bool:
        """To the end of the stage; False if it was stopped before."""
        stage = self._trainer.progress
        with LiveLine(self._console, stage.stage_start + stage.stage_steps) as line:
            return self._trainer.run(
                stop=stop,
                due=self._is_due,
                save=self._save,
                look=partial(self._consider, TRAINED),
                line=line if self._ranks.is_first else None,
                events=events,
            )

    def _diverged(self, exc: NonFinite, evaluation: Evaluation, seconds: dict[str, float]) -> TrainingDiverged:
        """What to raise where values have gone beyond all numbers, once the best model so far has its report."""
        kept = (
            f"its newest snapshot is that of step {self._snapshots.last.progress.step}" if self._snapshots.last else ""
        )
        if self._best is not None and self._best.best is not None:
            self._conclude(evaluation, seconds, diverged_at=self._trainer.progress.step)
            kept = f"the model in {self._options.out} is that of step {self._best.best.step}, the best before"
        self._ranks.barrier(
            "report"
        )  # torchrun ends the others with the first to fail: not while the report is written
        return diverged(exc, self._trainer.progress.step, kept, {"--lr": self._recipe.lr * self._recipe.rate})

    def _asked_here(self, events: Loggers) -> Evaluation:
        """Of the held-out images; another rank that takes part has none of its own to ask about."""
        images = self._data.held_out
        if not self._ranks.is_first:
            images = {name: images.subset(slice(0, 0)) for name, images in images.items()}
        return Evaluation(images, self._trainer.backbone, self._head, self._device, events, self._say)

    def _claim_folder(self) -> None:
        root = self._new_root()
        goes_aside = self._options.overwrite and root == str((self._options.out / "snapshots").absolute())
        if self._options.snapshots is not None and not goes_aside:
            require_new_snapshots(root)
        if self._options.overwrite and (aside := put_aside(self._options.out)) is not None:
            self._say(f"The run that was in {self._options.out} is now in {aside}")
        self._options.out.mkdir(parents=True, exist_ok=True)
        began, scheduler = time.time(), self._options.scheduler
        run = Run(job=self._job, snapshots=root, launch=self._launch, began=began, scheduler=scheduler)
        write_run(self._options.out, run)
        self._note_stage(ended=False)

    def _note_stage(self, *, ended: bool) -> None:
        progress = self._trainer.progress
        end = progress.stage_start + progress.stage_steps
        run = replace(read_run(self._options.out), stage_end=end, ended=ended, scheduler=self._options.scheduler)
        write_run(self._options.out, run)

    def _begin(self, evaluation: Evaluation, stop: Callable[[], bool]) -> None:
        if self._saved is None:
            classes = counted(len(self._data.class_names), "class", "classes")
            self._say_unreadable()
            self._say(f"Training {classes} on {counted(len(self._data.train), 'image')}")
            self._trainer.start()
            if self._options.sweep:
                self._trainer.phases.measured("sweep", partial(self._find_rate, stop))
            state = self._state()
            if self._takes_part:
                self._snapshots.require(state)  # something to go back to, or to go on from
                if not self._data.chooses_model:
                    evaluation.quick_look()
                self._consider(START)
            return
        self._trainer.restore(self._saved.state)
        self._snapshots.last = Moment(self._saved.state.progress, time.monotonic())
        step, taken = self._trainer.progress.step, self._saved.snapshot.manifest.created
        lost = ""
        if self._loss is not None:
            steps = counted(self._loss.step - step, "step")
            lost = f": {steps} ({self._loss.unix_seconds - taken:.0f} s) were lost"
        self._say(f"Going on at step {step}{lost}")

    def _find_rate(self, stop: Callable[[], bool]) -> None:
        """Go on at the rate that short trials found best."""
        held_out, num_classes = list(self._data.held_out.values()), len(self._data.class_names)
        if not self._data.chooses_model or self._ranks.world_size > 1 or num_classes > MOST_CLASSES:
            why = (
                "there is no validation"
                if not self._data.chooses_model
                else f"{self._ranks.world_size} ranks train together"
                if self._ranks.world_size > 1
                else f"there are more than {MOST_CLASSES:,} classes"
            )
            self._say(f"No trials of learning rates, since {why}: it is {self._recipe.lr:g}; --lr gives another")
            return
        trials = find_rate(
            self._recipe,
            self._trainer.backbone,
            self._head.weights(),
            self._data.train,
            held_out[0],
            device=self._device,
            bfloat16=self._bfloat16,
            stop=stop,
            say=self._say,
        )
        write_trials(self._options.out, trials)
        lr = best_rate(trials)
        if lr is None:
            self._say(f"No trial of a learning rate ended well: it stays {self._recipe.lr:g}")
            return
        self._recipe = replace(self._recipe, rate=lr / self._recipe.lr)
        self._trainer.recipe = self._recipe
        self._say(f"Learning rate {lr:g}")

    def _is_due(self) -> bool:
        """Whether the clock says that it is time for a snapshot; the first rank decides."""
        return self._ranks.is_first and self._snapshots.is_due

    def _save(self, *, last: bool = False) -> None:
        """Begin a snapshot; the ``last`` one is waited for, and without a best model this one written."""
        state = self._state()
        if not self._takes_part:
            return
        self._events.flush()  # what is logged of the steps that the snapshot holds stays as surely as it
        failpoints.reach("job.save.before")
        if not last:
            self._snapshots.begin(state)
            failpoints.reach("job.save.after")
            return
        self._snapshots.settle()
        if self._snapshots.last is None or self._snapshots.last.progress != state.progress:
            self._snapshots.begin(state)
            self._snapshots.settle()
        if not self._data.chooses_model:
            self._write_model(training={})

    def _consider(self, centers: str) -> None:
        step = self._trainer.progress.step
        if self._best is not None:
            self._best.consider(step, centers)
        elif self._takes_part and self._data.chooses_model and self._evaluation is not None:
            self._evaluation.look(step, centers)
            if self._ranks.any(False):
                self._write_model(training={})

    def _write_model(self, *, training: dict[str, Any]) -> None:
        names, look, name = self._data.class_names, self._options.preprocessing, self._recipe.backbone
        head = self._head
        shape = (head.num_classes, *([head.sub_centers] if head.sub_centers > 1 else []), head.dim)
        centers = torch.empty(shape, device="meta")
        is_cosine = head.margin is not None
        model = Model(self._trainer.backbone, self._settings, centers, names, look, is_cosine, name, training)
        save_model_of_head(self._options.out / "model", model, head, is_first=self._ranks.is_first)

    def _state(self) -> JobState:
        """Every rank calls this at the same step; the first one's is whole."""
        trainer = self._trainer
        random = self._ranks.gather_bytes(state_to_bytes(random_state(self._device)))
        return JobState(
            recipe=self._recipe,
            preprocessing=self._options.preprocessing,
            progress=trainer.progress,
            cursor=trainer.cursor,
            data=self._data.source,
            class_names=self._data.class_names,
            backbone_settings=self._settings,
            backbone=trainer.backbone.state_dict(),
            optimizer=trainer.optimizer_state(),
            gradients=trainer.gradient_state(),
            head=self._head.get_extra_state(),
            scheduler=self._options.scheduler,
            graph=self._head.select.graph_to_bytes(),
            random=[state_from_bytes(of_rank) for of_rank in random],
        )

    def _conclude(
        self, evaluation: Evaluation, seconds: dict[str, float], diverged_at: int | None = None
    ) -> dict[str, Any] | None:
        """Evaluate, draw the mistakes, write the report; None on a rank that only takes part in the evaluation."""
        if not self._ranks.is_first:
            if not self._data.chooses_model:
                evaluation.answers(self._trainer.progress.step)
            return None
        trainer, started, out = self._trainer, time.perf_counter(), self._options.out
        best = None if self._best is None else self._best.best
        saved = None if best is None else load_model(out / "model", backbone=self._options.backbone)
        report = write_report(
            out,
            evaluation.answers(trainer.progress.step if best is None else best.step, saved),
            self._data.train,
            self._data.class_names,
            ink=self._options.preprocessing.kind == "ink",
            started=started,
            train_seconds=trainer.train_seconds,
            samples_per_second=trainer.samples_per_second,
            phases={**seconds, **trainer.phases.seconds},
            device=self._device,
            model={} if self._best is None else self._best.training(),
            bfloat16=self._bfloat16,
            lr=self._recipe.lr * self._recipe.rate,
            unreadable=sorted(self._data.unreadable.found),
            diverged_at=diverged_at,
        )
        self._say_unreadable()
        for line in [] if self._best is None or diverged_at is not None else self._best.verdict():
            self._say(line)
        self._say(f"Trained in {trainer.train_seconds:.0f} s. Model, report and mistakes are in {out}")
        return report

    def _say_unreadable(self) -> None:
        """Name the pictures that were passed over, unless that is said already."""
        found = sorted(self._data.unreadable.found.values())
        if len(found) > self._unreadable_said:
            self._unreadable_said = len(found)
            more = f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
            self._say(f"Left out {counted(len(found), 'unreadable image')}: {'; '.join(found[:_NAMED])}{more}")

    def _drop_rows(self) -> None:
        """Leave the memory of the shards to others: a snapshot has the rows."""
        last = self._snapshots.last
        if last is None or last.progress != self._trainer.progress:
            return
        try:
            self._rows.drop(self._head.name)
        except LOST as exc:
            self._say(f"Table {self._head.name!r} may still be on the cluster: {exc}")

    def _go_back(self, exc: Exception) -> None:
        """Raise GoBack if there is a snapshot of this job."""
        if self._snapshots.last is not None:
            raise GoBack(Loss(self._trainer.progress.step, time.time())) from exc

    def _stopped_line(self) -> str:
        go_on = self._options.go_on(self._ranks.launcher)
        return stopped_line(self._trainer.progress.step, self._snapshots.last, go_on)

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)
