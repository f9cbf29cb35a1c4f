"""Images of a run that has ended, read again in the same way."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from geartrain.ams.values.errors import ConfigError
from geartrain.workers.classify.classifier import FolderTrainer, GlyphTrainer
from geartrain.workers.job.folder import read_run
from geartrain.workers.job.options import JobOptions
from geartrain.workers.job.state import JobState, newest_snapshot
from geartrain.workers.models.export import RunImages


def images_of(run: Path, console: Console, *, data: str | None = None, cache: Path) -> RunImages:
    """Return the training and test images of a run of ``geartrain worker classify`` or ``glyphs``.

    ``data`` is the present place of its images, if they were moved. Raises ConfigError (no such run, or its images are
    missing), SnapshotDamaged, InvalidArgument (an image that cannot be read). Downloads nothing.
    """
    snapshot = newest_snapshot(read_run(run).snapshots)
    trainer = next((each for each in (GlyphTrainer, FolderTrainer) if each.job == snapshot.manifest.job["job"]), None)
    if trainer is None:
        raise ConfigError(f"{run} is a run of 'geartrain worker {snapshot.manifest.job['job']}', which has no images")
    if trainer is GlyphTrainer and not (cache / "bitmaps").is_dir():
        raise ConfigError(f"the characters it was trained on are not in {cache}; say where they are with --cache")
    state = JobState.read(snapshot, trainer.job, trainer.recipe_class)
    options = JobOptions(job=trainer.job, out=run, recipe=state.recipe, data=data, cache=cache, resume=True)
    images = trainer.load(options, state, console)
    return RunImages(held_out=list(images.held_out.values()), train=images.train)
