"""A format's number moves with what is written: the keys of each kind of file are recorded here beside its number.

If one of these fails, raise the FORMAT that is named, unless what is new may be absent (docs/explanation/formats.md),
and record the keys that are written now.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain.ams.scheduler import state as scheduler
from geartrain.ams.storage.kv.store import MemoryStore
from geartrain.ams.storage.snapshot import manifest
from geartrain.ams.storage.snapshot.manifest import seal_json, unseal_json
from geartrain.ams.values.errors import ConfigError, SnapshotOfOtherFormat
from geartrain.ams.values.specs import TableSpec
from geartrain.bridge.checkpoint import folder as saved
from geartrain.workers.ctr.recipe import CtrRecipe
from geartrain.workers.data.bitmaps import Preprocessing
from geartrain.workers.job import state as job
from geartrain.workers.job.state import JobProgress, JobState
from geartrain.workers.models import saved_model
from geartrain.workers.models.trained_model import save_model
from tests.support.picture_models import picture_model

SPEC = "admission dim dtype expiry initializer max_bytes name num_rows optimizer seed slot_dtype"
FILE = "buckets bytes index kind num_rows path shard table xxh3_128"
WRITTEN: dict[str, tuple[int, set[str]]] = {
    "manifest.json": (
        1,
        {
            "created deltas files format id job moment num_shards number parent placement step tables writer xxh3_128",
            f"files: {FILE}",
            f"tables: {SPEC}",
        },
    ),
    "model.json of gt.save": (
        2,
        {
            "about created format id modules pieces rows state xxh3_128",
            "rows: folder id modules",
            "state: bytes file xxh3_128",
        },
    ),
    "config.json": (
        1,
        {"backbone dim format is_cosine num_classes preprocessing training xxh3_128 xxh3_128_of"},
    ),
    "the state of a job": (
        1,
        {
            "cursor data format job phases progress recipe scheduler world_size",
            "progress: best stage_start stage_steps step table",
        },
    ),
    "the scheduler's state": (
        1,
        {
            "cluster: format num_shards",
            "member: address incarnation left newcomer shard",
            "placement: bucket_shards version",
            "schema: altered for_restore holders incarnation is_unsettled spec",
            f"spec: {SPEC}",
            "version: cluster_version",
        },
    ),
}


def keys(content: dict[str, Any], *within: str) -> set[str]:
    """The keys of ``content``, and those of the first of each of the lists or objects ``within`` it."""
    found = {" ".join(sorted(content))}
    for name in within:
        first = content[name][0] if isinstance(content[name], list) else content[name]
        found.add(f"{name}: {' '.join(sorted(first))}")
    return found


def test_the_number_of_a_snapshot_moves_with_its_manifest(tmp_path: Path) -> None:
    with gt.local() as cluster:
        cluster.create_table("t", dim=2, optimizer=gt.SGD(0.1)).assign(np.arange(3), np.ones((3, 2), np.float32))
        text = (Path(cluster.snapshot(tmp_path).result(60)) / manifest.MANIFEST).read_bytes()
    assert (manifest.FORMAT, keys(json.loads(text), "files", "tables")) == WRITTEN["manifest.json"]
    for other in ({**unseal_json(text), "weather": "fine"}, {**unseal_json(text), "number": None}):
        if other["number"] is None:
            del other["placement"], other["number"]
        with pytest.raises(SnapshotOfOtherFormat, match="was made by another version of Geartrain"):
            manifest.decode_manifest(seal_json(other))


def test_the_number_of_a_saved_model_moves_with_its_file(tmp_path: Path) -> None:
    with gt.local() as cluster:
        head = gt.ClassHead(cluster, "c", num_classes=4, dim=2, margin=None)
        gt.save(nn.Sequential(nn.Linear(2, 2), head), tmp_path / "m")
    content = json.loads((tmp_path / "m" / saved.MODEL).read_bytes())
    assert (saved.FORMAT, keys(content, "rows", "state")) == WRITTEN["model.json of gt.save"]
    del content["xxh3_128"], content["pieces"]
    (tmp_path / "m" / saved.MODEL).write_bytes(seal_json(content))
    with pytest.raises(ConfigError, match=r"made by another version of Geartrain: it lacks 'pieces'. Use the version"):
        saved.read_record(tmp_path / "m")
    (tmp_path / "m" / saved.MODEL).write_bytes(seal_json({**content, "format": 1}))
    with pytest.raises(ConfigError, match=r"has format 1; .* reads format 2\. Use the version that wrote it"):
        saved.read_record(tmp_path / "m")


def test_the_number_of_a_workers_model_moves_with_its_file(tmp_path: Path) -> None:
    look = Preprocessing(kind="photo", size=32, channels=3)
    save_model(tmp_path / "m", picture_model(torch.randn(3, 16), ["a", "b", "c"], look))
    content = json.loads((tmp_path / "m" / saved_model.CONFIG).read_bytes())
    assert (saved_model.FORMAT, keys(content)) == WRITTEN["config.json"]


def test_the_number_of_a_jobs_state_moves_with_it() -> None:
    progress = JobProgress(step=1, stage_start=0, stage_steps=2, table="t")
    state = JobState(job="ctr", recipe=CtrRecipe(), progress=progress, cursor={}, data={}, tensors={"random": []})
    assert (job.FORMAT, keys(state.values(), "progress")) == WRITTEN["the state of a job"]


def test_the_number_of_the_schedulers_state_moves_with_it() -> None:
    store = MemoryStore()
    state = scheduler.State(store, num_shards=1)
    schema = scheduler.Schema(TableSpec(name="t", dim=2, optimizer=gt.SGD(0.1)))
    state.commit(members={0: scheduler.Member("a:1", 7)}, schemas={"t": schema}, cluster_version=2)
    content = {name.partition("/")[0]: json.loads(value) for name, value in store.read_all().items()}
    written = {f"{name}: {' '.join(sorted(value))}" for name, value in content.items()}
    written |= {f"spec: {' '.join(sorted(content['schema']['spec']))}"}
    assert (scheduler.FORMAT, written) == WRITTEN["the scheduler's state"]
