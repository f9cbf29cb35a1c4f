"""``geartrain worker ctr`` on files that are read as they are needed: each sample once an epoch, and a run that was
stopped ends as one that was not.
"""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rich.console import Console

import geartrain as gt
from geartrain.ams.storage.snapshot.folder import latest
from geartrain.ams.values.specs import TableSpec
from geartrain.bridge.pipeline import prefetch
from geartrain.workers import jobs
from geartrain.workers.ctr.designs import Design, layout_of
from geartrain.workers.ctr.recipe import CtrRecipe, recipe_for
from geartrain.workers.ctr.samples.own import OwnSamples
from geartrain.workers.ctr.samples.settings import FeatureSettings
from geartrain.workers.ctr.streamed import StreamedBatches
from geartrain.workers.ctr.trainer import ClickTrainer
from geartrain.workers.job import job, ranks
from geartrain.workers.job.options import JobOptions, JobResult
from tests.integration.jobs.small_job import StopWhen
from tests.support.command_line import typed

pa = pytest.importorskip("pyarrow", reason="samples from files need the extra data")
pq = pytest.importorskip("pyarrow.parquet", reason="samples from files need the extra data")
csv = pytest.importorskip("pyarrow.csv", reason="samples from files need the extra data")
COUNT = 1000
SMALL: dict[str, Any] = {"dim": 4, "hidden": (8,), "batch_size": 50, "row_lr": 0.05, "window_rows": 128, "patience": 0}


def table(count: int = COUNT, first: int = 0) -> Any:
    """Users come several times in a row; ``at`` numbers the samples."""
    random = np.random.default_rng(first)
    user = np.sort(random.integers(first, first + 30, count))
    item = random.integers(20, size=count)
    at = np.arange(first, first + count)
    return pa.table({"click": (user + item) % 2, "user": user, "item": item, "at": at, "time": at})


def written(folder: Path, kind: str) -> str:
    """Two files of several parts."""
    (folder / kind).mkdir(parents=True)
    for number, rows in enumerate((table(600), table(400, 600))):
        if kind == "csv":
            csv.write_csv(rows, folder / kind / f"{number}.csv")
        else:
            pq.write_table(rows, folder / kind / f"{number}.parquet", row_group_size=170)
    if kind != "trees":
        return str(folder / kind)
    gt.compress_samples(folder / kind, folder / "compressed", ["user", "item"], rows_per_group=170)
    return str(folder / "compressed")


def batches(place: str, **recipe: Any) -> tuple[StreamedBatches, CtrRecipe]:
    given = CtrRecipe(**{**SMALL, **recipe})
    samples = OwnSamples(place, times=False)
    return StreamedBatches(samples, given, Design(given, layout_of(samples))), given


def numbers(batch: Any) -> list[int]:
    at = batch.ids["at"]
    level = batch.ids.level_of.get("at")
    return [int(number) for number in (at if level is None else at[batch.ids.index[level]])]


@pytest.mark.parametrize("kind", ["parquet", "csv", "trees"])
@pytest.mark.parametrize("split", ["random", "time"])
@pytest.mark.parametrize("validation", [False, True])
def test_every_sample_is_trained_on_once_an_epoch_or_held_out(
    tmp_path: Path, kind: str, split: str, validation: bool
) -> None:
    stream, _ = batches(written(tmp_path, kind), split=split, validation=validation)
    held_out = [number for of in (stream.validated(), stream.tested()) for batch in of for number in numbers(batch)]
    assert len(held_out) == stream.num_validated + stream.num_tested
    trained = [number for step in range(3 * COUNT // 50) for number in numbers(stream.trained(step))]
    per_epoch = stream.num_trained
    epochs = [trained[first : first + per_epoch] for first in (0, per_epoch)]
    assert epochs[0] != epochs[1] and sorted(epochs[0]) == sorted(epochs[1])
    seen = sorted([*held_out, *epochs[0]])
    assert len(set(seen)) == len(seen)
    if validation:
        assert len(seen) < COUNT and len(held_out) == pytest.approx(0.16 * COUNT, abs=8)
    else:
        assert seen == list(range(COUNT)) and len(held_out) == pytest.approx(COUNT // 5, abs=14)
    if split == "time":
        assert max(epochs[0]) < min(held_out)


def test_no_more_are_held_out_than_is_said_and_those_of_few_parts(tmp_path: Path) -> None:
    place = written(tmp_path, "parquet")
    for split in ("random", "time"):
        stream, _ = batches(place, split=split, held_out=40)
        assert stream.num_validated + stream.num_tested == pytest.approx(40, abs=4)
        assert stream.num_trained + stream.num_validated + stream.num_tested == COUNT
    assert len(batches(place, held_out=40)[0]._held_out.parts) == 2


@pytest.mark.parametrize("validation", [False, True])
@pytest.mark.parametrize(("days", "most"), [(2, 160_000), (3, 160_000), (10, 50)])
def test_of_a_latest_time_with_too_many_samples_some_are_held_out_at_random(
    tmp_path: Path, days: int, most: int, validation: bool
) -> None:
    at = np.arange(COUNT)
    rows = table().set_column(4, "time", pa.array(at * days // COUNT * 86_400))
    pq.write_table(rows, tmp_path / "a.parquet", row_group_size=170)
    recipe = {"split": "time", "held_out": most, "validation": validation}
    stream, again = (batches(str(tmp_path / "a.parquet"), **recipe)[0] for _ in range(2))
    held_out, same = (
        [number for of in (one.validated(), one.tested()) for batch in of for number in numbers(batch)]
        for one in (stream, again)
    )
    assert held_out == same and len(set(held_out)) == len(held_out)
    of_latest = COUNT // days - COUNT // 5  # of the latest time, those that validation is of
    assert len(held_out) == (min(160, of_latest, most) if validation and most > 50 else min(200, most))
    trained = {number for step in range(COUNT // 50) for number in numbers(stream.trained(step))}
    assert not trained & set(held_out) and stream.num_trained + len(held_out) <= COUNT
    assert min(held_out) * days // COUNT == days - 1
    assert held_out != sorted(held_out)


def test_samples_of_one_time_are_not_split_by_time(tmp_path: Path) -> None:
    for validation, times in ((False, [1] * 10), (True, [1] * 9 + [2])):
        rows = table(10).set_column(4, "time", pa.array(times))
        pq.write_table(rows, tmp_path / "a.parquet")
        with pytest.raises(gt.errors.ConfigError, match=r"there are 10 samples, 0 of them .* of several times"):
            batches(str(tmp_path / "a.parquet"), split="time", validation=validation)


def test_any_step_is_read_from_the_middle(tmp_path: Path) -> None:
    place = written(tmp_path, "parquet")
    stream, _ = batches(place)
    first = [numbers(stream.trained(step)) for step in range(40)]
    again, _ = batches(place)
    for step in (39, 17, 18, 3):
        assert numbers(again.trained(step)) == first[step]


def train(out: Path, data: str | None, options: dict[str, Any] | None = None, **recipe: Any) -> JobResult:
    settings = recipe_for(data, snapshots={"steps": 10}, **{**SMALL, **recipe})
    given = JobOptions(job="ctr", out=out, recipe=settings, data=data, loggers=(), **(options or {}))
    return jobs.train(given, Console(file=io.StringIO(), width=400))


ADMITTED = {"user": {"admission": 8}, "item": {"admission": 0.2}, "at": {"admission": 2, "max_bytes": 30_000}}


@pytest.mark.parametrize(
    ("kind", "features"), [("parquet", {}), ("csv", {}), ("trees", {}), ("parquet", ADMITTED)], ids=str
)
def test_a_run_that_was_stopped_ends_as_one_that_was_not(
    tmp_path: Path, kind: str, features: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks.secrets, "randbits", lambda _: 7)  # initial values depend on the tables' names
    place = written(tmp_path, kind)
    whole = train(tmp_path / "whole" / "run", place, features=features)
    stop_at(23, monkeypatch, lambda: train(tmp_path / "stopped" / "run", place, features=features))
    ended = train(tmp_path / "stopped" / "run", None, {"resume": True})
    assert whole.report is not None and ended.report is not None
    assert ended.step == whole.step == 48 and ended.report["held_out"] == whole.report["held_out"]
    assert whole.report["held_out"]["samples"] == 175
    assert features or whole.report["held_out"]["auc"] > 0.6


def stop_at(step: int, monkeypatch: pytest.MonkeyPatch, run: Callable[[], JobResult]) -> None:
    steps = iter(range(step))
    with monkeypatch.context() as patch:
        patch.setattr(job, "interruption", lambda: nullcontext(StopWhen(lambda: next(steps, None) is None)))
        assert run().step == step


def test_settings_of_tables_are_others_from_where_a_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, out = written(tmp_path, "parquet"), tmp_path / "run"
    stop_at(23, monkeypatch, lambda: train(out, place, features={"item": {"admission": 30}, "user": {"expiry": 3}}))
    said = {"item": {"admission": 3, "max_bytes": 100_000}, "user": {"expiry": None}}
    stated = tuple(f"features.{name}.{key}" for name, settings in said.items() for key in settings)
    assert train(out, None, {"resume": True, "stated": stated}, features=said).step == 48
    specs = map(TableSpec.from_dict, latest(out / "snapshots").manifest.tables)
    tables = {spec.name.partition("/")[2]: spec for spec in specs}
    for name in ("item", "item_weight"):
        assert (tables[name].admission, tables[name].max_bytes) == (gt.MinCount(3), 100_000)
        assert tables[name].expiry is None
    assert tables["user"].expiry is None and tables["user"].admission is None
    features = yaml.safe_load((out / "recipe.yaml").read_text(encoding="utf-8"))["features"]
    assert (features["item"]["admission"], features["user"]["expiry"], features["item"]["kind"]) == (3, None, "int64")


def test_a_run_that_reads_and_pulls_ahead_is_the_run_that_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks.secrets, "randbits", lambda _: 7)  # initial values depend on the tables' names
    place, pulls = written(tmp_path, "trees"), []
    plain = train(tmp_path / "plain" / "run", place)
    pulled = prefetch.pull
    monkeypatch.setattr(prefetch, "pull", lambda rows: (pulls.append(1), pulled(rows)))
    steps = iter(range(23))
    with monkeypatch.context() as patch:
        patch.setattr(job, "interruption", lambda: nullcontext(StopWhen(lambda: next(steps, None) is None)))
        assert train(tmp_path / "ahead" / "run", place, prefetch=3).step == 23
    ahead = train(tmp_path / "ahead" / "run", None, {"resume": True, "stated": ("prefetch",)}, prefetch=1)
    assert plain.report is not None and ahead.report is not None and len(pulls) >= 48
    assert ahead.step == plain.step and ahead.report["held_out"] == plain.report["held_out"]
    assert not [thread for thread in threading.enumerate() if "prefetch" in thread.name]


def test_features_are_written_down_and_other_samples_are_read_by_them(tmp_path: Path) -> None:
    place, out = written(tmp_path, "parquet"), tmp_path / "run"
    said = ["features.item.dim=4", "features.item.admission=2", "features.at.kind=none", "features.user.expiry=500"]
    said += ["features.user.max_bytes=1000000", "dim=4", "batch_size=50"]
    done = typed("worker", "ctr", "--data", place, "--out", str(out), *(f"--set={setting}" for setting in said))
    assert done.returncode == 0, done.stderr
    features = yaml.safe_load((out / "recipe.yaml").read_text(encoding="utf-8"))["features"]
    assert set(features) == {"user", "item", "at"}
    assert (features["user"]["kind"], features["item"]["admission"], features["at"]["kind"]) == ("int64", 2, "none")
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert report["recipe"]["features"] == features
    again = typed("worker", "ctr", "--data", place, "--recipe", str(out / "recipe.yaml"), "--out", str(tmp_path / "b"))
    assert again.returncode == 0, again.stderr
    assert typed("predict", str(out), place, "--out", str(tmp_path / "scores.parquet")).returncode == 0
    for key in ("item.dim", "itm.admission"):
        changed = typed("worker", "ctr", "--resume", str(out), "--set", f"features.{key}=3")
        assert f"features.{key} is 3" in changed.stderr and "but the run in" in changed.stderr


@pytest.mark.parametrize(("steps", "every"), [(0, 1), (120, 30), (500_000, 1000)])
def test_rows_are_looked_at_so_often_that_those_that_expire_go_soon(steps: int, every: int) -> None:
    assert FeatureSettings(expiry=steps).expiry_rule() == gt.Unseen(steps=steps, every=every)


def test_a_time_that_is_no_number_is_refused_with_its_sample(tmp_path: Path) -> None:
    times = np.where(np.arange(COUNT) == 400, np.nan, np.arange(COUNT))
    pq.write_table(table().set_column(4, "time", pa.array(times)), tmp_path / "a.parquet", row_group_size=170)
    with pytest.raises(gt.errors.SourceDamaged, match="sample 400: time is nan; write the time there"):
        batches(str(tmp_path / "a.parquet"), split="time")
    with pytest.raises(gt.errors.SourceDamaged, match="sample 400: time is nan; write the time there"):
        OwnSamples(str(tmp_path / "a.parquet")).in_memory()


def test_fields_may_share_a_table(tmp_path: Path) -> None:
    place = written(tmp_path, "parquet")
    recipe = recipe_for(place, features={"at": {"table": "user"}})
    samples = OwnSamples(place, features=recipe.features)
    design = Design(recipe, layout_of(samples))
    assert {one.name: one.table for one in design.features if one.of == ("at",)} == {
        "at": "user", "at_weight": "user_weight"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("features.user.kin=int64", "the recipe has no key 'features.user.kin'; did you mean 'features.user.kind'?"),
        ("features.user=3", "the recipe has features.user = 3"),
        ("features.user.kind=int32", "the kind of a feature is 'int32'; it must be one of int64, string, bool, list<"),
        (
            "features.user.pooling=median",
            "features.user.pooling = 'median': Input should be 'sum', 'mean', 'sqrtn' or 'max'",
        ),
        ("features.user.dim=0", "dim is 0; it must be at least 1"),
        ("features.user.admission=1.5", "admission is 1.5; it must be a whole number of times, or below 1"),
        ("features.user.admission=-1", "features.user: admission is -1.0: p is -1.0; it must lie in"),
        ("features.user.expiry=unseen_days > 3", "features.user: expiry is 'unseen_days > 3': rule"),
        ("features.usr.dim=4", "features name 'usr', which is no field of"),
        ("features.user.kind=string", "column 'user' of"),
        ("features.user.dim=3", "those wider than 1 must be equal"),
        ("prefetch=-1", "prefetch is -1; it must be at least 0"),
        ("window_rows=0", "window_rows is 0; it must be at least 1"),
        ("held_out=0", "held_out is 0; it must be at least 1"),
        ("files.delimiter=tab", "files.delimiter is 'tab'; it must be one ASCII character, such as ','"),
        ("files.names=[user, click, user]", "files.names has 'user' twice"),
        ("files.header=false", "files.header is false and files.names is empty; name the columns"),
    ],
)
def test_a_key_that_cannot_be_is_refused_by_name(tmp_path: Path, setting: str, message: str) -> None:
    place = written(tmp_path, "parquet")
    done = typed("worker", "ctr", "--data", place, "--out", str(tmp_path / "run"), "--set", setting, "--set", "dim=4")
    assert done.returncode == 2, done.stdout
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert not (tmp_path / "run" / "run.json").exists()


def test_files_that_cannot_be_are_refused_by_name(tmp_path: Path) -> None:
    place = Path(written(tmp_path, "parquet"))

    def refused(data: str) -> str:
        done = typed("worker", "ctr", "--data", data, "--out", str(tmp_path / "run"), "--set", "dim=4")
        assert done.returncode == 2, done.stdout
        assert not (tmp_path / "run" / "run.json").exists()
        return " ".join(done.stderr.replace("│", " ").split())

    assert "holds no file" in refused(str(place / "*.csv"))
    (place / "2.csv").write_text("click,user\n1,2\n", encoding="utf-8")
    assert "holds both Parquet and CSV files" in refused(str(place))
    assert typed("worker", "ctr", "--data", str(place / "*.parquet"), "--out", str(tmp_path / "b")).returncode == 0
    (place / "2.csv").unlink()
    pq.write_table(pa.table({"click": [1], "user": ["a"], "item": [1], "at": [1], "time": [1]}), place / "2.parquet")
    assert "column 'user' of" in (said := refused(str(place))) and "2.parquet is string; it must be int64" in said
    whole = (place / "0.parquet").read_bytes()
    (place / "2.parquet").write_bytes(whole[: len(whole) // 2])
    assert "2.parquet is no whole Parquet file" in refused(str(place))


def test_a_file_that_vanishes_or_changes_is_named_and_the_run_goes_on_once_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks.secrets, "randbits", lambda _: 7)
    place = Path(written(tmp_path, "parquet"))
    whole = train(tmp_path / "whole" / "run", str(place))
    content, taken = (place / "1.parquet").read_bytes(), iter(range(15))

    def taken_away() -> bool:
        if next(taken, None) is None:
            (place / "1.parquet").unlink(missing_ok=True)
        return False

    with monkeypatch.context() as patch:
        patch.setattr(job, "interruption", lambda: nullcontext(StopWhen(taken_away)))
        with pytest.raises(gt.errors.SourceDamaged, match=r"1\.parquet cannot be opened"):
            train(tmp_path / "lost" / "run", str(place))
    with pytest.raises(gt.errors.ConfigError, match="the data changed since"):
        train(tmp_path / "lost" / "run", None, {"resume": True})
    (place / "1.parquet").write_bytes(content)
    ended = train(tmp_path / "lost" / "run", None, {"resume": True})
    assert ended.report is not None and whole.report is not None
    assert ended.report["held_out"] == whole.report["held_out"]


def test_a_run_of_files_of_a_version_that_did_not_stream_them_is_refused_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, steps = ClickTrainer.data, iter(range(15))
    with monkeypatch.context() as patch:
        patch.setattr(ClickTrainer, "data", lambda run: {key: of for key, of in data(run).items() if key != "files"})
        patch.setattr(job, "interruption", lambda: nullcontext(StopWhen(lambda: next(steps, None) is None)))
        train(tmp_path / "run", written(tmp_path, "parquet"))
    with pytest.raises(gt.errors.ConfigError, match="began the run, and held out other samples of files"):
        train(tmp_path / "run", None, {"resume": True})


def test_batches_are_not_read_ahead_where_several_workers_share_them() -> None:
    with pytest.raises(gt.errors.ConfigError, match=r"prefetch is 2 and mode is ssp:3, .* leave prefetch out"):
        CtrRecipe(prefetch=2, mode="ssp:3")
