"""The suite can fail: with one mechanism taken out of the product, the attack on it raises."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.faults import attacks
from tests.faults.mutations import REMOVALS, attack_without

SEQUENCES = partial(attacks.sequences, examples=600)
"""It ends with the first that fails; which come first depends on what else hypothesis has seen."""
CAUGHT_BY: dict[str, attacks.Attack] = {
    "dedup": SEQUENCES,
    "shard fence": SEQUENCES,
    "client fence": SEQUENCES,
    "writes wait": attacks.large_requests,
    "one use": partial(attacks.shared_memory, pushes=60),
    "checksum": attacks.damage,
    "rename last": attacks.death_of_a_writer,
    "fsync": attacks.power_loss,
    "fsync of files": attacks.power_loss,
    "fsync of folders": attacks.power_loss,
}


SLOW = {"client fence", "one use", "writes wait"}
"""Of the compiled ones, each with a core built without it: `make campaign` runs them."""


@pytest.mark.parametrize(
    "mechanism", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in REMOVALS]
)
def test_an_attack_catches_the_lack_of(mechanism: str, tmp_path: Path) -> None:
    with pytest.raises((AssertionError, BaseExceptionGroup)):
        attack_without(mechanism, CAUGHT_BY[mechanism], 1, tmp_path)


@pytest.mark.parametrize("attack", [attacks.damage, attacks.death_of_a_writer, attacks.power_loss])
def test_the_whole_product_withstands(attack: attacks.Attack, tmp_path: Path) -> None:
    attack(1, tmp_path)
