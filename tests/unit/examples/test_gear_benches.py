"""The benches of gear training at a tiny size: the rival is plain autograd, and both train what they say."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gear_data.halves import halve_task
from gear_data.movielens import Ratings
from gear_data.page_views import PageViews, make_page_views
from torch.nn import functional

from geartrain.ams.values.errors import ConfigError
from geartrain.launch.bench import run_bench
from geartrain.workers.data.images import ImageSet

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def benches() -> Iterator[Any]:
    """Imports a file of benchmarks/ by name."""
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def data() -> PageViews:
    random = np.random.default_rng(0)
    ratings = Ratings(random.integers(20, size=900), random.integers(128, size=900), random.integers(1, 6, size=900))
    glyphs = random.integers(256, size=(300, 32, 32), dtype=np.uint8)
    return make_page_views(ratings, glyphs, images_per_movie=1)


def losses(trainer: Any, batches: list[Any]) -> list[float]:
    """Loss of each step."""
    found: list[float] = []
    plain = functional.binary_cross_entropy_with_logits

    def noted(*arguments: Any) -> Any:
        loss = plain(*arguments)
        found.append(float(loss.detach()))
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "binary_cross_entropy_with_logits", noted)
        for views in batches:
            trainer.step(views)
    return found


def test_the_rival_is_plain_autograd_without_deduplication(benches: Any, data: PageViews) -> None:
    task, conventional = benches("_gear_task"), benches("_conventional_gear")
    batches = list(data.train.batches(64, seed=0))[:6]
    assert any(len(views.images.unique()) < len(views) for views in batches)
    ours = losses(conventional.ConventionalTrainer(data, blocks=1), batches)
    dense, fast = task.build_dense(1, 0).double(), task.build_fast(data, 0).double()
    dense.forward = lambda images: _features(dense, images)
    optimizer = torch.optim.Adam([*dense.parameters(), *fast.parameters()], lr=task.LEARNING_RATE)
    for views, expected in zip(batches, ours, strict=True):
        logits = fast(views, dense(data.pictures[views.images]))
        loss = functional.binary_cross_entropy_with_logits(logits, views.labels.double())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert loss.item() == pytest.approx(expected, rel=1e-4)


def _features(dense: Any, images: torch.Tensor) -> torch.Tensor:
    """CreativeNet in float64, written once more."""
    maps = dense.stem(images.double() / 255).relu()
    for block in dense.blocks:
        maps = maps + block(maps).relu() / 2
    return dense.head(functional.adaptive_avg_pool2d(dense.norm(maps), 4).flatten(1))


def test_gear_training_without_its_tricks_is_the_rival(benches: Any, data: PageViews) -> None:
    conventional, gear = benches("_conventional_gear"), benches("_gear_trainer")
    batches = list(data.train.batches(64, seed=0))[:6]
    expected = losses(conventional.ConventionalTrainer(data, blocks=1), batches)
    trainer = gear.GearTrainer(
        data, gear.TrainingClock(), blocks=1, expire_seconds=0.0, gradients_per_id=1, ids_per_update=1
    )
    assert losses(trainer, batches) == pytest.approx(expected, rel=1e-4)
    assert trainer.hit_rate == 0.0
    trainer.close()


def test_clocks_stand_still_while_others_have_their_turn(benches: Any) -> None:
    gear = benches("_gear_trainer")
    clock = gear.TrainingClock(speed=1000.0)
    before = clock()
    assert clock() == before
    with clock.running():
        while clock() < before + 5:
            pass
    assert clock() - before == pytest.approx(1000 * clock.real_seconds, abs=1e-3)
    steps = gear.StepClock(0.5)
    steps.tick()
    assert steps() == gear.StepClock(0.5)() + 0.5


def test_ids_recur_as_often_as_the_bench_says(benches: Any, data: PageViews) -> None:
    task = benches("_gear_task")
    batches = list(task.recurring(data, 256, 3, seed=0))
    assert all(len(views.images.unique()) == task.BATCH for views in batches)
    assert torch.bincount(torch.cat([views.images for views in batches])).tolist() == [3] * 256


def test_the_formula_agrees_with_a_simulation(benches: Any) -> None:
    formula = benches("_gear_formula")
    random = np.random.default_rng(0)
    rates, steps, life = np.array([0.02, 0.1, 0.5]), 40_000, 30
    hits = asked = 0
    for rate in rates:
        last = -np.inf
        for step in np.flatnonzero(random.random(steps) < rate):
            asked += 1
            if step - last < life:
                hits += 1
            else:
                last = step
    assert formula.hit_rate(rates, life, 1.0, steps) == pytest.approx(hits / asked, abs=0.02)
    assert formula.hit_rate([1.0], 1e9, 1.0, 50) == pytest.approx(0.98)
    assert formula.hit_rate([1.0], 0.0, 1.0, 50) == 0.0
    assert formula.hit_rate([0.1], 10, 1.0, 50_000, 4) == pytest.approx(1 - (1 / 2 - 1 / 4))
    gain, hit = formula.predicted([0.25], ratio=20, gradients_per_pass=16, expire_steps=10, steps=200)
    assert gain == pytest.approx(formula.speed_up(20, hit, 16), rel=1e-3)
    assert hit == pytest.approx(formula.hit_rate([0.25], 10, 1 / gain, 200, 16), rel=1e-3)


@pytest.fixture
def tiny(benches: Any, data: PageViews, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The benches with little to do, and nothing to fetch."""
    monkeypatch.chdir(tmp_path)
    task = benches("_gear_task")
    monkeypatch.setattr(task, "load_page_views", lambda *_, **__: data)
    task.page_views.cache_clear()
    monkeypatch.setattr(task, "BATCH", 128)
    yield tmp_path
    task.page_views.cache_clear()


def assert_results(found: list[Any]) -> None:
    for result in found:
        assert result["ours"] >= 0 and result["theirs"] > 0 and result["ratio"] > 0 and result["case"]


def test_the_bench_of_throughput_runs(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = _bench("gear", monkeypatch, blocks_for=lambda *_: (1, 20.0), RECURRENCES=3, THROUGHPUT_IDS=128, STEPS=4)
    found = list(module.results())
    assert_results(found)
    assert [result["target"] for result in found] == [5.0, 2.5, None, None, None, 1.67, None]
    kept = json.loads((tiny / ".cache" / "gear" / "throughput.json").read_text())
    assert [row["M"] for row in kept["rows"]] == [16, 4]


def test_the_bench_of_accuracy_runs(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = _bench(
        "gear_accuracy", monkeypatch, blocks_for=lambda *_: (1, 20.0), SECONDS=0.3, TESTS=2, SEEDS=2, STEPS=4
    )
    found = list(module.results())
    assert_results(found)
    assert "equal" not in found[0]["case"] and found[0]["unit"] == "points"
    curves = json.loads((tiny / ".cache" / "gear" / "equal_time.json").read_text())["curves"]
    assert len(curves["gear training"]) == len(curves["conventional"]) == 3


@pytest.fixture
def halves(benches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few images of noise in halves instead of glyphs."""
    random = torch.Generator().manual_seed(0)
    sets = [
        ImageSet(torch.randint(256, (count, 1, 32, 32), generator=random, dtype=torch.uint8), torch.arange(count) % 200)
        for count in (128, 40)
    ]
    task = benches("_halves_task")
    monkeypatch.setattr(task, "glyph_halves", lambda: halve_task(200, sets[0], {"other font": sets[1]}))


@pytest.mark.usefixtures("halves")
def test_a_link_slows_conventional_training_and_not_a_worker_beside_its_slow_gear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = _bench("gear_places", monkeypatch, CHANNELS=1)
    conventional = module._curve(None, 100.0, False, 200.0)[-1]  # in which two updates of each worker travel
    assert conventional.steps == conventional.updates == 4
    apart = module._curve(module.Gear(gradients_per_id=100, expire_seconds=100.0), 100.0, True, 0.5)[-1]
    assert apart.steps > 4 and apart.updates == 0


@pytest.mark.usefixtures("halves")
def test_the_bench_of_convergence_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = _bench("gear_convergence", monkeypatch, ROUNDS=2, TEST_EVERY=1, EXPIRIES=(0.0, 20.0), WORKERS=(1, 2))
    found = list(module.results())
    assert len(found) == 4
    curves = json.loads((tmp_path / ".cache" / "gear" / "by_workers.json").read_text())
    assert [step for step, _ in curves["gear, 2"][0]] == [1, 2]


def test_what_was_measured_is_written_into_the_document(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(BENCHMARKS.parent / "scripts")
    script = runpy.run_path(str(BENCHMARKS.parent / "scripts" / "gear_document.py"))
    kept, document = tiny / ".cache" / "gear", tiny / "gear.md"
    document.write_text(f"before\n{script['BEGIN']}\nold\n{script['END']}\nafter\n")
    script["main"](kept=kept, docs=tiny)
    assert "Not measured yet" in document.read_text()
    module = _bench("gear", monkeypatch, blocks_for=lambda *_: (1, 20.0), RECURRENCES=3, THROUGHPUT_IDS=128, STEPS=4)
    found = list(module.results())
    script["main"](kept=kept, docs=tiny, png=tiny / "png")
    text = document.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    row = next(line for line in text.splitlines() if line.startswith("| 16 | 5 s | 3 |"))
    assert abs(float(row.split("|")[6]) - found[0]["ratio"]) < 0.11
    assert (tiny / "gear-time.svg").read_text().startswith("<?xml") and (tiny / "png" / "gear-time.png").exists()


def test_data_that_cannot_be_had_end_a_bench_with_the_remedy(
    benches: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    benches("_gear_task").page_views.cache_clear()
    monkeypatch.setattr(benches("gear_data.movielens"), "download_packages", lambda *_: False)
    with pytest.raises(ConfigError, match="PIP_ARGS"):
        list(run_bench("gear_accuracy", BENCHMARKS))


def _bench(name: str, monkeypatch: pytest.MonkeyPatch, **sizes: Any) -> Any:
    module = importlib.import_module(name)
    for key, value in sizes.items():
        assert hasattr(module, key), key
        monkeypatch.setattr(module, key, value)
    return module
