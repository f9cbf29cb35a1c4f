"""The scenario of a worker that dies while it saves: resumed, it ends with the model of a run that nobody killed."""

from __future__ import annotations

from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from safetensors.torch import load_file

from geartrain.workers.job.folder import has_snapshot, read_run
from geartrain.workers.job.options import SnapshotSettings
from tests.faults.children import Child
from tests.faults.scenarios import Outcome, died_of
from tests.integration.jobs.small_job import GREY, classify
from tests.integration.jobs.test_classify_and_predict import RECIPE, draw_shapes

STEPS, SAVE_EVERY = 12, 3


def train(out: Path, images: Path, seed: int, *, resume: bool = False, overwrite: bool = False) -> None:
    """Train in this process, on one thread so that runs are equal to the bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        recipe = replace(RECIPE, steps=STEPS, batch_size=4, sample_rate=0.75, seed=seed, look=GREY)
        recipe = replace(recipe, snapshots=SnapshotSettings(steps=SAVE_EVERY))
        assert classify(out, images, recipe, resume=resume, overwrite=overwrite).finished
    finally:
        torch.set_num_threads(threads)


def work(pipe: Connection, out: str, images: str, seed: int) -> None:
    """:func:`train` in a process of its own."""
    train(Path(out), Path(images), seed)
    pipe.close()


def worker_dies(seed: int, name: str, text: str, folder: Path) -> Outcome:
    """Kill a training while it saves, resume it, compare."""
    images, broken, straight = folder / "images", folder / "broken", folder / "straight"
    draw_shapes(images, 4)
    child = Child(work, str(broken), str(images), seed, armed=text)
    code = child.exit_code()
    child.end()
    saved = has_snapshot(read_run(broken))
    train(broken, images, seed, resume=saved, overwrite=not saved)
    train(straight, images, seed)
    wrong = 0
    for part in ("backbone", "centers"):
        found = load_file(broken / "model" / f"{part}.safetensors")
        for key, value in load_file(straight / "model" / f"{part}.safetensors").items():
            wrong += not torch.equal(value, found[key])
    return Outcome(
        name=name,
        seed=seed,
        armed=text,
        fired=died_of(text, [code]),
        acknowledged=STEPS,
        recoveries=1,
        wrong_rows=wrong,
        snapshots=1,
        damage=(),
    )
