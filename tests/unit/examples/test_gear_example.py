"""examples/gear_training.py, on views that need no download."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
from gear_data import page_views
from gear_data.movielens import Ratings

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "gear_training.py"


def test_the_example_trains_and_accounts_for_its_gradients(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    random = np.random.default_rng(0)
    rated = Ratings(random.integers(20, size=3000), random.integers(100, size=3000), random.integers(1, 6, size=3000))
    glyphs = random.integers(256, size=(100, 32, 32), dtype=np.uint8)
    made = page_views.make_page_views(rated, glyphs, images_per_movie=1, appeal_stars=4.0)
    monkeypatch.setattr(page_views, "load_page_views", lambda *_: made)
    example = runpy.run_path(str(EXAMPLE))
    auc = example["main"](["--steps", "60"])
    said = capsys.readouterr().out
    assert auc > 0.6
    assert f"AUC of 600 test views: {auc:.3f}" in said
    assert "0 waiting" in said
