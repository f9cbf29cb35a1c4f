"""The examples of joint(): each ends by comparing its losses with those of a run that was stopped and resumed."""

from __future__ import annotations

import importlib

import pytest

FRAMEWORKS = {
    "train_with_grad_scaler": "torch",
    "train_with_lightning": "lightning",
    "train_with_accelerate": "accelerate",
    "train_with_transformers": "transformers",
}


@pytest.mark.parametrize("example", FRAMEWORKS)
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(
    example: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "it comes with pip install 'geartrain[examples]'"
    pytest.importorskip(FRAMEWORKS[example], reason=f"{FRAMEWORKS[example]} is not installed; {reason}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    importlib.import_module(example).main()
    assert "if it is resumed half-way" in capsys.readouterr().out
