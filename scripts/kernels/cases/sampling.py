"""The sampler of partial FC, for 10 million classes of which a tenth is drawn."""

from __future__ import annotations

from typing import Any

from geartrain.bridge.kernels.triton import sampling
from scripts.kernels.compile import Case

_TYPES = {"ids": "*i64", "num_marked": "*i64", "num_fresh": "*i64", "fresh_ends": "*i64", "num_set": "*i64"} | {
    "set_ends": "*i64",
    "num_written": "*i64",
    "bitmap": "*i32",
    "drawn": "*i32",
    "seed": "i64",
    "step": "*i64",
}
_TYPES |= dict.fromkeys(("labels", "offsets", "order", "ends", "given"), "*i64")
_TYPES |= dict.fromkeys(("neighbours", "said", "sorted_ids", "in_turn"), "*i32")
_SIZES = ("num_given", "num_ids", "count", "budget", "start", "stop", "capacity")
_SIZES += ("num_labels", "longest", "num_lists", "num", "num_classes")
_BITS = 24


def _case(kernel: str, num_warps: int, **constants: Any) -> Case:
    names = getattr(sampling, kernel).arg_names
    return Case(
        name=f"sampling {kernel}",
        module="sampling",
        kernel=kernel,
        signature={name: "constexpr" if name in constants else _TYPES.get(name, "i32") for name in names},
        constants=constants,
        options={"num_warps": num_warps},
        odd=(*_SIZES, "seed"),
    )


CASES = [
    _case("mark", 4, BLOCK=sampling.MARKED),
    _case("draw", 2, BLOCK=sampling.DRAWN, LEFT=_BITS // 2, RIGHT=_BITS // 2),
    _case("mark_drawn", 2, BLOCK=sampling.DRAWN),
    _case("count_words", 2, BLOCK=sampling.WORDS),
    _case("write_ids", 4, BLOCK=sampling.WORDS),
    _case("list_candidates", 4, LABELS=sampling.LABELS, RANKS=sampling.RANKS),
    _case("first_places", 4, PLACES=sampling.PLACES),
    _case("select_nearest", 4, NEAR=0.125, PLACES=sampling.PLACES),
]
