"""Random sequences over a simulated cluster: whatever is lost, late or dead, every row is what the oracle says."""

from __future__ import annotations

import os

import pytest

from tests.model.run import run

EXAMPLES = int(os.environ.get("GEARTRAIN_MODEL_EXAMPLES", "60"))
SEED = int(os.environ.get("GEARTRAIN_MODEL_SEED", "0"))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("examples", "seed"), [(EXAMPLES, SEED), pytest.param(2 * EXAMPLES, SEED + 1, marks=pytest.mark.slow)]
)
def test_sequences_of_faults_leave_every_row_as_the_oracle_says(examples: int, seed: int) -> None:
    run(examples, seed)
