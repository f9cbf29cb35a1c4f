"""The process that exports the versions of a training, one after another."""

from __future__ import annotations

import pytest

from geartrain.ams.values.errors import ConfigError
from geartrain.serving.live.child import ExportProcess


def test_a_process_exports_one_snapshot_after_another_and_another_goes_on_where_it_died() -> None:
    exporter, pids = ExportProcess(), []

    def refused(name: str) -> None:
        with pytest.raises(ConfigError, match=f"the model of {name} was not made: .*{name}"):
            exporter.export(name, "never", is_ending=lambda: False)
        assert exporter._child is not None
        pids.append(exporter._child.pid)

    refused("first")
    refused("second")
    exporter._child.kill()
    exporter._child.wait()
    refused("third")
    assert pids[0] == pids[1] != pids[2]
    with pytest.raises(ConfigError, match="the service ends"):
        exporter.export("fourth", "never", is_ending=lambda: True)
    assert exporter._child is None
