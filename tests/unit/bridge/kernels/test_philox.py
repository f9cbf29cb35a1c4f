"""Philox in tensor operations against the known answers of its authors' library (Random123)."""

from __future__ import annotations

import pytest
import torch

from geartrain.bridge.kernels.philox import philox_words


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ([0, 0, 0, 0], 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([2**32 - 1] * 4, 2**64 - 1, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            0x299F31D0A4093822,
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_words_are_those_of_the_reference(counter: list[int], key: int, answer: list[int]) -> None:
    one, two, three, four = (torch.tensor([part]) for part in counter)
    assert philox_words(key, (one, two, three, four), rounds=10).tolist() == [answer]
