"""Settings of the compiled store of rows, made from a table's spec."""

from __future__ import annotations

import hashlib
import re

from geartrain.ams.kernels import ops
from geartrain.ams.kernels._core import RowStoreSpec
from geartrain.ams.tables.counted_ids import compiled_admission
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.specs import DTYPES, Constant, Ids, Initializer, TableSpec, Uniform

_CONSTANT, _UNIFORM, _NORMAL = range(3)
_LARGEST_NORMAL = 6.5
_LARGEST = {"float32": (2 - 2**-23) * 2.0**127, "float16": 65504.0, "bfloat16": (2 - 2**-7) * 2.0**127}
_RUN = re.compile(r".*~[0-9a-f]{8}(?=/|$)")
ELAPSED_WINDOW = 16_384
"""Steps after which a row without pushes is caught up at the latest, where untouched rows move."""


def table_hash(name: str) -> int:
    """Return the 32-bit hash of a table's name that seeds its initial values.

    The suffix of a run, ``~`` and eight hexadecimal digits, is left out: runs of equal settings have equal values.
    """
    return int.from_bytes(hashlib.blake2b(_RUN.sub("", name).encode(), digest_size=4).digest(), "little")


def distribution_of(initializer: Initializer) -> tuple[int, float, float, float]:
    """Return the code of the compiled distribution, its two parameters, and a bound of its magnitudes."""
    if isinstance(initializer, Constant):
        return _CONSTANT, initializer.value, 0.0, abs(initializer.value)
    if isinstance(initializer, Uniform):
        return _UNIFORM, initializer.low, initializer.high, max(abs(initializer.low), abs(initializer.high))
    bound = abs(initializer.mean) + _LARGEST_NORMAL * initializer.std
    return _NORMAL, initializer.mean, initializer.std, bound


def store_spec(spec: TableSpec, owned_buckets: Ids, threads: int, window: int) -> RowStoreSpec:
    """Return the settings of a table's compiled store, as of RowTable. Raises InvalidArgument."""
    distribution, first, second, bound = distribution_of(spec.initializer)
    largest = _LARGEST[spec.dtype]
    if bound > largest:
        raise InvalidArgument(
            f"initializer {spec.initializer} of table {spec.name!r} reaches {bound:g}; {spec.dtype} ends at {largest:g}"
        )
    return RowStoreSpec(
        dim=spec.dim,
        dtype=ops.DTYPE_CODES[spec.numpy_dtype],
        slot_dtype=ops.DTYPE_CODES[DTYPES[spec.slot_dtype]],
        optimizer=ops.compiled_optimizer(spec.optimizer),
        distribution=distribution,
        first=first,
        second=second,
        seed=spec.seed,
        table_hash=table_hash(spec.name),
        owned_buckets=owned_buckets,
        num_rows=-1 if spec.num_rows is None else spec.num_rows,
        threads=threads,
        window=window,
        admission=compiled_admission(spec.admission),
        keeps_lives=spec.keeps_lives,
        max_bytes=-1 if spec.max_bytes is None else spec.max_bytes * len(owned_buckets) // ops.NUM_BUCKETS,
        name=spec.name,
    )
