"""The hash table of ids without a bound, whatever its size."""

from __future__ import annotations

from typing import Any

from geartrain.bridge.kernels.triton import hashing
from scripts.kernels.compile import Case

_TYPES = {
    **dict.fromkeys(("tables", "offsets", "key_N", "ids_N", "place_N", "slots_N", "found_N", "made_N"), "*i64"),
    **dict.fromkeys(("numbered_N", "counts_T", "ids_C"), "*i64"),
    **dict.fromkeys(("like_slots", "slots", "fill", "first", "claimed_N", "flags", "sums"), "*i32"),
    **dict.fromkeys(("like_digests", "digests"), "*u8"),
    "none": "i64",
}


def _case(kernel: str, **constants: Any) -> Case:
    names = getattr(hashing, kernel).arg_names
    return Case(
        name=f"hashing {kernel}",
        module="hashing",
        kernel=kernel,
        signature={name: "constexpr" if name in constants else _TYPES.get(name, "i32") for name in names},
        constants=constants,
        options={"num_warps": 4},
        odd=("num_ids", "bits", "none", "num_tables"),
    )


CASES = [
    _case("find", BLOCK=hashing.FOUND),
    _case("claim", BLOCK=hashing.INSERTED),
    _case("mark", MAKES=True, BLOCK=hashing.INSERTED),
    _case("insert", MAKES=True, BLOCK=hashing.INSERTED),
    _case("finish_inserts", MAKES=True, BLOCK=hashing.INSERTED),
    _case("rehash", BLOCK=hashing.INSERTED),
]
