"""Services of parts of the classes, and one before them that asks all: their answers are those of one service."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.serving.test_follow_a_training import Client, Training, process, require_of_one_version
from tests.support.role_process import RoleProcess
from tests.support.served_models import exported, in_base64, picture, small_model

__all__ = ["process"]
PARTS = 3


class Group:
    """The services of all parts of what is followed, each ready when it has a version, and the one before them."""

    def __init__(self, running: ExitStack, followed: Path, logs: Path) -> None:
        self.running, self.followed, self.logs = running, followed, logs
        self.parts = [self.start(f"--part={number}/{PARTS}") for number in range(1, PARTS + 1)]
        self.front = self.start(f"--parts={','.join(part.address for part in self.parts)}")

    def start(self, *flags: str, listen: str = "127.0.0.1:0") -> Client:
        flags = ("--follow", f"faces={self.followed}", "--listen", listen, *flags)
        role = self.running.enter_context(RoleProcess("serve", *flags, errors=self.logs / "services.log"))
        client = Client(role.address)
        client.role = role
        return client


@pytest.fixture
def running() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def test_parts_answer_as_one_index_and_a_lost_one_is_named(running: ExitStack, tmp_path: Path) -> None:
    folder = exported(tmp_path / "exported", small_model(sub_centers=2))
    group = Group(running, folder, tmp_path)
    one = Client(running.enter_context(RoleProcess("serve", f"faces={folder}", "--listen=127.0.0.1:0")).address)
    group.front.wait_for(lambda: group.front.ask("GET", "/readyz")[0] == 200)

    features = np.random.default_rng(0).standard_normal((5, 16)).tolist()
    questions: dict[str, dict[str, Any]] = {
        "nearest": {"features": features, "k": 8},
        "classify": {"images": [in_base64(picture(seed)) for seed in range(3)], "k": 4},
        "verify": {"pairs": [[in_base64(picture(1)), in_base64(picture(2))]]},
    }
    for operation, question in questions.items():
        expected = one.ask("POST", f"/v1/{operation}", question)
        assert expected[0] == 200
        assert group.front.ask("POST", f"/v1/{operation}", question) == expected
    (own,) = group.parts[1].ask("POST", "/v1/nearest", {"features": features[:1]})[1]["answers"]
    assert sorted(best["id"] for best in own) == [2, 3, 4]  # of eight classes

    several = ",".join(group.parts[number].address for number in (0, 1, 1))
    with pytest.raises(AssertionError, match="name the 3 services of"):
        RoleProcess("serve", str(folder), f"--parts={several}", "--listen=127.0.0.1:0")

    lost = group.parts[1]
    lost.role.process.kill()
    lost.role.process.wait()
    for _ in range(2):
        status, said = group.front.ask("POST", "/v1/nearest", questions["nearest"])
        assert status == 503 and lost.address in said["error"]["message"]
    status, said = group.front.ask("GET", "/readyz")
    assert status == 503 and f"not ready: no service of models answers at {lost.address}" in said["error"]["message"]
    assert group.front.ask("GET", "/v2/health/ready") == (503, {"ready": False})
    group.start(f"--part=2/{PARTS}", listen=lost.address)

    def again() -> tuple[int, Any]:
        return group.front.ask("POST", "/v1/nearest", questions["nearest"])

    group.front.wait_for(lambda: again()[0] == 200)
    assert again() == one.ask("POST", "/v1/nearest", questions["nearest"])
    assert group.front.ask("GET", "/readyz")[0] == 200


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--part=4/3",), "part is '4/3'; it must be one of so many, as 2/3"),
        (("--part=1/3", "--parts=localhost:1"), "part is '1/3', and parts are set"),
        (("--part=two",), "part is 'two'; it must be one of so many, as 2/3"),
        (("--parts=localhost",), "localhost"),
    ],
)
def test_settings_of_parts_that_cannot_be_are_refused(tmp_path: Path, flags: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence.replace("(", r"\(")):
        RoleProcess("serve", f"--follow={tmp_path}", *flags)


def test_no_answer_mixes_versions_of_parts_while_a_training_publishes(
    running: ExitStack, process: Training, tmp_path: Path
) -> None:
    process.begin(tmp_path / "live")
    group = Group(running, process.folder, tmp_path)
    front, answers, failures, ended = group.front, list[Any](), list[Any](), threading.Event()
    process.do("publish", version=1)
    front.wait_for_version(1)

    def ask_on() -> None:
        while not ended.is_set():
            status, said = front.ask("POST", "/v1/classify", {**front.picture, "k": 8})
            (answers if status == 200 else failures).append((status, said))

    asker = threading.Thread(target=ask_on)
    asker.start()
    try:
        for version in range(2, 7):
            process.do("publish", version=version)
            front.wait_for_version(version)
    finally:
        ended.set()
        asker.join()
    for _, said in answers:
        require_of_one_version(said["version"], said["answers"][0])
        assert sorted(best["score"] for best in said["answers"][0]) == pytest.approx([0] * 7 + [1], abs=1e-5)
    assert {said["version"] for _, said in answers} >= {2, 3, 4, 5}
    assert not failures, failures[0]
