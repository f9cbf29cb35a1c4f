"""The state of a job in a snapshot is read in the one format that is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from geartrain.ams.storage.snapshot.folder import new_staging, open_snapshot
from geartrain.ams.values.errors import ConfigError
from geartrain.ams.values.placement import even_placement
from geartrain.workers.ctr.recipe import CtrRecipe
from geartrain.workers.job.state import JobState


def test_the_state_of_another_format_is_refused(tmp_path: Path) -> None:
    path = new_staging(tmp_path, "s").commit(
        step=1, created=0.0, num_shards=1, bucket_shards=even_placement(1), tables=[], files=[], job={"format": 7}
    )
    with pytest.raises(ConfigError, match=f"state in {path} has format 7; .* reads format 1. Use the version"):
        JobState.read(open_snapshot(path), "ctr", CtrRecipe)
