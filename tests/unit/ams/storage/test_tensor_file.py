"""A file that is none of tensors is told from one, whatever its header says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from geartrain.ams.storage.tensor_file import map_tensors


@pytest.mark.parametrize(
    "header",
    [
        [],
        None,
        "a",
        {"a": []},
        {"a": {"dtype": [], "shape": [1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [10**30], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [10**30, 10**31]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 4]}},
        {"a": {"dtype": "F32", "shape": [17], "data_offsets": [0, 68]}},
    ],
)
def test_a_header_that_contradicts_its_file_is_a_value_error(header: object, tmp_path: Path) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "a").write_bytes(len(text).to_bytes(8, "little") + text + bytes(64))
    with pytest.raises(ValueError, match="it is no file of tensors"):
        map_tensors(tmp_path / "a")
