"""What strangers say to a service of models ends nothing and disturbs nobody; more of it: the campaign."""

from __future__ import annotations

from pathlib import Path

from tests.faults.serve_strangers import KINDS, SERVICE
from tests.faults.strangers import Outcome, require_flat, run_strangers
from tests.support.served_models import require_onnx


def test_malformed_requests_of_every_kind_over_http_and_grpc_disturb_nobody(tmp_path: Path) -> None:
    require_onnx()
    outcome = Outcome()
    run_strangers(1, tmp_path / "run", outcome, scene=SERVICE, attacks=1_500, windows=0)
    assert set(outcome.counts) == set(KINDS)
    assert min(outcome.counts.values()) > 0 and outcome.honest_calls > 0
    require_flat(outcome)
