"""A whole training run: data in, a run folder out. The two jobs (glyphs, classify) differ only in their data."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from rich.console import Console

from geartrain.ams import failpoints
from geartrain.ams.cluster import Cluster, connect, local
from geartrain.ams.errors import ConfigError, ShardRestarted, StaleCluster, Unavailable
from geartrain.ams.specs import SGD
from geartrain.ams.words import counted
from geartrain.bridge.heads.class_head import ClassHead
from geartrain.bridge.heads.margins import CosFace
from geartrain.bridge.heads.selection import FullSoftmax, PartialFC
from geartrain.bridge.heads.tables import as_numpy
from geartrain.workers.atomic import write_json
from geartrain.workers.backbones import StrokeNet, build_backbone
from geartrain.workers.checkpoint import Model, Progress, TrainingState, load_model, load_training, save_model
from geartrain.workers.data.bitmaps import Preprocessing
from geartrain.workers.data.images import ImageSet
from geartrain.workers.devices import choose_device, has_native_bfloat16
from geartrain.workers.evaluate import Answers, answer, every_nth
from geartrain.workers.interruption import interruption
from geartrain.workers.live import Events, LiveLine
from geartrain.workers.loop import Trainer
from geartrain.workers.mistakes import draw_mistakes
from geartrain.workers.ranks import Ranks, joined_ranks
from geartrain.workers.recipe import Recipe
from geartrain.workers.row_timing import TimedCluster
from geartrain.workers.run_folder import put_aside, require_new_run

_QUICK_LOOK_IMAGES = 2000
_LOST = (ShardRestarted, Unavailable, StaleCluster)
"""What it means for a job that a role of its cluster died."""


class _GoBack(Exception):
    """A role was lost, and this job has a checkpoint of its own to go on from; the cause says which."""


@dataclass(frozen=True)
class JobData:
    """What a job trains on."""

    class_names: list[str]
    train: ImageSet
    held_out: dict[str, ImageSet]
    """Name -> images of a test; training never sees them."""
    source: dict[str, Any]
    """How to find the same data again when the run is resumed."""


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Where and how a job runs."""

    out: Path
    """Run folder."""
    recipe: Recipe
    preprocessing: Preprocessing
    resume: bool = False
    """Go on with the run in ``out``: to the end of its stage, or if that was reached, through another one."""
    resume_steps: int | None = None
    """Steps of that other stage; as many as before by default."""
    overwrite: bool = False
    """Start over where ``out`` holds a run already."""
    scheduler: str | None = None
    """host:port of a cluster's scheduler; by default one shard is embedded in this process."""
    max_recoveries: int = 10
    """How often the job goes back to its last checkpoint when shards were lost, before it gives up."""
    device: str = "auto"


@dataclass(frozen=True)
class JobResult:
    """How a job ended."""

    finished: bool
    """False: it was interrupted, saved, and can be resumed."""
    report: dict[str, Any] | None
    step: int


def run_job(options: JobOptions, load: Callable[[Console], JobData], console: Console) -> JobResult:
    """Train, evaluate and save. Under torchrun all ranks call this; the first one writes and speaks.

    Raises ConfigError, before anything is written, if ``options.out`` holds a run that was not meant to be replaced.
    """
    started = time.perf_counter()
    if not options.resume and not options.overwrite:
        require_new_run(options.out)
    recoveries, can_go_back = 0, False
    while True:
        try:
            return _run_once(options, load, console, started)
        except (_GoBack, *_LOST) as exc:
            # Once there is something to go back to, a role that is not back yet is worth another attempt too. Under
            # torchrun the ranks come back together: torchrun starts them again.
            can_go_back |= isinstance(exc, _GoBack) and "WORLD_SIZE" not in os.environ
            if not can_go_back or recoveries == options.max_recoveries:
                raise (exc.__cause__ if isinstance(exc, _GoBack) and exc.__cause__ else exc) from None
            recoveries += 1
            options = replace(options, resume=True, overwrite=False)


def _run_once(options: JobOptions, load: Callable[[Console], JobData], console: Console, started: float) -> JobResult:
    with ExitStack() as stack:
        ranks = stack.enter_context(joined_ranks(options.device))
        console = console if ranks.is_first else Console(quiet=True)
        if ranks.world_size > 1 and options.scheduler is None:
            raise ConfigError(
                f"{ranks.world_size} ranks train the same rows, so these must be in a cluster: "
                f"give --scheduler HOST:PORT ('geartrain up' starts one)"
            )
        data = _load_in_turn(load, ranks, console)
        cluster = stack.enter_context(connect(options.scheduler) if options.scheduler else local(num_shards=1))
        stop = stack.enter_context(interruption())
        run = _Run(options, data, cluster, ranks, console)
        seconds = {"data": time.perf_counter() - started}
        return run.execute(stop, seconds)


def _load_in_turn(load: Callable[[Console], JobData], ranks: Ranks, console: Console) -> JobData:
    """The data; the first rank fills the caches, the others find them filled."""
    if not ranks.is_first:
        ranks.any(False)
    data = load(console)
    if ranks.is_first:
        ranks.any(False)
    return data


class _Run:
    """The pieces of one job, put together."""

    def __init__(self, options: JobOptions, data: JobData, cluster: Cluster, ranks: Ranks, console: Console) -> None:
        self._options = options
        self._data = data
        self._cluster = cluster
        self._ranks = ranks
        self._console = console
        self._device = choose_device(options.device, ranks.local_rank)
        self._model_folder = options.out / "model"
        self._settings, backbone, recipe, progress, saved = self._plan()
        self._recipe = recipe
        if saved is not None and ranks.is_first:
            cluster.drop_table(progress.table)  # its rows come from the checkpoint, whatever the cluster still has
        ranks.any(False)
        timed = TimedCluster(cluster)
        head = ClassHead(
            timed,
            progress.table,
            num_classes=len(data.class_names),
            dim=recipe.dim,
            select=FullSoftmax() if recipe.sample_rate == 1 else PartialFC(sample_rate=recipe.sample_rate),
            margin=CosFace(scale=recipe.scale, margin=recipe.margin),
            optimizer=SGD(lr=recipe.row_lr),
            seed=recipe.seed,
            sync=ranks.world_size > 1,
        )
        self._trainer = Trainer(
            backbone=backbone,
            head=head,
            recipe=recipe,
            images=data.train,
            progress=progress,
            ranks=ranks,
            device=self._device,
            row_times=timed.times,
        )
        self._head = head
        self._saved = saved
        self._checkpoint = None if saved is None else progress
        """Where going back leads to; None before this job has saved anything."""
        self._checkpoint_time = time.perf_counter()
        self._centers = None if saved is None else load_model(self._model_folder).centers

    def _plan(self) -> tuple[dict[str, Any], StrokeNet, Recipe, Progress, TrainingState | None]:
        """Backbone settings, backbone, recipe and progress: from the saved run, or fresh."""
        options = self._options
        if options.resume:
            model, saved = load_model(self._model_folder), load_training(self._model_folder)
            return model.backbone_settings, model.backbone, saved.recipe, self._next_stage(saved), saved
        recipe, look = options.recipe, options.preprocessing
        settings = {"channels": look.channels, "image_size": look.size, "dim": recipe.dim, "width": recipe.width}
        torch.manual_seed(recipe.seed)
        backbone = build_backbone("stroke_net", settings)
        table = f"{options.out.name or 'run'}-{self._ranks.new_job_id()}"
        return settings, backbone, recipe, Progress(step=0, stage_start=0, stage_steps=recipe.steps, table=table), None

    def _next_stage(self, saved: TrainingState) -> Progress:
        progress = saved.progress
        if not progress.is_complete:
            return progress
        steps = self._options.resume_steps or saved.recipe.steps
        return replace(progress, stage_start=progress.step, stage_steps=steps)

    def execute(self, stop: Callable[[], bool], seconds: dict[str, float]) -> JobResult:
        """Start or restore, train, and finish."""
        trainer, first = self._trainer, self._ranks.is_first
        if first and self._saved is None and self._options.overwrite:
            aside = put_aside(self._options.out)
            if aside is not None:
                self._say(f"The run that was in {self._options.out} is now in {aside}")
        events = Events(self._options.out / "events" / trainer.progress.table if first else None)
        try:
            self._begin(events)
            with LiveLine(self._console, trainer.progress.stage_start + trainer.progress.stage_steps) as line:
                finished = trainer.run(stop=stop, save=self._save, line=line if first else None, events=events)
            if finished:
                trainer.imprint()
            self._save()
            if not finished:
                self._say(f"Stopped at step {trainer.progress.step} and saved. Go on with: {self._resume_line()}")
                return JobResult(False, None, trainer.progress.step)
            report = self._conclude(events, seconds) if first else None
            self._ranks.any(False)  # the other ranks keep the cluster's clients alive until the first is done
            return JobResult(True, report, trainer.progress.step)
        except _LOST as exc:
            self._say(f"Lost a part of the cluster at step {trainer.progress.step}: {exc}")
            if self._checkpoint is None or self._checkpoint.is_complete:
                raise  # nothing to go back to, or nothing to train any more
            lost = counted(trainer.progress.step - self._checkpoint.step, "step")
            seconds_lost = time.perf_counter() - self._checkpoint_time
            self._say(f"The last checkpoint is of step {self._checkpoint.step}: {lost} ({seconds_lost:.0f} s) are lost")
            raise _GoBack from exc
        finally:
            events.close()

    def _begin(self, events: Events) -> None:
        if self._saved is None:
            classes = counted(len(self._data.class_names), "class", "classes")
            self._say(f"Training {classes} on {counted(len(self._data.train), 'image')}")
            self._trainer.start()
            if self._options.scheduler is not None:
                self._save()  # something to go back to, should a shard be lost
            self._quick_look(events)
            return
        if self._ranks.is_first and self._centers is not None:
            ids = np.arange(len(self._centers), dtype=np.int64)
            self._head.table.assign(ids, as_numpy(self._centers))
        self._ranks.any(False)  # no rank may pull before the rows are there
        self._trainer.restore(self._saved.momentum)
        self._say(f"Going on at step {self._trainer.progress.step}")

    def _quick_look(self, events: Events) -> None:
        """Accuracy before the first step, on a part of each test."""
        if not self._ranks.is_first:
            return
        for name, images in self._data.held_out.items():
            result = answer(self._trainer.backbone, self._head, every_nth(images, _QUICK_LOOK_IMAGES), self._device)
            events.scalars(f"held_out/{name}", {"top1": result.top1, "top5": result.top5}, 0)
            self._say(f"before the first step: {name} top-1 {result.top1:.3f} (of every n-th image)")

    def _save(self) -> None:
        if not self._ranks.is_first:
            return
        trainer = self._trainer
        model = Model(
            trainer.backbone,
            self._settings,
            self._head.weights(),
            self._data.class_names,
            self._options.preprocessing,
        )
        state = TrainingState(self._recipe, trainer.progress, trainer.momentum(), self._data.source)
        failpoints.reach("job.save.before")
        save_model(self._model_folder, model, state)
        failpoints.reach("job.save.after")
        self._checkpoint, self._checkpoint_time = trainer.progress, time.perf_counter()

    def _conclude(self, events: Events, seconds: dict[str, float]) -> dict[str, Any]:
        """Evaluate, draw the mistakes, write the report."""
        trainer, started = self._trainer, time.perf_counter()
        answers: dict[str, Answers] = {}
        for name, images in self._data.held_out.items():
            answers[name] = answer(trainer.backbone, self._head, images, self._device)
            summary = answers[name].summary()
            events.scalars(f"held_out/{name}", {k: summary[k] for k in ("top1", "top5")}, trainer.progress.step)
            images_text = counted(summary["images"], "image")
            self._say(f"{name}: top-1 {summary['top1']:.4f}, top-5 {summary['top5']:.4f}, {images_text}")
        seconds = {**seconds, **trainer.phases.seconds, "evaluation": time.perf_counter() - started}
        report = {
            "held_out": {name: result.summary() for name, result in answers.items()},
            "train_seconds": trainer.train_seconds,
            "samples_per_second": trainer.samples_per_second,
            "phases": seconds,
            "versions": versions(self._device),
        }
        ink = self._options.preprocessing.kind == "ink"
        draw_mistakes(self._options.out / "mistakes.png", answers, self._data.train, self._data.class_names, ink=ink)
        write_json(self._options.out / "report.json", report)
        self._say(f"Trained in {trainer.train_seconds:.0f} s. Model, report and mistakes are in {self._options.out}")
        return report

    def _resume_line(self) -> str:
        scheduler = f" --scheduler {self._options.scheduler}" if self._options.scheduler else ""
        return f"geartrain worker {self._data.source['job']} --resume {self._options.out}{scheduler}"

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)


def versions(device: torch.device) -> dict[str, str]:
    """What a figure depends on."""
    return {
        "geartrain": importlib.metadata.version("geartrain"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "pillow": PIL.__version__,
        "device": str(device),
        "threads": str(torch.get_num_threads()),
        "precision": "bfloat16 autocast" if has_native_bfloat16(device) else "float32",
    }
