"""Several processes that serve the same models: all make a change, or none, and one that comes back makes it, too."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.http_service import ask
from tests.support.role_process import RoleProcess
from tests.support.served_models import exported, picture

PICTURE = picture(1)
PLANT = """
import os, sys

def refuse(event, arguments):
    if event == "open" and os.environ["REFUSED"] in str(arguments[0]) and os.path.exists(os.environ["WHILE"]):
        raise OSError(12, "Cannot allocate memory", arguments[0])

if "geartrain.launch.serving.worker" in sys.orig_argv and sys.orig_argv[-1] == "1":
    sys.addaudithook(refuse)
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for version in (90, 120, 180):
        exported(folder / f"{version:06d}", version=version)
    return folder


class Service:
    """Two processes that serve; the second opens no file whose path has a text, while ``refusing`` is there."""

    def __init__(self, role: RoleProcess, refusing: Path) -> None:
        self.role, self.refusing = role, refusing

    @property
    def workers(self) -> list[psutil.Process]:
        """The second is the one that refuses."""
        children = psutil.Process(self.role.process.pid).children()
        return sorted(children, key=lambda child: child.cmdline()[-1:])

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        return ask(self.role.address, method, path, body)

    def answers(self, path: str = "/v1/classify?k=1") -> set[int]:
        """The versions, or codes of errors, that forty connections are answered with: by both processes."""
        asked = [self.ask("POST", path, PICTURE) for _ in range(40)]
        return {said["version"] if status == 200 else status for status, said in asked}

    def following(self) -> Any:
        return self.ask("GET", "/v1/models/glyphs")[1]["following"]

    def wait_for_both(self, *before: psutil.Process) -> None:
        """Until two processes other than these count."""
        counting: set[str] = set()
        while counting != {"0", "1"}:
            with (
                contextlib.suppress(ConnectionError, http.client.HTTPException, psutil.NoSuchProcess),
                closing(http.client.HTTPConnection(self.role.address, timeout=60)) as connection,
            ):
                connection.request("GET", "/metrics")
                text = connection.getresponse().read().decode()
                if not set(before) & set(self.workers):
                    counting = set(re.findall(r'serve_queue_items\{[^}]*worker="(\d)"', text))


Begin = Callable[..., Service]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    with contextlib.ExitStack() as roles:

        def begin(*arguments: str, refused: str = "/none/") -> Service:
            (tmp_path / "site").mkdir()
            (tmp_path / "site" / "sitecustomize.py").write_text(PLANT)
            paths = os.pathsep.join([str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
            planted = {"PYTHONPATH": paths, "REFUSED": refused, "WHILE": str(tmp_path / "refusing")}
            given = (*arguments, "--listen=127.0.0.1:0", "--workers=2")
            role = RoleProcess("serve", *given, errors=tmp_path / "log", **planted)
            return Service(roles.enter_context(role), tmp_path / "refusing")

        yield begin


def test_a_version_that_one_process_cannot_load_is_served_by_none_until_it_can(
    begin: Begin, models: Path, tmp_path: Path
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(models / "000090", source / "000090")
    service = begin("--follow", f"glyphs={source}", "--versions", str(out), refused="000000120")
    while service.ask("GET", "/readyz")[0] != 200:
        pass
    service.refusing.touch()
    shutil.copytree(models / "000120", source / "000120")
    while service.following()["failures"] < 2:
        assert service.answers() == {90}
    assert service.answers("/v1/classify?version=120") == {404}
    facts = service.following()
    assert (facts["state"], facts["step"], "Cannot allocate memory" in facts["error"]) == ("failing", 90, True)
    assert (out / "000000090").exists()
    before = service.workers[0]
    before.kill()
    service.wait_for_both(before)
    assert service.answers() == {90}
    service.refusing.unlink()
    while (said := service.ask("GET", "/v1/models/glyphs")[1])["current"] != 120:
        assert said["following"]["step"] == 90
    assert said["following"]["step"] == 120  # of the version beside it, at once
    assert service.answers() == {120}


def test_a_canary_or_rollback_that_one_process_cannot_load_is_of_none(begin: Begin, models: Path) -> None:
    service = begin(f"glyphs={models}", refused="/000090/")
    service.refusing.touch()
    for change, body in (("canary", {"version": 90, "share": 0.5}), ("rollback", {"to": 90})):
        status, said = service.ask("POST", f"/v1/models/glyphs/{change}", body)
        assert (status, "Cannot allocate memory" in said["error"]["message"]) == (404, True), said
        assert service.answers() == {180}
        assert service.answers("/v1/classify?version=90") == {404}
    said = [service.ask("GET", "/v1/models/glyphs")[1] for _ in range(20)]
    assert {(one["current"], one["canary"], one["held"]) for one in said} == {(180, None, False)}
    service.refusing.unlink()
    assert service.ask("POST", "/v1/models/glyphs/canary", b'{"version": 90, "share": 0.5}')[0] == 200
    assert service.answers() == {90, 180}


def test_a_change_waits_for_no_stopped_process_and_one_takes_its_place(begin: Begin, models: Path) -> None:
    service = begin(f"glyphs={models}")
    stopped = service.workers[1]
    stopped.send_signal(signal.SIGSTOP)
    changed = b""
    while not changed:  # half of the connections are to the one that is stopped
        with (
            contextlib.suppress(TimeoutError),
            closing(http.client.HTTPConnection(service.role.address, timeout=3)) as connection,
        ):
            connection.request("POST", "/v1/models/glyphs/rollback", b'{"to": 120}')
            with contextlib.suppress(ConnectionError, http.client.HTTPException):
                changed = connection.getresponse().read()
    assert json.loads(changed)["current"] == 120
    service.wait_for_both(stopped)
    assert service.answers() == {120}


def test_a_canary_from_a_folder_of_versions_is_that_version_wherever_it_is_loaded_again(
    begin: Begin, models: Path, tmp_path: Path
) -> None:
    others = tmp_path / "others"
    for version in ("000120", "000180"):
        shutil.copytree(models / version, others / version)
    (others / "000180" / "backbone.onnx").write_bytes(b"half")
    service = begin(f"glyphs={models / '000090'}", "--canary", str(others), "--share=0.5")
    assert service.answers() == {90, 120}
    before = service.workers[0]
    before.kill()
    service.wait_for_both(before)
    assert service.answers() == {90, 120}
    assert service.ask("POST", "/v1/models/glyphs/canary", b'{"share": 0}')[0] == 200
    assert service.answers() == {90}
    for to in (120, 90):
        assert service.ask("POST", "/v1/models/glyphs/rollback", {"to": to})[0] == 200
        assert service.answers() == {to}
