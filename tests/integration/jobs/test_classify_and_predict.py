"""A person's own images: train, stop, go on, predict."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from rich.console import Console
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from geartrain.ams.storage.snapshot.folder import latest, list_snapshots
from geartrain.ams.storage.snapshot.manifest import JOB, ROWS
from geartrain.ams.values.errors import ConfigError, InvalidArgument, SnapshotFailed, TrainingDiverged
from geartrain.ams.values.optimizers.momentum import Untouched
from geartrain.workers.classify import classifier
from geartrain.workers.data.bitmaps import Preprocessing
from geartrain.workers.data.folder import find_classes, load_folder
from geartrain.workers.job import job
from geartrain.workers.job.folder import read_report
from geartrain.workers.job.keys import read_recipe, recipe_of
from geartrain.workers.job.options import JobResult
from geartrain.workers.job.snapshots import JobSnapshots
from geartrain.workers.recipes.recipe import ClassifyRecipe
from tests.integration.jobs.small_job import classify, said_by, stop_after
from tests.support import command_line

QUIET = Console(file=io.StringIO())
SHAPES = ("circle", "cross", "square", "triangle")
LOOK = Preprocessing(kind="photo", size=32, channels=3)
RECIPE = ClassifyRecipe(steps=40, batch_size=16, width=8, dim=16, warmup_steps=5, look=LOOK, held_out=0.25)
ONE_STEP = replace(RECIPE, steps=1)


def draw(shape: str, seed: int, *, dark: bool = False) -> Image.Image:
    dice = random.Random(f"{shape}/{seed}")
    paper, pen = ((20, 30, 40), (240, 230, 90)) if dark else ((235, 235, 225), (30, 40, 120))
    picture = Image.new("RGB", (dice.randint(60, 120), dice.randint(60, 120)), paper)
    x, y, r = picture.width // 2 + dice.randint(-6, 6), picture.height // 2 + dice.randint(-6, 6), dice.randint(16, 24)
    pencil = ImageDraw.Draw(picture)
    if shape == "circle":
        pencil.ellipse((x - r, y - r, x + r, y + r), outline=pen, width=4)
    elif shape == "cross":
        pencil.line((x - r, y - r, x + r, y + r), pen, 4)
        pencil.line((x - r, y + r, x + r, y - r), pen, 4)
    elif shape == "square":
        pencil.rectangle((x - r, y - r, x + r, y + r), outline=pen, width=4)
    else:
        pencil.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], outline=pen, width=4)
    return picture


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Jobs this small gain nothing from threads, and lose much to waiting for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def draw_shapes(folder: Path, each: int = 12) -> Path:
    for shape in SHAPES:
        (folder / shape).mkdir(parents=True)
        for seed in range(each):
            draw(shape, seed).save(folder / shape / f"{seed}.{'jpg' if seed % 2 else 'png'}")
    return folder


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return draw_shapes(tmp_path / "images")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images that no test changes."""
    return draw_shapes(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def model(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a model that learned the shapes; no test changes it."""
    out = tmp_path_factory.mktemp("trained") / "run"
    assert train(out, pictures).finished
    return out


def train(out: Path, images: Path | None, recipe: ClassifyRecipe = RECIPE, **changes: Any) -> JobResult:
    return classify(out, images, recipe, **changes)


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = command_line.invoke(*arguments)
    return result.exit_code, result.stdout, result.stderr


def assert_same_state(expected: Path, found: Path) -> None:
    """Rows with their momentum, backbone, optimizer, cursor and random state of two runs are equal to the bit."""
    snapshots = [latest(out / "snapshots") for out in (expected, found)]
    for entries in zip(*(snapshot.manifest.files for snapshot in snapshots), strict=True):
        assert [entry.path.partition("-")[0] for entry in entries] == [entries[0].path.partition("-")[0]] * 2
        if entries[0].kind == ROWS:
            arrays = [snapshot.read(entry) for snapshot, entry in zip(snapshots, entries, strict=True)]
            assert arrays[0].keys() == arrays[1].keys()
            for name, array in arrays[0].items():
                assert np.array_equal(array, arrays[1][name]), name
        elif entries[0].kind == JOB:  # not the dedup state, which name the writes of each run
            contents = [snapshot.read_bytes(entry) for snapshot, entry in zip(snapshots, entries, strict=True)]
            assert contents[0] == contents[1], entries[0].path
    cursors = [snapshot.manifest.job["cursor"] for snapshot in snapshots]
    assert cursors[0] == cursors[1]
    assert_same_models(expected, found)


def assert_same_models(expected: Path, found: Path) -> None:
    for name in ("backbone", "centers"):
        models = [load_file(out / "model" / f"{name}.safetensors") for out in (expected, found)]
        assert models[0].keys() == models[1].keys() and models[0]
        for key, value in models[0].items():
            assert torch.equal(value, models[1][key]), f"{name}: {key}"


def test_a_folder_of_images_becomes_a_model_that_names_new_ones(model: Path, tmp_path: Path) -> None:
    report = json.loads((model / "report.json").read_text(encoding="utf-8"))
    assert report["held_out"]["validation"]["images"] == 12
    assert report["held_out"]["validation"]["top1"] > 0.7
    new = tmp_path / "new"
    new.mkdir()
    for shape in SHAPES:
        draw(shape, 99).save(new / f"{shape}.png")
    code, out, _ = invoke("predict", str(model / "model"), str(new), "--json", "--k", "2")
    answers = json.loads(out)
    assert code == 0
    assert [Path(answer["image"]).stem for answer in answers] == list(SHAPES)
    assert all(len(answer["best"]) == 2 for answer in answers)
    assert sum(answer["best"][0]["class"] == Path(answer["image"]).stem for answer in answers) >= 3


def test_ink_is_named_whether_dark_or_light(images: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", images, replace(RECIPE, look=Preprocessing()))
    model = str(tmp_path / "run" / "model")
    scores = []
    for dark in (False, True):
        draw("circle", 50, dark=dark).save(tmp_path / "one.png")
        _, out, _ = invoke("predict", model, str(tmp_path / "one.png"), "--json")
        best = json.loads(out)[0]["best"]
        assert len(best) == len(SHAPES)
        assert best[0]["class"] == "circle"
        scores.append(best[0]["score"])
    assert abs(scores[0] - scores[1]) < 0.1


@pytest.mark.parametrize("untouched", ["freeze", "elapsed"])
def test_an_interrupted_run_resumes_to_the_very_same_state(
    untouched: Untouched, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    recipe = replace(RECIPE, batch_size=2, sample_rate=0.75)  # so few that the sampled classes matter
    recipe = replace(recipe, row_momentum=0.9, row_momentum_untouched=untouched)
    train(straight, images, recipe)
    monkeypatch.setattr(job, "interruption", stop_after(17))
    stopped = train(broken, images, recipe)
    assert not stopped.finished and stopped.step == 17
    assert not (broken / "report.json").exists()
    monkeypatch.undo()
    resumed = train(broken, None, resume=True)
    assert resumed.finished and resumed.step == RECIPE.steps
    assert_same_state(straight, broken)
    for out in (straight, broken):  # no step is missing in the events, and none is there twice
        (events,) = (out / "events").iterdir()
        read = EventAccumulator(str(events)).Reload()
        # Files of one second and process are read by their number as text, the tenth before the ninth.
        assert sorted(event.step for event in read.Scalars("train/loss")) == [10, 20, 30, 40]
        assert sorted(event.step for event in read.Scalars("held_out/validation/top1")) == list(range(0, 41, 4))


def test_a_run_builds_its_network_once(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build, built = classifier.build_backbone, list[str]()

    def counted(name: str, *settings: Any, **own: Any) -> Any:
        built.append(name)
        return build(name, *settings, **own)

    monkeypatch.setattr(classifier, "build_backbone", counted)
    monkeypatch.setattr(job, "interruption", stop_after(1))
    train(tmp_path / "run", images)
    train(tmp_path / "run", None, resume=True)
    assert len(built) == 2


def test_other_steps_for_a_run_that_had_not_ended_are_refused(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "interruption", stop_after(1))
    train(tmp_path / "run", images, replace(RECIPE, steps=2))
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"--steps 7 is for a run that has ended; .* stands at step 1 of 2\. Leave"):
        train(tmp_path / "run", None, resume=True, resume_steps=7)
    assert train(tmp_path / "run", None, resume=True, resume_steps=2).step == 2


def reported(out: Path, images: Path, recipe: ClassifyRecipe, **changes: Any) -> tuple[str, dict[str, Any]]:
    said = said_by(out, images, recipe, **changes)
    return said, json.loads((out / "report.json").read_text(encoding="utf-8"))


def test_a_training_that_harms_leaves_the_start_as_the_model_and_says_so(images: Path, tmp_path: Path) -> None:
    ruinous = replace(RECIPE, lr=1e4, momentum=0.0)
    said, report = reported(tmp_path / "run", images, ruinous)
    assert "before the first step: validation top-1" in said and "(all 12 images)" in said
    assert "Training did not help: at no step" in said and "Try: more images" in said
    best, start = report["model"]["best"], report["model"]["start"]
    assert best == start and best["step"] == 0
    assert report["held_out"]["validation"]["top1"] == best["validation_top1"] > 0.7

    fine, report = reported(tmp_path / "fine", images, replace(RECIPE, imprint=False))  # begins at chance
    assert "The model is that of step " in fine
    assert report["model"]["best"]["step"] > 0
    assert report["held_out"]["validation"]["top1"] == report["model"]["best"]["validation_top1"]


def test_a_rate_is_found_once_and_stays_with_the_run(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nets_of_mine.py").write_text(
        "from torch import nn\n"
        "def build(num_channels, dim, size):\n"
        "    return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(num_channels * (size // 4) ** 2, dim))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    out, name = tmp_path / "run", "nets_of_mine:build"
    monkeypatch.setattr(job, "interruption", stop_after(10_000))
    recipe = replace(RECIPE, backbone=name, optimizer="adamw", lr=1e-3, row_lr=2e-3)
    said, report = reported(out, images, recipe, own_backbone=name, sweep=True)
    assert "Looking for a learning rate by trials of 2 steps" in said
    rates = [trial["lr"] for trial in report["sweep"]]
    assert rates == [1e-4, 3e-4, 1e-3, 3e-3] and min(abs(report["lr"] - rate) for rate in rates) < 1e-9
    saved = recipe_of(ClassifyRecipe, latest(out / "snapshots").manifest.job["recipe"])  # type: ignore[arg-type]
    assert (saved.lr, saved.row_lr, saved.lr * saved.rate) == (1e-3, 2e-3, report["lr"])

    with pytest.raises(ConfigError, match=f"if you trust it, say so: --backbone {name}"):
        train(out, None, resume=True)
    resumed = said_by(out, None, RECIPE, resume=True, resume_steps=5, own_backbone=name)
    assert json.loads((out / "report.json").read_text(encoding="utf-8"))["lr"] == report["lr"]
    assert "Looking for a learning rate" not in resumed
    code, _, _ = invoke("predict", str(out / "model"), str(images / "cross" / "0.png"), "--backbone", name)
    assert code == 0


def test_the_best_so_far_stays_the_best_of_a_run_that_goes_on(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ruinous = replace(RECIPE, lr=1e4, momentum=0.0)
    monkeypatch.setattr(job, "interruption", stop_after(17))
    train(tmp_path / "run", images, ruinous)
    before = load_file(tmp_path / "run" / "model" / "centers.safetensors")["centers"]
    monkeypatch.undo()
    result = train(tmp_path / "run", None, resume=True)
    assert result.report is not None and result.report["model"]["best"]["step"] == 0
    assert torch.equal(load_file(tmp_path / "run" / "model" / "centers.safetensors")["centers"], before)


@pytest.mark.parametrize("margin", ["none", "sphereface:16"])
def test_a_model_scores_as_it_was_trained(margin: str, images: Path, tmp_path: Path) -> None:
    _, report = reported(tmp_path / "run", images, replace(RECIPE, margin=margin))
    assert report["held_out"]["validation"]["top1"] > 0.7
    code, out, _ = invoke("predict", str(tmp_path / "run" / "model"), str(images / "cross" / "0.png"), "--json")
    assert code == 0
    score = json.loads(out)[0]["best"][0]["score"]
    assert score > 1 if margin == "none" else score < 1.001


def test_a_training_that_diverges_keeps_its_best_model_and_offers_a_lower_rate(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ruinous = replace(RECIPE, margin="none", lr=30.0, row_momentum=0.9)
    with pytest.raises(
        TrainingDiverged, match=r"diverged at step \d+ \(.*best before.* such as --set lr=10 \(it was 30\)"
    ):
        reported(out, images, ruinous)
    report = json.loads((out / "report.json").read_text())
    assert 0 < report["diverged_at"] < RECIPE.steps and report["model"]["best"]["step"] < report["diverged_at"]
    assert report["held_out"]["validation"]["top1"] == report["model"]["best"]["validation_top1"]
    code, _, _ = invoke("predict", str(out / "model"), str(images / "cross" / "0.png"))
    assert code == 0


@pytest.mark.parametrize("image_memory", [1024, 0])
def test_unreadable_images_are_left_out_counted_and_named(image_memory: int, images: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (images / "cross" / f"{name}.png").write_bytes(b"torn")
    lenient = replace(RECIPE, skip_unreadable=True, image_memory=image_memory)
    said, report = reported(tmp_path / "run", images, lenient)
    assert [Path(name).name for name in report["unreadable"]] == ["a.png", "b.png"]
    assert "Left out 2 unreadable images: " in said and "" not in said.splitlines()
    assert report["held_out"]["validation"]["top1"] > 0.7
    resumed = train(tmp_path / "run", None, resume=True, resume_steps=1)
    assert resumed.report is not None and len(resumed.report["unreadable"]) == 2


def test_a_class_of_which_nothing_can_be_read_is_named(images: Path) -> None:
    for path in (images / "cross").iterdir():
        path.write_bytes(b"torn")
    with pytest.raises(InvalidArgument, match=r"no image to train on can be read of 1 class: cross"):
        load_folder(images, LOOK, held_out=0.25, seed=0, console=QUIET, skip_unreadable=True)


def test_ctrl_c_saves_and_says_how_to_go_on(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "geartrain", "worker", "classify", "--data", str(images), "--out", str(out)]
    settings = ["lr=0.1", "batch_size=8", "look.size=32", "look.channels=1"]  # neither trials of rates nor long steps
    command += ["--steps", "100000", "--device", "cpu", *(f"--set={setting}" for setting in settings)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            lines: list[str] = []
            for line in process.stdout:
                lines.append(line)
                if line.startswith("step ") and process.poll() is None:
                    process.send_signal(signal.SIGINT)
                    break
            lines += process.stdout.readlines()
            assert process.wait(timeout=60) == 3
        finally:
            process.kill()
    assert f"geartrain worker classify --resume {out}" in "".join(lines)
    assert 10 <= list_snapshots(out / "snapshots")[0].snapshot.manifest.step < 100000  # type: ignore[union-attr]


def test_a_run_is_never_started_over_unasked(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    recipe = replace(RECIPE, steps=1)
    train(out, images, recipe)
    (out / "notes.txt").write_text("mine")
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    with pytest.raises(ConfigError, match=rf"{out} already holds a run.*--resume {out}.*--out.*--overwrite"):
        train(out, images, recipe)
    with pytest.raises(ConfigError, match="gone is not there"):  # which is told first
        train(out, tmp_path / "gone", recipe)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    train(out, images, recipe, overwrite=True)
    assert len(list((out / "events").iterdir())) == 1  # what is shown beside the new run is its own
    assert (out / "notes.txt").read_text() == "mine"
    aside = tmp_path / "run.previous"
    assert {path.relative_to(aside) for path in aside.rglob("*")} == {
        path.relative_to(out) for path in before if path.name != "notes.txt"
    }


@pytest.mark.parametrize("out", ["", "runs/here"])
def test_a_run_among_its_own_images_is_refused(out: str, images: Path) -> None:
    before = sorted(images.rglob("*"))
    with pytest.raises(ConfigError, match=r"lies in the images' folder .* give an --out beside it"):
        train(images / out, images, ONE_STEP)
    assert sorted(images.rglob("*")) == before


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_run_of_an_earlier_torchrun_of_the_same_name_is_left_alone(
    nodes: int, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, recipe = tmp_path / "run", replace(RECIPE, steps=1)
    for name, value in {"RUN_ID": "nightly", "RESTART_COUNT": "0"}.items():
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(2 - nodes))
    train(out, images, recipe)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert train(out, images, recipe).step == 1  # the same torchrun

    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as later:
        monkeypatch.setattr(os, "getppid", lambda: later.pid)
        monkeypatch.setattr(job, "_CLOCKS_DIFFER_SECONDS", -1.0)  # when a process began is known to a second
        with pytest.raises(ConfigError, match="already holds a run"):
            train(out, images, recipe)


def test_a_run_goes_on_where_it_was_moved_to(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = replace(RECIPE, steps=1)
    train(tmp_path / "run", images, recipe)
    train(tmp_path / "run", images, recipe=replace(recipe, steps=2), overwrite=True)
    assert train(tmp_path / "run.previous", None, resume=True, resume_steps=4).step == 5
    assert train(tmp_path / "run", None, resume=True, resume_steps=4).step == 6

    monkeypatch.chdir(tmp_path)
    train(Path("other"), images, recipe, snapshots="elsewhere")
    monkeypatch.chdir(images)
    assert train(tmp_path / "other", None, resume=True, resume_steps=4).step == 5


def test_a_run_is_not_put_aside_for_one_that_cannot_begin(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(RECIPE, steps=1)
    train(tmp_path / "run", images, recipe, snapshots=str(tmp_path / "elsewhere"))
    with pytest.raises(ConfigError, match="already holds snapshots"):
        train(tmp_path / "run", images, recipe, overwrite=True, snapshots=str(tmp_path / "elsewhere"))
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="--logger wandb needs wandb"):
        train(tmp_path / "run", images, recipe, overwrite=True, loggers=("wandb",))
    assert (tmp_path / "run" / "report.json").exists()
    assert not (tmp_path / "run.previous").exists()
    for _ in range(2):
        train(tmp_path / "run", images, recipe, overwrite=True, snapshots=str(tmp_path / "run" / "snapshots"))


def test_a_run_that_saved_nothing_is_not_put_aside_over_one_that_did(images: Path, tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise SnapshotFailed("the disk is full")

    train(tmp_path / "run", images, replace(RECIPE, steps=1))
    for _ in range(3):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SnapshotFailed, match="begins with a snapshot"):
            patch.setattr(JobSnapshots, "require", fail)
            train(tmp_path / "run", images, RECIPE, overwrite=True)
        assert (tmp_path / "run.previous" / "report.json").exists()
    (tmp_path / "larger disk").mkdir()
    (tmp_path / "run" / "snapshots").symlink_to(tmp_path / "larger disk")
    assert train(tmp_path / "run", images, replace(RECIPE, steps=2), overwrite=True).step == 2
    assert read_report(tmp_path / "run.previous")["steps"] == 1  # type: ignore[index]


def test_a_run_that_died_before_it_saved_is_not_said_to_be_resumable(images: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / "events").mkdir(parents=True)
    with pytest.raises(ConfigError, match="took no snapshot") as caught:
        train(tmp_path / "run", images)
    assert "--resume" not in str(caught.value)
    (tmp_path / "file").write_bytes(b"")
    for inside_a_file in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match=r"--out is .*file is not a folder"):
            train(inside_a_file, images)


def test_what_cannot_be_trained_on_leaves_the_run_to_be_overwritten(images: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", images, ONE_STEP)
    with pytest.raises(ConfigError, match="nowhere is not there"):
        train(tmp_path / "run", tmp_path / "nowhere", overwrite=True)
    assert (tmp_path / "run" / "report.json").exists()


def test_a_run_is_not_both_resumed_and_replaced(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--overwrite .* --resume"):
        invoke("worker", "classify", "--resume", str(tmp_path), "--overwrite")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("batch_size=7", "batch_size is 7, but the run in .* was begun with 16; give that, or leave it out"),
        ("look.size=64", "look.size is 64, but"),
        ("held_out=0.2", "held_out is 0.2, but"),
        ("skip_unreadable=true", "skip_unreadable is True, but"),
    ],
)
def test_settings_of_a_resumed_run_cannot_be_changed(model: Path, setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        invoke("worker", "classify", "--resume", str(model), "--set", setting)


def test_the_recipe_of_a_run_can_be_given_again(pictures: Path, model: Path, tmp_path: Path) -> None:
    again = ["--recipe", str(model / "recipe.yaml"), "--set", "snapshots.keep=3", "--logger", "none"]
    code, said, _ = invoke("worker", "classify", "--data", str(pictures), "--out", str(tmp_path / "run"), *again)
    assert code == 0, said
    assert_same_models(model, tmp_path / "run")
    first, second = (read_recipe(out / "recipe.yaml") for out in (model, tmp_path / "run"))
    assert second == first | {"snapshots": first["snapshots"] | {"keep": 3}}


def test_a_lost_model_of_a_trained_run_is_written_anew(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(out, images, replace(RECIPE, steps=2))
    expected = load_file(out / "model" / "centers.safetensors")["centers"]
    shutil.rmtree(out / "model")
    run = json.loads((out / "run.json").read_text(encoding="utf-8"))
    (out / "run.json").write_text(json.dumps(run | {"ended": False}), encoding="utf-8")  # it died in its evaluation
    assert train(out, None, resume=True).report is not None
    assert torch.equal(load_file(out / "model" / "centers.safetensors")["centers"], expected)


def test_a_run_is_resumed_by_its_own_command(images: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", images, ONE_STEP)
    with pytest.raises(ConfigError, match="worker classify"):
        train(tmp_path / "run", None, job="glyphs", resume=True)
    with pytest.raises(ConfigError, match="does not exist"):
        train(tmp_path / "nowhere", images, resume=True)
    with pytest.raises(ConfigError, match="--data"):
        train(tmp_path / "new", None)


def test_folders_that_are_no_classification_data_are_refused(images: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidArgument, match="0 sub-folders"):
        find_classes(tmp_path / "empty")
    (tmp_path / "one" / "only").mkdir(parents=True)
    with pytest.raises(InvalidArgument, match="1 sub-folder;"):
        find_classes(tmp_path / "one")
    (images / "hollow").mkdir()
    with pytest.raises(InvalidArgument, match="hollow"):
        find_classes(images)
    with pytest.raises(InvalidArgument, match="not a folder"):
        find_classes(images / "circle" / "0.png")


def test_the_split_keeps_every_class_in_training_and_depends_on_the_seed_alone(images: Path) -> None:
    first = load_folder(images, LOOK, held_out=0.25, seed=1, console=QUIET)
    again = load_folder(images, LOOK, held_out=0.25, seed=1, console=QUIET)
    other = load_folder(images, LOOK, held_out=0.25, seed=2, console=QUIET)
    assert torch.equal(first.validation.bitmaps, again.validation.bitmaps)
    assert not torch.equal(first.validation.bitmaps, other.validation.bitmaps)
    assert first.train.labels.bincount().tolist() == [9] * 4
    everything = load_folder(images, LOOK, held_out=0.999, seed=1, console=QUIET)
    assert everything.train.labels.bincount().tolist() == [1] * 4


def test_predict_names_what_it_cannot_read_and_goes_on(pictures: Path, model: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.png"
    bad.write_text("not an image")
    good = pictures / "circle" / "0.png"
    code, out, err = invoke("predict", str(model), str(bad), str(good))
    assert code == 1
    assert "bad.png" in err
    assert str(good) in out and "circle" in out
    with pytest.raises(ConfigError, match="does not exist"):
        invoke("predict", str(tmp_path / "nowhere"), str(good))
    with pytest.raises(ConfigError, match=r"none\.png: no such file or folder"):  # exits with 2: wrong usage
        invoke("predict", str(model), str(good), str(tmp_path / "none.png"))


def test_predict_never_gives_fewer_answers_than_asked_for(pictures: Path, model: Path) -> None:
    good = str(pictures / "circle" / "0.png")
    with pytest.raises(InvalidArgument, match="k is 5; it must be an integer from 1 to 4"):
        invoke("predict", str(model), good, "-k", "5")
    code, _, err = invoke("predict", str(model), good, "-k", "0")
    assert code == 2 and "Usage: " in err
