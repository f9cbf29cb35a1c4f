"""The two jobs that train an image classifier: ``glyphs`` and ``classify``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from geartrain.ams.client.snapshots.snapshot import PendingSnapshot
from geartrain.ams.storage.snapshot.store import Place
from geartrain.ams.values.errors import ConfigError
from geartrain.ams.values.text import counted
from geartrain.workers.classify import class_pictures
from geartrain.workers.classify.best import IMPRINTED, START, TRAINED, BestModel
from geartrain.workers.classify.graph_progress import GraphProgressPrinter
from geartrain.workers.classify.report import Evaluation
from geartrain.workers.classify.sweep import SWEEP, found_rate
from geartrain.workers.classify.trainer import ImageTrainer
from geartrain.workers.data.folder import load_folder
from geartrain.workers.data.images import Images, Unreadable
from geartrain.workers.devices import choose_device
from geartrain.workers.job.best import evaluation_period
from geartrain.workers.job.options import JobOptions
from geartrain.workers.job.state import JobState
from geartrain.workers.job.trainer import Attempt, versions
from geartrain.workers.models.backbones import build_backbone
from geartrain.workers.models.mistakes import draw_mistakes
from geartrain.workers.models.networks import require_features
from geartrain.workers.models.trained_model import TrainedModel, load_model, save_model_of_head
from geartrain.workers.recipes.glyphs import load_glyphs
from geartrain.workers.recipes.optimizers import JOB_OPTIMIZERS
from geartrain.workers.recipes.recipe import ClassifyRecipe, GlyphRecipe, head_of

_CLASSES = "classes.json"
_NAMED = 5


@dataclass(frozen=True)
class LabelledImages:
    """Training data of a classifier."""

    class_names: list[str]
    train: Images
    held_out: Mapping[str, Images]
    """Test images by name; training never sees them."""
    network: tuple[dict[str, Any], nn.Module]
    """Settings of the backbone, and the backbone itself."""
    folder: str | None = None
    """Folder of the person's own images."""
    chooses_model: bool = False
    """Whether the first of ``held_out`` is a validation that chooses the model to store."""
    unreadable: Unreadable = field(default_factory=lambda: Unreadable(skip=False))
    """Pictures skipped so far."""


class Classifier(ImageTrainer):
    """Trains, validates now and then, and stores the best model."""

    in_one_process = False

    def __init__(self, attempt: Attempt, images: LabelledImages) -> None:
        options, state, ranks = attempt.options, attempt.state, attempt.ranks
        recipe = options.recipe
        names = images.class_names
        if state is not None and json.loads(state.files[_CLASSES]) != names:
            raise ConfigError(
                f"the run knows {counted(len(json.loads(state.files[_CLASSES])), 'class', 'classes')}, the data have "
                f"others ({len(names)}): bring the old ones back, or start a new run"
            )
        self.cluster = attempt.cluster
        self._attempt = attempt
        self._labelled = images
        self._own_backbone = options.own_backbone
        device = choose_device(options.device, ranks.local_rank)
        self._settings, backbone = images.network
        reuse = state is not None and attempt.cluster is not None
        sync = ranks.world_size > 1 and attempt.cluster is not None
        head = head_of(recipe, attempt.cluster, attempt.progress.table, len(names), reuse=reuse, sync=sync)
        if attempt.cluster is None:
            head.to(device)
            if attempt.snapshot is not None:
                head.restore(attempt.snapshot.path)
        head.select.report_progress(GraphProgressPrinter(len(names), attempt.print_line))
        super().__init__(
            backbone=backbone,
            head=head,
            recipe=recipe,
            images=images.train,
            progress=attempt.progress,
            ranks=ranks,
            device=device,
        )
        # Of the held-out images; another rank that takes part has none of its own.
        held_out = images.held_out
        if not ranks.is_first:
            held_out = {name: own.subset(slice(0, 0)) for name, own in held_out.items()}
        self._evaluation = Evaluation(held_out, self, attempt.print_line)
        self._best: BestModel | None = None
        self._was_complete = self.progress.is_complete
        self._unreadable_told = 0

    @property
    def all_take_part(self) -> bool:
        """Whether the ranks hold the rows."""
        return self.head.backend.local is not None

    def data(self) -> dict[str, Any]:
        """Return the place of the images, and the backbone's settings."""
        return {"source": self._labelled.folder, "backbone_settings": self._settings}

    def files(self) -> dict[str, bytes]:
        """Return the names of the classes, and the graph."""
        return {**super().files(), _CLASSES: json.dumps(self._labelled.class_names, ensure_ascii=False).encode()}

    def start_snapshot(self, root: str, name: str, *, parent: str | None, state: JobState) -> PendingSnapshot:
        """Begin a snapshot. Of rows on ranks all ranks write it to one folder while the training waits."""
        if self.cluster is not None:
            return super().start_snapshot(root, name, parent=parent, state=state)
        files = state.all_files()
        path = self.head.snapshot(root, name, step=state.progress.step, values=state.values(), files=files)
        written: Future[Place] = Future()
        written.set_result(path)
        return PendingSnapshot(path, written)

    def restore(self, state: JobState) -> None:
        """Restore a state whose rows are in place already."""
        super().restore(state)
        self._open_best()

    def _open_best(self) -> None:
        if self.ranks.is_first and self._labelled.chooses_model:
            tell = self.ranks.any if self.all_take_part else bool
            folder, job = self._attempt.options.out / "model", self.progress.table
            self._best = BestModel(folder, job, self._evaluation.quick_test, self._write_model, tell)

    def start(self, stop: Callable[[], bool]) -> None:
        """Solve the projection, imprint the class centers, and find a learning rate if none is given."""
        self._report_unreadable()
        classes = counted(len(self._labelled.class_names), "class", "classes")
        self._attempt.print_line(f"Training {classes} on {counted(len(self.images), 'image')}")
        self._open_best()
        self.initialize()
        self._write_class_pictures()
        if self._attempt.options.sweep:
            with self.phases.measured("sweep"):
                validation = next(iter(self._labelled.held_out.values())) if self._labelled.chooses_model else None
                out = self._attempt.options.out
                rate = found_rate(self, validation, out, stop=stop, say=self._attempt.print_line)
                self.recipe = replace(self.recipe, rate=rate)

    def _write_class_pictures(self) -> None:
        look, images = self.recipe.look, self._labelled.train
        if look.kind == "ink" and self.ranks.is_first:
            class_pictures.write_class_pictures(
                self._attempt.options.out,
                self._labelled.class_names,
                images.labels.numpy(),
                look.size,
                lambda places: images.take(torch.from_numpy(places))[0].numpy(),
            )

    def begun(self) -> None:
        """Validate the start."""
        if not self._labelled.chooses_model:
            self._evaluation.quick_look()
        self._consider(START)

    def between(self) -> None:
        """Validate at the steps of the stage's schedule."""
        step, steps = self.progress.part
        if step % evaluation_period(steps) == 0:
            with self.phases.measured("looks"):
                self._consider(TRAINED)
            self._replica.train()

    def trained(self) -> None:
        """Validate at the end, also with newly imprinted class centers."""
        if not self._was_complete:
            self._consider(TRAINED)
            if self.recipe.imprint:
                self.imprint(self.backbone)
                self._consider(IMPRINTED)
        elif self._best is not None and self._best.best is None:  # the stored model is lost
            self._consider(IMPRINTED if self.recipe.imprint else TRAINED)

    def saved(self) -> None:
        """Write the last model if there is no validation."""
        if not self._labelled.chooses_model:
            self._write_model(training={"step": self.progress.step})

    def _consider(self, centers: str) -> None:
        step = self.progress.step
        if self._best is not None:
            self._best.consider(step, centers)
        elif (self.ranks.is_first or self.all_take_part) and self._labelled.chooses_model:
            self._evaluation.quick_test(step, centers)
            if self.ranks.any(False):
                self._write_model(training={})

    def _write_model(self, *, training: dict[str, Any]) -> None:
        head = self.head
        shape = (head.num_classes, *([head.sub_centers] if head.sub_centers > 1 else []), head.dim)
        model = TrainedModel(
            backbone=self.backbone,
            centers=torch.empty(shape, device="meta"),
            class_names=self._labelled.class_names,
            is_cosine=head.margin is not None,
            preprocessing=self.recipe.look,
            backbone_name=self.recipe.backbone,
            backbone_settings=self._settings,
            training=training,
        )
        save_model_of_head(self._attempt.options.out / "model", model, head, is_first=self.ranks.is_first)

    def report(self) -> dict[str, Any] | None:
        """Test the stored model, and draw its mistakes."""
        step, out, best = self.progress.step, self._attempt.options.out, self._best
        if not self.ranks.is_first:
            if not self._labelled.chooses_model:
                self._evaluation.answers(step)
            return None
        looked = None if best is None else best.best
        saved = None if looked is None else load_model(out / "model", backbone=self._own_backbone)
        answers = self._evaluation.answers(step if looked is None else looked.step, saved)
        ink, names = self.recipe.look.kind == "ink", self._labelled.class_names
        draw_mistakes(out / "mistakes.png", answers, self._labelled.train, names, ink=ink)
        self._report_unreadable()
        if looked is not None:
            self.metric = "best accuracy", looked.validation_top1
        for line in best.verdict() if best is not None and self.progress.is_complete else []:
            self._attempt.print_line(line)
        unreadable = sorted(self._labelled.unreadable.found)
        sweep = out / SWEEP
        return {
            "held_out": {name: result.summary() for name, result in answers.items()},
            "versions": versions(self.device, self.precision),
            "lr": self.rates()["lr"],
            **({"model": best.training()} if best is not None else {}),
            **({"sweep": json.loads(sweep.read_text(encoding="utf-8"))} if sweep.exists() else {}),
            **({"unreadable": unreadable} if unreadable else {}),
        }

    def conclude(self) -> str:
        """Return the contents of the run folder, in words."""
        return "Model, report and mistakes"

    def diverged(self) -> str:
        """Return a sentence about the best earlier model, which is left."""
        if self._best is None or self._best.best is None:
            return ""
        return f"the model in {self._attempt.options.out} is that of step {self._best.best.step}, the best before"

    def rates(self) -> dict[str, float]:
        """Return the learning rate of backbone and class centers."""
        return {"lr": self.recipe.lr * self.recipe.rate}

    def _report_unreadable(self) -> None:
        """Name the skipped pictures, unless they are named already."""
        found = sorted(self._labelled.unreadable.found.values())
        if len(found) > self._unreadable_told:
            self._unreadable_told = len(found)
            more = f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
            left_out = counted(len(found), "unreadable image")
            self._attempt.print_line(f"Left out {left_out}: {'; '.join(found[:_NAMED])}{more}")


def _network(options: JobOptions, state: JobState | None) -> tuple[dict[str, Any], nn.Module]:
    """Return settings and backbone of the job's network. Raises ConfigError, before the data is read, if it cannot be
    built or its device used.
    """
    recipe, own = options.recipe, options.own_backbone
    choose_device(options.device)
    if state is not None:
        settings = state.data["backbone_settings"]
        return settings, build_backbone(recipe.backbone, settings, own=own)
    settings = {"channels": recipe.look.channels, "image_size": recipe.look.size, "dim": recipe.dim}
    sized = {**settings, "width": recipe.width} if recipe.backbone == "stroke_net" else settings
    torch.manual_seed(recipe.seed)
    backbone = build_backbone(recipe.backbone, sized, own=own)
    require_features(backbone, recipe.backbone, **settings)
    return sized, backbone


class GlyphTrainer(Classifier):
    """Trains on characters of pip-installed fonts; held-out families are the test."""

    job = "glyphs"
    recipe_class = GlyphRecipe

    @staticmethod
    def load(options: JobOptions, state: JobState | None, console: Console) -> LabelledImages:
        """Fetch the fonts and draw them."""
        network = _network(options, state)
        data = load_glyphs(options.cache, options.recipe.look.size, options.recipe.classes, console)
        return LabelledImages(data.class_names, data.train, data.held_out, network)


class FolderTrainer(Classifier):
    """Trains on a person's images (``load_folder``); the held-out part of each class chooses the model."""

    job = "classify"
    recipe_class = ClassifyRecipe

    @classmethod
    def usual_recipe(cls, data: str | None, stated: Mapping[str, Any]) -> dict[str, Any]:
        """Return the default rates of the optimizer, no imprinting of random features, and grey for ink."""
        del data
        usual: dict[str, Any] = {}
        if str(stated.get("backbone", "")).startswith(("iresnet", "timm:")):
            usual["imprint"] = False
        optimizer = JOB_OPTIMIZERS.get(str(stated.get("optimizer")))
        if optimizer is not None and optimizer.usual_rate is not None:
            usual["lr"] = optimizer.usual_rate
        look = stated.get("look")
        if isinstance(look, Mapping) and look.get("kind") == "ink":
            usual["look"] = {"channels": 1}
        return usual

    @staticmethod
    def require(options: JobOptions) -> None:
        """Check that there are images, and that the output is not among them."""
        what = "--data FOLDER, with one sub-folder of images for each class, or a .tar or .rec file"
        if options.data is None and not options.resume:
            raise ConfigError(f"which images? Give {what}")
        if options.data is not None and not Path(options.data).exists():
            raise ConfigError(f"{options.data} is not there; give {what}")
        if options.data is not None and options.out.resolve().is_relative_to(Path(options.data).resolve()):
            raise ConfigError(
                f"--out {options.out} lies in the images' folder {options.data}, where its own folders would be taken "
                "for classes; give an --out beside it"
            )

    @staticmethod
    def load(options: JobOptions, state: JobState | None, console: Console) -> LabelledImages:
        """Read the images as they were first read: images left out then have no place in their order."""
        folder = Path(options.data or (state.data["source"] if state is not None else "")).resolve()
        recipe: ClassifyRecipe = options.recipe
        network = _network(options, state)
        data = load_folder(
            folder,
            recipe.look,
            held_out=recipe.held_out,
            seed=recipe.seed,
            console=console,
            skip_unreadable=recipe.skip_unreadable,
            memory_bytes=recipe.image_memory << 20,
        )
        tests = {"validation": data.validation} if len(data.validation) else {}
        return LabelledImages(data.class_names, data.train, tests, network, str(folder), bool(tests), data.unreadable)
