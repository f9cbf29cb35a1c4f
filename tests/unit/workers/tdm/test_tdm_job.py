"""``geartrain worker tdm`` on a small set: it finds what users like, and refuses what cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import geartrain as gt
from geartrain.bridge.checkpoint.folder import read_record, read_state
from geartrain.workers import jobs
from geartrain.workers.ctr.samples.click_samples import ClickSamples, SampleSchema
from geartrain.workers.ctr.samples.movielens import read_movielens
from geartrain.workers.job import job
from geartrain.workers.job.options import JobOptions, JobResult, SnapshotSettings
from geartrain.workers.tdm.clicked_items import recall, split_clicks
from geartrain.workers.tdm.recipe import TdmRecipe
from geartrain.workers.tdm.trainer import initial_item_order, nodes_scored
from tests.integration.jobs.small_job import stop_after
from tests.support.command_line import typed
from tests.support.movielens_files import write_movielens


def samples_of(users: list[int], items: list[int], clicks: list[int]) -> ClickSamples:
    return ClickSamples(
        fields={"user": np.array(users), "item": np.array(items)},
        clicks=np.array(clicks, np.float32),
        times=np.arange(len(users)),
        schema=SampleSchema(item=("item",), user="user"),
    )


def test_what_is_wanted_is_new_and_clicked_and_histories_end_before_it() -> None:
    users = [1, 1, 2, 1, 2, 1, 2, 2, 1, 1, 2, 1]
    items = [5, 6, 5, 7, 8, 9, 9, 6, 4, 3, 7, 8]
    liked = split_clicks(samples_of(users, items, [1, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1]), TdmRecipe(split="time"))
    assert liked.users.fields["user"].tolist() == [1, 2]
    assert liked.wanted == [{8}, {7}]
    assert liked.seen == [{5, 6, 7, 9, 4, 3}, {5, 8, 9, 6}]
    histories = liked.ids(liked.users, np.arange(2))["history"]
    assert (histories[0].tolist(), histories[1].tolist()) == ([11, 15, 19, 9, 7, 11, 17, 13], [0, 5, 8])
    assert liked.train.fields["item"].tolist() == [5, 5, 7, 8, 9, 6, 4, 3]
    first = liked.ids(liked.train, np.array([0, 4]))["history"]
    assert (first[0].tolist(), first[1].tolist()) == ([11, 15], [0, 0, 2])  # the clicked ones of user 1 before 9
    # User 1 has seen 9 and 4, so that 8 is the first of its list; of user 2's list 8 is passed over.
    lists = np.array([[9, 4, 8, 7], [8, 4, 3, 7]])
    assert [recall(lists, liked, cut) for cut in (1, 2, 3)] == [0.5, 0.5, 1.0]


def test_the_first_tree_has_items_of_a_kind_beside_each_other(tmp_path: Path) -> None:
    samples = read_movielens(write_movielens(tmp_path))
    items = np.unique(samples.fields["item"])
    order = initial_item_order(samples, items)
    assert sorted(order.tolist()) == items.tolist()
    parity = order[order < 20] % 2  # odd films are of other genres than even ones
    assert np.count_nonzero(np.diff(parity)) == 1


def test_a_search_looks_at_the_children_of_a_beam() -> None:
    assert nodes_scored(gt.ItemTree(np.arange(64)), 8) == 3 * 16
    assert nodes_scored(gt.ItemTree(np.arange(64)), 64) == 64
    assert nodes_scored(gt.ItemTree(np.arange(50)), 20) == 32 + 40


def test_a_run_finds_what_users_like(tmp_path: Path) -> None:
    films, out = write_movielens(tmp_path / "films"), tmp_path / "run"
    small = ["--steps=40", "--set=batch_size=50", "--set=dim=8", "--set=beam=50", "--logger=none"]
    done = typed("worker", "tdm", "--data", str(films), "--out", str(out), *small)
    assert done.returncode == 0, done.stderr
    assert "Tree 2: recall@10" in done.stdout and "The most popular: recall@10" in done.stdout
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))["held_out"]
    assert [tree["tree"] for tree in report["trees"]] == [0, 1]
    assert report["beams"]["50"]["recall_10"] == report["every item scored"]["recall_10"]  # there are but 20 items
    assert report["every item scored"]["recall_50"] == 1.0
    assert (out / "model").is_dir()
    again = typed("worker", "tdm", "--data", str(films), "--out", str(out), *small)
    assert again.returncode == 2
    assert "already holds a run" in again.stderr


def test_a_run_that_was_stopped_ends_as_one_that_was_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pa = pytest.importorskip("pyarrow", reason="samples from files need the extra data")
    parquet = pytest.importorskip("pyarrow.parquet")
    samples, films = read_movielens(write_movielens(tmp_path / "films")), tmp_path / "films.parquet"
    table = pa.table({"time": samples.times, "click": samples.clicks.astype(int), "user": samples.fields["user"]})
    age = samples.fields["user"] % 7  # fields are in another order than that of their names
    parquet.write_table(table.append_column("age", [age]).append_column("item", [samples.fields["item"]]), films)

    def train(out: Path, **more: Any) -> JobResult:
        settings: dict[str, Any] = {"dim": 8, "batch_size": 50, "steps": 12, "beam": 50, "row_lr": 0.05}
        recipe = TdmRecipe(**settings, snapshots=SnapshotSettings(steps=5))
        given = JobOptions(job="tdm", out=out, recipe=recipe, data=str(films), loggers=(), **more)
        return jobs.train(given, Console(quiet=True))

    whole = train(tmp_path / "whole" / "run").report
    for steps in (7, 9):  # in the first tree, and in the second
        with monkeypatch.context() as told:
            told.setattr(job, "interruption", stop_after(steps))
            assert not train(tmp_path / "run", resume=steps == 9).finished
    ended = train(tmp_path / "run", resume=True)
    assert whole is not None and ended.report is not None
    assert (ended.step, ended.report["held_out"]) == (24, whole["held_out"])
    networks = [
        read_state(out, read_record(out))["model"] for out in (tmp_path / "whole/run/model", tmp_path / "run/model")
    ]
    for name, value in networks[0].items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(networks[1][name], value, rtol=0, atol=0)
    assert train(tmp_path / "run", resume=True, resume_steps=3).step == 24 + 2 * 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--set", "beam=20"], "beam is 20; it must be at least 50"),
        (["--set", "rebuilds=-1"], "rebuilds is -1; it must be at least 0"),
        (["--set", "split=user"], "split is 'user'"),
        (["--data", "nowhere"], "--data is 'nowhere'"),
    ],
)
def test_what_no_tree_can_be_made_of_is_refused(tmp_path: Path, flags: list[str], message: str) -> None:
    films = write_movielens(tmp_path / "films")
    done = typed("worker", "tdm", "--data", str(films), "--out", str(tmp_path / "run"), *flags)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "run" / "report.json").exists()
