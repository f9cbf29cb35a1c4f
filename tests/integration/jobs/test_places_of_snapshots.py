"""A job whose snapshots cannot go where they are to go hears it before anything is fetched or made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from geartrain.ams.client.factory import connect
from geartrain.ams.storage.snapshot.manifest import MANIFEST
from geartrain.ams.values.errors import ConfigError, InvalidArgument, SnapshotRefused
from geartrain.workers.job import job as job_module
from tests.faults.test_job_recovery import images, train

__all__ = ["images"]


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_module, "_load_in_turn", lambda *_: pytest.fail("the data were loaded"))


def test_a_shard_that_does_not_write_there_is_asked_first(
    served: Callable[..., Any], images: Path, tmp_path: Path
) -> None:
    address = served(2, snapshot_roots=[str(tmp_path / "allowed")]).address
    with pytest.raises(SnapshotRefused, match=r"does not lie below server\.snapshot_roots"):
        train(tmp_path / "run", images, scheduler=address)
    assert not (tmp_path / "run").exists()
    with connect(address) as cluster:
        assert not cluster.table_incarnations()
        for root in (tmp_path / "allowed", tmp_path / "allowed" / "run"):  # neither has to be there
            cluster.require_snapshot_root(root)


def test_a_url_that_nothing_here_serves_and_snapshots_of_another_job_are_refused_first(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept" / "step-000000001").mkdir(parents=True)
    (tmp_path / "kept" / "step-000000001" / MANIFEST).write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="already holds snapshots"):
        train(tmp_path / "run", images, snapshots=str(tmp_path / "kept"))

    def missing(_: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(InvalidArgument, match=r"pip install 'geartrain\[s3\]'"):
        train(tmp_path / "run", images, snapshots="s3://bucket/run")
    assert not (tmp_path / "run").exists()
