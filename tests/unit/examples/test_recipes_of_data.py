"""The recipes of ``examples/recipes`` train on samples of the files as they are published."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import geartrain as gt
from geartrain.workers import jobs
from geartrain.workers.job.keys import merged, read_recipe
from geartrain.workers.job.options import JobOptions

pq = pytest.importorskip("pyarrow.parquet", reason="samples from files need the extra data")
EXAMPLES = Path(__file__).parents[3] / "examples"
SMALL: dict[str, Any] = {"dim": 4, "hidden": [8], "batch_size": 50, "steps": 3}
COUNT = 300


def trained(name: str, data: Path, **said: Any) -> Any:
    stated = merged(read_recipe(EXAMPLES / "recipes" / f"{name}.yaml"), {**SMALL, **said})
    recipe = jobs.recipe_for("ctr", str(data), stated)
    options = JobOptions(job="ctr", out=data.parent / "run", recipe=recipe, data=str(data), loggers=())
    return jobs.train(options, Console(quiet=True)).report


def lines(path: Path, header: str, rows: Any) -> Path:
    path.write_text((f"{header}\n" if header else "") + "".join(f"{row}\n" for row in rows))
    return path


def test_criteo(tmp_path: Path) -> None:
    random = np.random.default_rng(0)

    def row(at: int) -> str:
        counts = ["" if random.random() < 0.2 else str(random.integers(-2, 50)) for _ in range(13)]
        return "\t".join([str(at % 2), *counts, *("" if place == 5 else f"{at % 7:08x}" for place in range(26))])

    assert trained("criteo", lines(tmp_path / "train.txt", "", map(row, range(COUNT))))["held_out"]["samples"] == 53


def test_avazu(tmp_path: Path) -> None:
    header = (
        "id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,app_category,device_id,"
        "device_ip,device_model,device_type,device_conn_type,C14,C15,C16,C17,C18,C19,C20,C21"
    )

    def row(at: int) -> str:
        texts = ",".join(f"{at % 9:08x}" for _ in range(9))
        hour = 14102100 + at // 60 * 100 + at // 3 % 20
        return f"{10**18 + at},{at % 2},{hour},1005,0,{texts},1,0,15706,320,50,1722,0,35,-1,79"

    assert trained("avazu", lines(tmp_path / "train.csv", header, map(row, range(COUNT))))["held_out"]["samples"] > 40


def converted(folder: Path, what: str) -> Any:
    script = str(EXAMPLES / "taobao.py")
    subprocess.run([sys.executable, script, what, str(folder), str(folder / "out"), "--shares", "3"], check=True)
    return pq.read_table(folder / "out").to_pylist()


@pytest.mark.parametrize("model", ["din", "dien"])
def test_taobao_display_advertising(tmp_path: Path, model: str) -> None:
    random = np.random.default_rng(0)
    log = [
        (random.integers(10), random.integers(1000), random.integers(1, 6), random.integers(1, 9)) for _ in range(500)
    ]
    impressions = [(random.integers(10), random.integers(1000), random.integers(12)) for _ in range(COUNT)]
    lines(
        tmp_path / "behavior_log.csv", "user,time_stamp,btag,cate,brand", (f"{u},{t},pv,{c},{b}" for u, t, c, b in log)
    )
    lines(
        tmp_path / "raw_sample.csv",
        "user,time_stamp,adgroup_id,pid,nonclk,clk",
        (f"{user},{time},{ad},430548_1007,{1 - ad % 2},{ad % 2}" for user, time, ad in impressions),
    )
    lines(
        tmp_path / "ad_feature.csv",
        "adgroup_id,cate_id,campaign_id,customer,brand,price",
        (f"{ad},{ad % 6},{ad},{ad},{'NULL' if ad == 3 else ad % 9},9.5" for ad in range(12)),
    )
    lines(
        tmp_path / "user_profile.csv",
        "userid,cms_segid,cms_group_id,final_gender_code,age_level,pvalue_level,shopping_level,occupation,"
        "new_user_class_level ",
        (f"{user},0,5,2,5,{'' if user % 2 else 1},3,0,2" for user in range(9)),  # one is unknown
    )
    rows = converted(tmp_path, "ads")
    assert len(rows) == COUNT
    for row in rows:
        before = sorted((t, c, b) for u, t, c, b in log if u == row["user"] and t < row["time"])[-50:]
        assert sorted(zip(row["seen_category"], row["seen_brand"], strict=True)) == sorted((c, b) for _, c, b in before)
        assert row["item_category"] == row["item"] % 6 and row["click"] == row["item"] % 2
    data = tmp_path / "out"
    if model == "dien":
        data = tmp_path / "trees"
        gt.compress_samples(tmp_path / "out", data, ["user", "time", "item"])
    assert trained("taobao_ads", data, model=model)["held_out"]["samples"] > 40


@pytest.mark.parametrize("model", ["din", "dien"])
def test_taobao_user_behaviour(tmp_path: Path, model: str) -> None:
    random = np.random.default_rng(0)
    events = [(int(random.integers(10)), int(random.integers(30)), time) for time in range(COUNT)]
    lines(tmp_path / "UserBehavior.csv", "", (f"{u},{i},{i % 4},pv,{t}" for u, i, t in events))
    rows = converted(tmp_path, "behaviour")
    clicked = [row for row in rows if row["click"]]
    assert len(clicked) == len(rows) // 2 == COUNT - 10
    for row in clicked:
        assert row["seen"] == [i for u, i, t in events if u == row["user"] and t < row["time"]][-50:]
        assert row["seen_category"] == [item % 4 for item in row["seen"]] and row["item_category"] == row["item"] % 4
    assert trained("taobao_behaviour", tmp_path / "out", model=model)["held_out"]["samples"] > 40
