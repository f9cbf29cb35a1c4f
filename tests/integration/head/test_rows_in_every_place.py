"""Hosted class rows give what the formula gives whatever carries the requests."""

from __future__ import annotations

import pytest

from geartrain.ams.client.cluster import Cluster
from tests.unit.bridge.head.test_places import Case, joined, make_head, reference, require_close, train_share


@pytest.mark.parametrize("case", [("full", "cosface", "sparse"), ("partial", "cosface", "sparse")], ids="-".join)
def test_every_carrier_carries_them(cluster: Cluster, case: Case) -> None:
    head = make_head(cluster, case, "hosted")
    steps = train_share(head, 0, 1)
    require_close(joined([steps], 1, head.weights().numpy()), reference(case), case)
