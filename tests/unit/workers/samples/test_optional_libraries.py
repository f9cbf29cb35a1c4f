"""Without the libraries that read samples the rest works, and what needs one says how to install it."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys
for name in ("pyarrow", "confluent_kafka"):
    sys.modules[name] = None  # an import of it fails
import geartrain as gt
try:
    {call}
except gt.errors.ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("call", "extra"),
    [
        ("gt.ParquetSamples('x.parquet', columns=['user'], batch_size=8)", "data"),
        ("gt.KafkaSamples('clicks', 'localhost:1', schema={'user': 'int64'}, batch_size=8)", "kafka"),
        ("gt.compress_samples('x.parquet', 'trees', levels={'user': ['user']})", "data"),
    ],
)
def test_the_error_names_the_extra(call: str, extra: str) -> None:
    done = subprocess.run([sys.executable, "-c", CODE.format(call=call)], capture_output=True, text=True, check=False)
    assert f"pip install 'geartrain[{extra}]'" in done.stdout, done.stderr
