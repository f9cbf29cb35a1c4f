"""A service that follows a training in another process: swaps under load, classes that come and go, rollback, loss."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from geartrain.ams.storage.snapshot.folder import list_snapshots
from tests.support.http_service import ask
from tests.support.role_process import RoleProcess

REPOSITORY = Path(__file__).resolve().parents[3]
PATIENCE_SECONDS = 60.0


class Training:
    """The process of :mod:`tests.support.published_training`."""

    def __init__(self) -> None:
        self.folder = Path()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.published_training"],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(self, folder: Path) -> None:
        """Begin another one."""
        self.folder = folder
        self.do("begin", folder=str(folder))

    def do(self, wish: str, **details: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": wish, **details}) + "\n")
        self.process.stdin.flush()
        return self._answer().get("said")

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the training ended"
        answer: dict[str, Any] = json.loads(line)
        return answer


class Client:
    """Asks a service."""

    role: RoleProcess

    def __init__(self, address: str) -> None:
        self.address = address
        image = io.BytesIO()
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16), np.uint8)).save(image, "PNG")
        self.picture = {"images": [base64.b64encode(image.getvalue()).decode()], "k": 3}

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        return ask(self.address, method, path, body)

    def classify(self) -> tuple[int, list[dict[str, Any]]]:
        """The version that answered, and its best classes."""
        status, said = self.ask("POST", "/v1/classify", self.picture)
        assert status == 200, said
        return said["version"], said["answers"][0]

    def following(self) -> dict[str, Any]:
        said: dict[str, Any] = self.ask("GET", "/v1/models/faces")[1]["following"]
        return said

    def is_ready(self) -> bool:
        with suppress(ConnectionError):  # of a worker that was too busy to read the question in time
            return self.ask("GET", "/readyz")[0] == 200
        return False

    def wait_for(self, what: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while not what():
            assert time.monotonic() < end, self.following()
            time.sleep(0.02)

    def wait_for_version(self, version: int) -> None:
        self.wait_for(lambda: self.ask("GET", "/v1/models/faces")[1]["current"] == version)


def require_of_one_version(version: int, best: list[dict[str, Any]]) -> None:
    assert best[0]["class"] == f"0@{version}"
    assert best[0]["score"] == pytest.approx(1, abs=1e-5)


@pytest.fixture(scope="module")
def process() -> Iterator[Training]:
    pytest.importorskip("onnxruntime", reason="needs pip install 'geartrain[serve]'")
    training = Training()
    try:
        yield training
    finally:
        training.process.kill()
        training.process.communicate()


@pytest.fixture
def training(process: Training, tmp_path: Path) -> Training:
    process.begin(tmp_path / "live")
    return process


@pytest.fixture
def service(request: pytest.FixtureRequest, training: Training, tmp_path: Path) -> Iterator[Client]:
    versions = str(tmp_path / "versions")
    arguments = ["--follow", f"faces={training.folder}", "--versions", versions, "--listen", "127.0.0.1:0"]
    arguments += getattr(request, "param", [])
    with RoleProcess("serve", *arguments, errors=tmp_path / "service.log") as role:
        client = Client(role.address)
        client.role = role
        yield client


@pytest.mark.parametrize("service", [["--workers=2"]], indirect=True)
def test_swaps_under_load_fail_nobody_and_mix_nothing(training: Training, service: Client) -> None:
    assert service.ask("GET", "/readyz")[0] == 503
    training.do("publish", version=1)
    service.wait_for(service.is_ready)  # each of them has a version then
    ended = threading.Event()
    answers: list[tuple[int, list[dict[str, Any]]]] = []
    failures: list[BaseException] = []

    def ask_on() -> None:
        try:
            while not ended.is_set():
                answers.append(service.classify())
        except BaseException as exc:
            failures.append(exc)

    askers = [threading.Thread(target=ask_on) for _ in range(3)]
    for asker in askers:
        asker.start()
    for version in range(2, 10):  # whole ones, and those of what changed
        training.do("publish", version=version)
        service.wait_for_version(version)
    ended.set()
    for asker in askers:
        asker.join()
    assert not failures
    for version, best in answers:
        require_of_one_version(version, best)
    assert len({version for version, _ in answers}) >= 6
    service.wait_for(lambda: service.following()["versions"] == 9)  # told after the version


def test_newcomers_are_answered_the_retired_never_and_a_rollback_stays(training: Training, service: Client) -> None:
    training.do("publish", version=1)
    service.wait_for_version(1)
    training.do("retire", classes=[0])
    (newcomer,) = training.do("add")  # the place of the retired one
    assert newcomer == 0
    training.do("retire", classes=[3])
    training.do("add")
    training.do("publish", version=2)
    service.wait_for_version(2)
    version, best = service.classify()
    require_of_one_version(version, best)
    training.do("retire", classes=[0])
    training.do("publish", version=10)  # as version 2, but for class 0
    service.wait_for_version(10)
    assert all(found["id"] != 0 for _ in range(5) for found in service.classify()[1])

    status, said = service.ask("POST", "/v1/models/faces/rollback", {"to": 2})
    assert (status, said["current"]) == (200, 2)
    require_of_one_version(*service.classify())
    training.do("publish", version=11)
    service.wait_for(lambda: service.following()["state"] == "held" and service.following()["steps_behind"] == 9)
    assert service.classify()[0] == 2
    assert service.ask("POST", "/v1/models/faces/rollback", {"to": 10})[0] == 200
    service.wait_for_version(11)


def test_a_training_that_begins_again_at_an_earlier_step_is_served_and_keeps_what_it_publishes(
    training: Training, service: Client
) -> None:
    for version in (60, 70, 80, 90, 100):
        training.do("publish", version=version)
    service.wait_for_version(100)
    again = Training()
    try:
        again.begin(training.folder)
        for number, version in enumerate((50, 60, 70), 101):
            again.do("publish", version=version)
            service.wait_for_version(number)
            assert service.following()["step"] == version
            found, best = service.classify()
            assert (found, best[0]["class"]) == (number, f"0@{version}")
            assert best[0]["score"] == pytest.approx(1, abs=1e-5)
    finally:
        again.process.kill()
        again.process.communicate()
    names = [listed.name for listed in list_snapshots(training.folder)]
    assert names[:4] == ["step-000000070-2", "step-000000060-2", "step-000000050", "step-000000100"]


def test_a_training_that_is_gone_is_served_on_also_by_the_next_service(
    training: Training, service: Client, tmp_path: Path
) -> None:
    for version in (1, 2):
        training.do("publish", version=version)
        service.wait_for_version(version)
    damaged = training.folder / "step-000000002"
    training.do("publish", version=3)
    service.wait_for_version(3)
    training.process.kill()
    training.process.wait()
    for block in [*damaged.glob("rows-*"), *(training.folder / "step-000000003").glob("rows-*")]:
        block.write_bytes(b"")
    require_of_one_version(*service.classify())
    service.role.process.kill()  # which lets its folder of versions go
    service.role.process.wait()
    arguments = ("--follow", f"faces={training.folder}", "--versions", str(tmp_path / "versions"))
    with RoleProcess("serve", *arguments, "--listen", "127.0.0.1:0", errors=tmp_path / "second.log") as role:
        again = Client(role.address)
        version, best = again.classify()  # at once
        assert version == 3
        require_of_one_version(version, best)
        assert again.ask("POST", "/v1/models/faces/rollback", {})[1]["current"] == 2
        require_of_one_version(*again.classify())
