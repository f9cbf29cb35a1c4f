"""Who else may read a file with a key or a token in it."""

from __future__ import annotations

import os

import pytest

from geartrain.ams.rpc.tokens import others_may_read


@pytest.mark.parametrize(
    ("mode", "owner", "we", "others_may"),
    [
        (0o600, 1000, 1000, False),
        (0o400, 0, 0, False),
        (0o440, 0, 1000, False),  # a Secret of Kubernetes with fsGroup
        (0o440, 1000, 1000, True),
        (0o440, 0, 0, True),
        (0o444, 0, 1000, True),
        (0o460, 0, 1000, True),
    ],
)
def test_a_file_of_root_may_be_read_by_the_group_that_we_are(
    mode: int, owner: int, we: int, others_may: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: we)
    found = os.stat_result((0o100000 | mode, 1, 1, 1, owner, 1000, 0, 0, 0, 0))
    assert others_may_read(found) is others_may
