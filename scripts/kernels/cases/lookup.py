"""Look-ups and updates of embeddings: rows of float32 at D = 16 (``bench sparse_step``) and 128, and bf16 look-ups."""

from __future__ import annotations

from geartrain.bridge.kernels.triton.lookup import pool_tile, run_tile
from geartrain.bridge.kernels.triton.row_step import ADAGRAD, ADAM, ROWWISE_ADAGRAD, SGD
from scripts.kernels.compile import Case

_NUMBERS = {"bits": "i32", "none": "i32"}


def _tile(tile: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    return {name: size for name, size in tile.items() if name != "num_warps"}, {"num_warps": tile["num_warps"]}


def _pool(dim: int, dtype: str) -> Case:
    constants, options = _tile(pool_tile(dim))
    return Case(
        name=f"pool_rows {dtype} D={dim}",
        module="lookup",
        kernel="pool_rows",
        signature={
            "pieces": "*i64",
            "like": f"*{dtype}",
            "key_N": "*i32",
            "bounds_V": "*i64",
            "weights_N": "*fp32",
            "factor_V": "*fp32",
            **_NUMBERS,
            **dict.fromkeys(["WEIGHTED", "FACTORED", "DIM", "ALIGNED", *constants], "constexpr"),
        },
        constants={"WEIGHTED": True, "FACTORED": True, "DIM": dim, "ALIGNED": True, **constants},
        options=options,
        odd=("bits", "none"),
    )


def _runs(kernel: str, dim: int, more: dict[str, str], chosen: dict[str, object], label: str = "") -> Case:
    constants, options = _tile(run_tile(dim))
    return Case(
        name=f"{kernel}{label} D={dim}",
        module="lookup",
        kernel=kernel,
        signature={
            "pieces": "*i64",
            "tables": "*i64",
            "key_N": "*i32",
            "order_N": "*i64",
            "place_N": "*i64",
            "weights_N": "*fp32",
            "factor_V": "*fp32",
            "partial": "*fp32",
            **more,
            "num_entries": "i32",
            "bits": "i32",
            **dict.fromkeys(["WEIGHTED", "FACTORED", "DIM", "ALIGNED", *chosen, *constants], "constexpr"),
        },
        constants={"WEIGHTED": True, "FACTORED": True, "DIM": dim, "ALIGNED": True, **chosen, **constants},
        options=options,
        odd=("num_entries", "bits"),
    )


def _update(dim: int, kind: int, label: str, slots: int, dtype: str = "fp32", *, counts: bool = False) -> Case:
    more = {"like_rows": f"*{dtype}", "like_slots": "*fp32", "scale": "*fp32"}
    more |= dict.fromkeys(["lr", "decay", "a", "b", "eps"], "fp32")
    chosen = {"ROWS_ALIGNED": True, "COUNTS": counts, "KIND": kind, "SLOTS": slots}
    return _runs("update_rows", dim, more, chosen, f" {label} {dtype}")


CASES = [
    Case(
        name="index_fields",
        module="lookup",
        kernel="index_fields",
        signature={
            "fields": "*i64",
            "ids_N": "*i64",
            "offsets": "*i64",
            "weights_N": "*fp32",
            "key_N": "*i32",
            "place_N": "*i64",
            "bounds_V": "*i64",
            "factor_V": "*fp32",
            "status": "*i64",
            **_NUMBERS,
            "ranks": "i32",
            **dict.fromkeys(["WEIGHTED", "FACTORED", "BLOCK"], "constexpr"),
        },
        constants={"WEIGHTED": True, "FACTORED": True, "BLOCK": 256},
        options={"num_warps": 8},
        odd=("bits", "none", "ranks"),
    ),
    Case(
        name="find_bad_numbers",
        module="lookup",
        kernel="find_bad_numbers",
        signature={"tensors": "*i64", "like": "*fp32", "found": "*fp64", "BLOCK": "constexpr"},
        constants={"BLOCK": 1024},
        options={"num_warps": 4},
    ),
    _pool(16, "fp32"),
    _pool(128, "fp32"),
    _pool(128, "bf16"),
    _runs("open_runs", 128, {}, {}),
    _runs("square_rows", 128, {"squares": "*fp64"}, {}),
    _update(128, SGD.value, "sgd", 0),
    _update(16, ADAGRAD.value, "adagrad", 16),
    _update(128, ADAM.value, "adam", 256, counts=True),
    _update(128, ROWWISE_ADAGRAD.value, "rowwise adagrad", 1, "bf16", counts=True),
]
