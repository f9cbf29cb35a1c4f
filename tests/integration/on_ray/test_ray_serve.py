"""The example that serves a model on Ray Serve, in one replica and in three."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.http_service import ask
from tests.support.served_models import exported, picture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
EXAMPLE = Path(__file__).resolve().parents[3] / "examples/serve_on_ray.py"
SETTINGS = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.mark.parametrize("replicas", [1, 3])
def test_replicas_answer_and_end_with_their_program(replicas: int, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed; it comes with pip install 'geartrain[ray]'")
    pytest.importorskip("ray.serve", reason="Ray Serve is not installed; it comes with pip install 'ray[serve]'")
    folder = exported(tmp_path / "signs", version=7)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [sys.executable, str(EXAMPLE), str(folder), str(replicas), str(port)]
    with subprocess.Popen(command, env=os.environ | SETTINGS, stderr=subprocess.PIPE, text=True) as program:
        assert program.stderr is not None
        try:
            said = []
            for line in program.stderr:
                said.append(line)
                if "is ready at" in line:
                    break
            assert program.poll() is None, "".join(said)
            with ThreadPoolExecutor(8) as clients:
                asked = [
                    clients.submit(ask, f"127.0.0.1:{port}", "POST", "/v1/classify", picture(n)) for n in range(40)
                ]
            assert {(status, answer["version"]) for status, answer in (one.result() for one in asked)} == {(200, 7)}
            counts = [ask(f"127.0.0.1:{port}", "GET", "/v1/models")[1]["models"][0]["loaded"][0] for _ in range(60)]
            assert len({count["since"] for count in counts}) == replicas  # each loaded it by itself
        finally:
            program.send_signal(signal.SIGINT)
            rest = program.communicate(timeout=60)[1]
    assert "KeyboardInterrupt" in rest
    with pytest.raises(ConnectionRefusedError):
        ask(f"127.0.0.1:{port}", "GET", "/livez")
