"""The compiled state of a shard: what no other test reaches, of its words, failpoints and fingerprints."""

from __future__ import annotations

import pytest

from geartrain.ams.kernels import _core
from geartrain.ams.observe import failpoints
from geartrain.ams.values.errors import ShardUnavailable


def test_a_failpoint_of_compiled_code_is_one_of_python() -> None:
    with failpoints.armed("shard.apply.before=error@2") as passes:
        _core.reach_failpoint("shard.apply.before")
        with pytest.raises(ShardUnavailable, match="a write was admitted"):
            _core.reach_failpoint("shard.apply.before")
    _core.reach_failpoint("shard.apply.before")
    assert passes.passed == {"shard.apply.before": 2}
