"""Shards without rows, behind servers that end with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.toy_shard import Shard


@pytest.fixture
def make() -> Iterator[Callable[..., Shard]]:
    made: list[Shard] = []

    def one(way: str = "ring", **limits: Any) -> Shard:
        made.append(Shard(way, **limits))
        return made[-1]

    yield one
    for shard in made:
        shard.handler.release()
        shard.handler.answer_later()
        shard.server.close()


@pytest.fixture(params=["ring", "tcp", "tls"])
def shard(make: Callable[..., Shard], request: pytest.FixtureRequest) -> Shard:
    return make(request.param)
