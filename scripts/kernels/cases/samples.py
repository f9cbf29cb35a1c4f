"""What a head does for each sample, 512 wide: features in bfloat16 or float32, rows picked or all, with a margin."""

from __future__ import annotations

from typing import Any

from geartrain.bridge.kernels.triton import sample_terms
from scripts.kernels.compile import Case

_TYPES = {"labels": "*i64", "settled": "*i64", "positions": "*i64", "numbers": "*i64", "sums": "*fp64"}
_INTEGERS = (
    "num",
    "num_classes",
    "first",
    "num_local",
    "num_samples",
    "num_parts",
    "num_ranks",
    "num_active",
    "num_live_classes",
    "num_rows",
)
_NUMBERS = ("factor", "scale", "middle", "cos_m", "sin_m", "m3")


def _case(name: str, kernel: str, types: dict[str, str] | None = None, *, num_warps: int = 4, **constants: Any) -> Case:
    known = _TYPES | (types or {})
    arguments = getattr(sample_terms, kernel).arg_names
    if "WIDTH" in arguments:
        options = sample_terms.row_options(512)
        num_warps = options.pop("num_warps")
        constants |= {"DIM": 512} | options
    if "scales" in arguments:
        constants["scales"] = None
    signature = {}
    for argument in arguments:
        kind = "i64" if argument == "ignored" else "i32" if argument in _INTEGERS else "*fp32"
        kind = "fp32" if argument in _NUMBERS else kind
        signature[argument] = "constexpr" if argument in constants else known.get(argument, kind)
    return Case(
        name=f"samples {name}",
        module="sample_terms",
        kernel=kernel,
        signature=signature,
        constants=constants,
        options={"num_warps": num_warps},
        odd=("ignored", *_INTEGERS),
    )


CASES = [
    _case("prepare labels", "prepare_labels", BLOCK=1024, num_warps=8),
    _case("prepare features, bf16", "prepare_features", {"features": "*bf16", "queries": "*bf16"}),
    _case("prepare features, fp32, no margin", "prepare_features", inverse=None, counts=None),
    _case("own cosines, bf16, picked", "own_cosines", {"rows": "*bf16"}),
    _case("sums for other ranks", "scale_sums", BLOCK=128),
    _case("find rows", "find_rows", {"wanted": "*i64", "count": "*i64", "out": "*i64"}, BITS=24, BLOCK=128),
    _case("weight of sampled classes", "sampled_weight", BLOCK=1024, num_warps=8),
    _case("losses", "losses", BLOCK=128, HAS_MARGIN=True),
    _case("finish gradient", "finish_gradient"),
    _case("row factors of ranks", "row_factors", {"ends": "*i64"}, BLOCK=1024, num_warps=8, OF_SAMPLES=False),
    _case("finish gradient, of one rank of several", "finish_gradient", own=None, coefficients=None, own_weights=None),
]
