"""What many tests of a trainer's side begin with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import geartrain as gt
from geartrain.ams.client.cluster import Cluster


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Two shards in this process, with the programs that they may host."""
    with gt.local(num_shards=2) as embedded:
        yield embedded
