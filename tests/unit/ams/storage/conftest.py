"""A small snapshot to take, damage and lose."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from geartrain.ams.storage.snapshot.blocks import write_block, write_job_file
from geartrain.ams.storage.snapshot.folder import new_staging
from geartrain.ams.storage.snapshot.manifest import Writer
from geartrain.ams.values.placement import even_placement

Take = Callable[..., Path]


def take_snapshot(root: Path, name: str, step: int = 1, created: float = 1000.0, writer: Writer | None = None) -> Path:
    """Two shards, two blocks each of table 'sku', one of another, and one file of the job; content depends on step."""
    generator = np.random.default_rng(step)
    staging = new_staging(root, name)
    files = []
    for shard in range(2):
        for table, index in (("sku", 0), ("sku", 1), ("a/b ü", 0)):
            arrays = {
                "ids": np.arange(8, dtype=np.int64) + 8 * index,
                "rows": generator.normal(size=(8, 4)).astype(np.float32),
            }
            files.append(
                write_block(
                    staging.path,
                    snapshot_id=staging.id,
                    kind="rows",
                    table=table,
                    shard=shard,
                    index=index,
                    arrays=arrays,
                )
            )
    data = generator.bytes(100)
    files.append(write_job_file(staging.path, snapshot_id=staging.id, name="backbone.safetensors", data=data))
    return staging.commit(
        step=step,
        created=created,
        num_shards=2,
        bucket_shards=even_placement(2),
        tables=[{"name": "sku", "dim": 4, "seed": 2**64 - 1}, {"name": "a/b ü", "dim": 4}],
        files=files,
        job={"big": 1e30, "cursor": [1, 2], "note": "\x1f"},
        writer=writer,
    )


@pytest.fixture
def take() -> Take:
    return take_snapshot
