"""The same bits on every instruction set, however rows are asked for: one script, run in a process for each."""

import hashlib
import os
import subprocess
import sys
from itertools import cycle

import ml_dtypes
import numpy as np
import pytest

from geartrain.ams.graph.building.builder import build_neighbours
from geartrain.ams.graph.building.rows import ArrayRows
from geartrain.ams.kernels import neighbours, ops
from geartrain.ams.kernels.gradients import accumulate_and_take
from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.optimizers.registry import OPTIMIZERS, Momentum, optimizer_of
from geartrain.ams.values.specs import Constant, Normal, TableSpec, Uniform

INSTRUCTION_SETS = ["baseline", "avx2", "avx512", "amx"]


def digest() -> str:
    """Hash what every kernel computes from fixed input."""
    seen, generator = hashlib.sha256(), np.random.default_rng(0)
    floats = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
    ids = np.arange(300)
    optimizers = [
        optimizer_of(name, {"lr": 0.1, "l1" if name == "ftrl" else "weight_decay": 0.01}) for name in OPTIMIZERS
    ]
    initializers = cycle((Normal(0, 1), Uniform(-1, 1), Constant(0.1)))
    for optimizer, initializer in zip([*optimizers, Momentum(0.1, nesterov=True)], initializers, strict=False):
        for dtype in floats:
            spec = TableSpec(
                name="t",
                dim=77,
                optimizer=optimizer,
                initializer=initializer,
                dtype=dtype.name,
                slot_dtype=dtype.name if optimizer.takes_narrow_slots else "float32",
            )
            table = RowTable(spec, np.arange(4096))
            out = np.empty((300, 77), dtype)
            for gradient_dtype in floats:
                gradients = (generator.standard_normal((300, 77)) * 10.0 ** generator.integers(-9, 4, (300, 1))).astype(
                    gradient_dtype
                )
                table.push(ids[::2], gradients[::2], scale=0.37)
                table.pull(ids, out)
                seen.update(out.tobytes())
                seen.update(ops.merge_duplicates(ids % 50, gradients)[2].tobytes())
    seen.update(ops.sample_ids(10**7 + 3, 5000, 1, 2).tobytes())
    rows = generator.integers(-2, 3, (700, 21)).astype(np.float32)  # many ties
    seen.update(build_neighbours(ArrayRows(rows), 9).neighbours.tobytes())
    seen.update(gathered_gradients(floats, generator))
    seen.update(found_rows(generator))
    return seen.hexdigest()


def found_rows(generator: np.random.Generator) -> bytes:
    """The best of rows that are close to each other, for features that take every size of group."""
    rows = (generator.standard_normal(37) + 1e-4 * generator.standard_normal((700, 37))).astype(np.float32)
    panels = np.empty((44, neighbours.panel_bytes(37)), np.uint8)
    neighbours.encode_rows(rows, panels, threads=2)
    scores, found = np.empty((21, 9), np.float32), np.empty((21, 9), np.int64)
    neighbours.search_rows(rows, panels, None, 0.0, rows[:21], scores, found, threads=2)
    return panels.tobytes() + scores.tobytes() + found.tobytes()


def gathered_gradients(floats: list[np.dtype], generator: np.random.Generator) -> bytes:
    """What is taken of gradients of every type in two steps, and what stays."""
    velocities, residuals = ([np.zeros(3001, np.float32) for _ in floats] for _ in range(2))
    estimates, taken = np.zeros(3, np.float32), []
    for nesterov in (False, True):
        gradients = [generator.standard_normal(3001).round(2).astype(dtype) for dtype in floats]
        taken += accumulate_and_take(
            gradients, velocities, residuals, [30] * 3, estimates, momentum=0.9, scale=0.37, nesterov=nesterov
        )
    return b"".join(array.tobytes() for array in (*taken, *velocities, *residuals))


def run_with(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_every_instruction_set_gives_the_same_bits() -> None:
    here, compared = digest(), 0
    for name in INSTRUCTION_SETS:
        ran = run_with(GEARTRAIN_ISA=name)
        if "the best of this CPU is" in ran.stderr:
            continue
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.split() == [name, ops.lookahead(), here]
        compared += 1
    assert compared >= 1


@pytest.mark.parametrize("lookahead", ["bursts", "window"])
def test_how_rows_are_asked_for_changes_no_bit(lookahead: str) -> None:
    ran = run_with(GEARTRAIN_LOOKAHEAD=lookahead)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == [ops.isa(), lookahead, digest()]


def test_an_unknown_way_to_ask_for_rows_is_refused_by_name() -> None:
    ran = run_with(GEARTRAIN_LOOKAHEAD="hope")
    assert ran.returncode != 0
    assert "GEARTRAIN_LOOKAHEAD=hope is unknown; it must be bursts or window" in ran.stderr


def test_an_unknown_instruction_set_is_refused_by_name() -> None:
    ran = run_with(GEARTRAIN_ISA="sse9")
    assert ran.returncode != 0
    assert "GEARTRAIN_ISA=sse9 is unknown; it must be baseline, avx2, avx512 or amx" in ran.stderr


@pytest.mark.skipif(ops.isa() == "baseline", reason="only one instruction set here")
def test_the_best_instruction_set_is_the_default() -> None:
    assert ops.isa() in {"avx2", "avx512", "amx"}


if __name__ == "__main__":
    print(ops.isa(), ops.lookahead(), digest())
