"""Every format of a snapshot that was ever written restores to what it held; one that is newer is refused as that.

``tests/fixtures/write_snapshots.py`` wrote each, once, with the code of its time.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import local
from geartrain.ams.storage.snapshot.compaction import compact
from geartrain.ams.storage.snapshot.folder import open_snapshot
from geartrain.ams.storage.snapshot.manifest import FORMAT, unseal_json
from tests.fixtures.write_snapshots import IDS, push, push_all, rows_of

FIXTURES = Path(__file__).parent.parent / "fixtures" / "snapshots"
SNAPSHOTS = sorted(str(path.parent.relative_to(FIXTURES)) for path in FIXTURES.glob("*/*/manifest.json"))


@pytest.fixture
def formats(tmp_path: Path) -> Path:
    """A copy: what is restored from is not what is committed."""
    return Path(shutil.copytree(FIXTURES, tmp_path / "formats"))


def expected_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path.parent / "expected.json").read_text())[path.name]
    return found


def assert_is(cluster: Cluster, expected: dict[str, Any]) -> None:
    """That the rows are the expected ones, and the slots, which one more push shows."""
    assert rows_of(cluster) == expected["rows"]
    push_all(cluster)
    assert rows_of(cluster) == expected["rows_after_a_push"]


def test_there_is_a_snapshot_of_every_format() -> None:
    formats = {unseal_json((FIXTURES / name / "manifest.json").read_bytes())["format"] for name in SNAPSHOTS}
    assert formats == set(range(1, FORMAT + 1))


@pytest.mark.parametrize("name", SNAPSHOTS)
@pytest.mark.parametrize("num_shards", [2, 3])
def test_what_an_earlier_version_wrote_is_restored(formats: Path, name: str, num_shards: int) -> None:
    expected = expected_of(formats / name)
    assert open_snapshot(formats / name).verify() == []
    with local(num_shards) as cluster:
        snapshot = cluster.restore(formats / name)
        assert (snapshot.manifest.job, snapshot.manifest.step) == (expected["job"], expected["step"])
        assert snapshot.job_files()["backbone"].endswith(b"weights")
        assert_is(cluster, expected)
        if "graph" in expected:
            graph, _ = cluster.graph.load("dense")
            found = {"offsets": graph.offsets.tolist(), "neighbours": graph.neighbours.tolist()}
            assert found == expected["graph"]


@pytest.mark.parametrize("name", [name for name in SNAPSHOTS if name.endswith("child")])
def test_a_chain_that_an_earlier_version_wrote_is_compacted(formats: Path, name: str) -> None:
    with local(3) as cluster:
        cluster.restore(compact((formats / name).parent, "child"))
        assert_is(cluster, expected_of(formats / name))


@pytest.mark.parametrize("name", [name for name in SNAPSHOTS if name.endswith("whole")])
def test_a_snapshot_of_an_earlier_version_is_added_to(formats: Path, name: str) -> None:
    with local(3) as cluster, local(2) as other:
        cluster.restore(formats / name)
        push(cluster, 9, 7)
        path = cluster.snapshot((formats / name).parent, "more", step=3, parent="whole").result(60)
        assert len(open_snapshot(path).chain()) == 2
        other.restore(path)
        for table, ids in IDS.items():
            np.testing.assert_array_equal(other.table(table).pull(ids), cluster.table(table).pull(ids))
