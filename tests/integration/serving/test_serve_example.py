"""examples/train_and_serve.py, whole."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import geartrain as gt
from tests.support.served_models import require_onnx

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "train_and_serve.py"


def test_what_the_example_trains_answers_over_http(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    require_onnx()
    pytest.importorskip("faiss", reason="needs pip install 'geartrain[serve]'")
    example = runpy.run_path(str(EXAMPLE))
    example["main"](str(tmp_path / "characters"))
    said = capsys.readouterr().out
    assert "G is [{'class': 'G', 'id': 6, " in said
    assert "faiss has 36 classes of 64 numbers" in said
    again = gt.load_model(tmp_path / "characters")
    assert again.predict([example["drawn"]("Q", 28, 0)], k=1)[0][0][0] == "Q"
