"""The numbers of admission rules, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from geartrain.ams.rpc.codec.specs import spec_from_pb, spec_to_pb
from geartrain.ams.values.admission.rules import Admission, MinCount, Probability
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.specs import TableSpec


def spec(admission: Any) -> TableSpec:
    return TableSpec(name="t", dim=1, optimizer=SGD(0.1), admission=admission)


@pytest.mark.parametrize("admission", [None, Probability(0.25), MinCount(3), MinCount(70, 1 << 20, 0.1)])
def test_a_spec_keeps_its_admission_wherever_it_goes(admission: Admission | None) -> None:
    made = spec(admission)
    assert spec_from_pb(spec_to_pb(made)) == made == TableSpec.from_dict(made.to_dict())
    assert made.counts_occurrences == (admission is not None)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Probability(0), "p is 0; it must lie in"),
        (lambda: Probability(1.5), "p is 1.5"),
        (lambda: MinCount(0), "n is 0; it must be an integer from 1 to 65535"),
        (lambda: MinCount(2, max_bytes=100), "max_bytes is 100"),
        (lambda: MinCount(2, false_positive_rate=1.0), "false_positive_rate is 1.0"),
        (lambda: spec(3), "admission is 3; it must be gt.MinCount"),
    ],
)
def test_what_no_rule_can_be_is_refused(make: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        make()


@pytest.mark.parametrize("rate", [0.5, 0.1, 0.01, 0.001])
@pytest.mark.parametrize(("n", "bits"), [(1, 2), (3, 2), (4, 4), (15, 4), (16, 8), (255, 8), (256, 16), (65535, 16)])
def test_a_filter_takes_its_memory_and_has_its_rate_at_its_capacity(n: int, bits: int, rate: float) -> None:
    for max_bytes in (4096, 5000, 1 << 20, 3_000_000_000):
        made = MinCount(n, max_bytes, rate)
        assert made.counter_bits == bits
        assert made.num_ranges * made.range_blocks * 64 <= max_bytes < 1.25 * made.num_blocks * 64
        assert made.false_positive_rate_at(made.capacity) <= rate
        assert made.false_positive_rate_at(round(1.1 * made.capacity) + 1) > rate
