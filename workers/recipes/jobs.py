"""The two jobs a worker knows, by the data they train on: ``glyphs`` and ``classify``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

from rich.console import Console

from geartrain.ams.values.errors import ConfigError
from geartrain.workers.continuing import result_of_ended, with_its_run
from geartrain.workers.data.folder import MEMORY_BYTES, load_folder
from geartrain.workers.job.folder import read_run, require_folder, require_same
from geartrain.workers.job.job import run_job
from geartrain.workers.job.options import CACHE, JobData, JobOptions, JobResult
from geartrain.workers.job.state import find_state
from geartrain.workers.recipes.glyphs import load_glyphs

GLYPH_SIZE = 32


def train_glyphs(options: JobOptions, *, cache: Path, num_classes: int | None, console: Console) -> JobResult:
    """Train on characters of the pip-installed fonts; held-out families are the test."""
    require_folder(cache, "--cache")
    options = replace(options, command="glyphs" if cache == CACHE else f"glyphs --cache {quote(str(cache))}")
    options = with_its_run(options, console)
    if options.resume:
        options, source = resumed(options, "glyphs")
        num_classes = source["num_classes"]
        if (ended := result_of_ended(options, console)) is not None:
            return ended

    def load(console: Console) -> JobData:
        data = load_glyphs(cache, options.preprocessing.size, num_classes, console)
        source = {"job": "glyphs", "num_classes": num_classes}
        return JobData(data.class_names, data.train, data.held_out, source)

    return run_job(options, load, console)


def train_folder(
    options: JobOptions,
    *,
    folder: Path | None,
    held_out: float,
    console: Console,
    skip_unreadable: bool = False,
    image_memory_bytes: int = MEMORY_BYTES,
) -> JobResult:
    """Train on a person's images (see ``load_folder``); the held-out part of each class chooses the model."""
    seed = options.recipe.seed
    if options.backbone is not None and ":" in options.backbone:  # code is imported only if it is named again
        options = replace(options, command=f"classify --backbone {options.backbone}")
    options = with_its_run(options, console)
    if options.resume:
        options, source = resumed(options, "classify")
        if (ended := result_of_ended(options, console)) is not None:
            return ended
        folder, held_out, seed = folder or Path(source["folder"]), source["held_out"], source["split_seed"]
        # As the data were read before: what was left out then has no place in the order of the images.
        skip_unreadable = source.get("skip_unreadable", skip_unreadable)
        image_memory_bytes = source.get("image_memory_bytes", image_memory_bytes)
    if folder is None:
        raise ConfigError(
            "which images? Give --data FOLDER, with one sub-folder of images for each class, or a .tar or .rec file"
        )
    images = folder
    out, whole = options.out.resolve(), images.resolve()
    if out == whole or whole in out.parents:
        raise ConfigError(
            f"--out {options.out} lies in the images' folder {images}, where its own folders would be taken for "
            "classes; give an --out beside it"
        )

    def load(console: Console) -> JobData:
        data = load_folder(
            images,
            options.preprocessing,
            held_out=held_out,
            seed=seed,
            console=console,
            skip_unreadable=skip_unreadable,
            memory_bytes=image_memory_bytes,
        )
        source = {
            "job": "classify",
            "folder": str(images.resolve()),
            "held_out": held_out,
            "split_seed": seed,
            "skip_unreadable": skip_unreadable,
            "image_memory_bytes": image_memory_bytes,
        }
        tests = {"validation": data.validation} if len(data.validation) else {}
        return JobData(
            data.class_names, data.train, tests, source, chooses_model=bool(tests), unreadable=data.unreadable
        )

    return run_job(options, load, console)


def resumed(options: JobOptions, job: str) -> tuple[JobOptions, dict[str, Any]]:
    """Options with the saved run's recipe and preprocessing, and where its data came from."""
    run = read_run(options.out)
    _, state = find_state(run.snapshots, run.job, allow_fallback=options.allow_fallback)
    if state.data.get("job") != job:
        raise ConfigError(
            f"{options.out} was trained by 'geartrain worker {state.data.get('job')}', not '{job}'; resume it so"
        )
    if options.continues:
        require_same(options.stated, options.recipe, state.recipe, options.out)
        require_same(options.stated_look, options.preprocessing, state.preprocessing, options.out)
    return replace(options, recipe=state.recipe, preprocessing=state.preprocessing, sweep=False), state.data
