"""A worker's job that selects by a graph: it trains, tells of the graph, and goes on with it after a stop."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from geartrain.ams.programs.selection import FullSoftmax, PartialFC
from geartrain.ams.storage.snapshot.folder import list_snapshots
from geartrain.bridge.head.selection.knn_selection import KNNSoftmax
from geartrain.bridge.rows.serialization import state_from_bytes
from geartrain.workers.classify.graph_progress import GraphProgressPrinter
from geartrain.workers.job import job, trainer
from geartrain.workers.job.state import JobState
from geartrain.workers.job.trainer import Phases
from geartrain.workers.recipes.recipe import ClassifyRecipe, Recipe, selection_of
from tests.integration.jobs.small_job import GREY, classify, draw_images, rows_of, said_by, stop_after
from tests.support.plain_graph import use_plain_graphs

CLASSES = 10
RECIPE = ClassifyRecipe(
    steps=12,
    batch_size=8,
    width=8,
    dim=8,
    select="knn",
    sample_rate=0.5,
    neighbours=2,
    rebuild=4,
    warmup_steps=2,
    look=GREY,
    held_out=0.25,
)


@pytest.fixture(autouse=True)
def small_and_plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use_plain_graphs(monkeypatch)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return draw_images(tmp_path / "images", CLASSES)


def test_a_stopped_job_goes_on_with_the_graph_it_had(
    tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert said_by(tmp_path / "whole", images, RECIPE).count(f"Graph of {CLASSES} classes built in") == 3

    in_two = tmp_path / "in-two"
    with monkeypatch.context() as told:
        told.setattr(job, "interruption", stop_after(6))
        classify(in_two, images, RECIPE)
    newest = list_snapshots(in_two / "snapshots")[0].snapshot
    assert newest is not None
    state = JobState.read(newest, "classify", ClassifyRecipe)
    graph = state.data["head"]["graph"]
    assert {name: graph[name] for name in ("version", "step", "is_due", "classes")} == {
        "version": 2,
        "step": 4,
        "is_due": False,
        "classes": 0,
    }
    assert state_from_bytes(state.files["graph.safetensors"])["step"] == 4

    assert said_by(in_two, images, RECIPE, resume=True).count("classes built in") == 1  # that of step 8 alone
    torch.testing.assert_close(rows_of(in_two), rows_of(tmp_path / "whole"), rtol=0, atol=0)


def test_a_new_pass_over_the_data_renews_the_graph(tmp_path: Path, images: Path) -> None:
    said = said_by(tmp_path / "run", images, replace(RECIPE, rebuild="epoch"))
    # 30 images, 8 a step: steps 4, 8 and 12 are the first to begin in another epoch, and 12 is not trained.
    assert said.count("classes built in") == 3


def test_the_report_states_the_time_of_the_graphs_apart_from_that_of_the_steps(tmp_path: Path, images: Path) -> None:
    classify(tmp_path / "run", images, RECIPE)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert {"projection", "imprint", "graph", "steps"} < set(report["phases"])
    parts = ("projection", "imprint", "graph", "steps", "looks")
    assert sum(report["phases"][part] for part in parts) == pytest.approx(report["train_seconds"])


def test_a_phase_measured_within_another_one_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 1.0, 5.0, 7.0])
    monkeypatch.setattr(trainer.time, "perf_counter", lambda: next(moments))
    phases = Phases()
    with phases.measured("outer"), phases.measured("inner"):
        pass
    assert phases.seconds == {"inner": 4.0, "outer": 3.0}


def test_the_recipe_says_which_classes_are_active() -> None:
    assert selection_of(RECIPE) == KNNSoftmax(active=0.5, k=2, rebuild=4)
    assert selection_of(replace(RECIPE, rebuild="background")) == KNNSoftmax(active=0.5, k=2, rebuild="background")
    assert selection_of(Recipe()) == PartialFC(0.1)
    assert selection_of(Recipe(sample_rate=1.0)) == FullSoftmax() == selection_of(Recipe(select="full"))


def test_a_long_build_tells_how_long_it_still_takes() -> None:
    said: list[str] = []
    times = iter([100.0, 101.0, 106.0, 110.0])
    lines = GraphProgressPrinter(40_992, said.append, clock=lambda: next(times))
    for done in (0, 10, 60, 100):
        lines(done, 100)
    assert said == ["Graph of 40,992 classes: 60 %, 4 s left", "Graph of 40,992 classes built in 10.0 s"]
