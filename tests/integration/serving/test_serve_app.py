"""Models as an ASGI app for anybody's server, without torch or from a model in Python."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import geartrain as gt
from geartrain.serving.http.ports import listening_socket
from geartrain.serving.http.server import HttpServer
from tests.support.http_service import ask
from tests.support.served_models import exported, picture, small_model


@contextmanager
def served(app: Any) -> Iterator[str]:
    server = HttpServer(app, listening_socket("127.0.0.1:0", "serve"), "127.0.0.1", name="test")
    try:
        yield server.address
    finally:
        server.stop(20)
    assert server.stop_reason is None


def test_a_model_is_an_app_whether_it_was_exported_or_not(tmp_path: Path) -> None:
    model = small_model()
    folder = exported(tmp_path / "model", model, version=7)
    answers = []
    for app in (model.serve_app(), gt.load_model(folder).serve_app(), gt.serve_app(folder)):
        with served(app) as address:
            status, said = ask(address, "POST", "/v1/classify?k=3", picture(1), None, Host="models.example")
            assert status == 200
            answers.append([entry["class"] for entry in said["answers"][0]])
    assert answers[0] == answers[1] == answers[2]


def test_limits_and_several_models_are_given_by_name(tmp_path: Path) -> None:
    folder = exported(tmp_path / "model")
    with served(gt.serve_app({"one": folder, "two": folder}, max_body_bytes=2000)) as address:
        assert [model["name"] for model in ask(address, "GET", "/v1/models")[1]["models"]] == ["one", "two"]
        assert ask(address, "POST", "/v1/models/one/classify", b" " * 2001)[0] == 413
    with pytest.raises(gt.errors.ConfigError, match="holds no model"):
        gt.serve_app(tmp_path / "nothing")


def test_an_exported_model_is_served_without_torch(tmp_path: Path) -> None:
    folder = exported(tmp_path / "model")
    code = f"import sys, geartrain; geartrain.serve_app({str(folder)!r}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
