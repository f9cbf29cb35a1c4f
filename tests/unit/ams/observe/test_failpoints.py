"""Failpoints by themselves: what arms them, what is refused, and that every declared one is in the product."""

from __future__ import annotations

import errno
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from geartrain.ams.kernels._core import arm_failpoints
from geartrain.ams.observe import failpoints
from geartrain.ams.observe.failpoints import FAILPOINTS, VARIABLE, arm_from_environment, armed, reach, require_allowed
from geartrain.ams.values.errors import ConfigError, InternalError

REPOSITORY = Path(__file__).resolve().parents[4]


def reached_in_the_product() -> Counter[str]:
    found: Counter[str] = Counter()
    for folder in ("ams", "bridge", "workers", "serving", "geartrain/cli"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            found.update(re.findall(r'failpoints\.reach\("([^"]+)"\)', path.read_text(encoding="utf-8")))
        for path in (REPOSITORY / folder).rglob("csrc/**/*.cpp"):
            found.update(re.findall(r'\bfailpoint\("([^"]+)"\)', path.read_text(encoding="utf-8")))
    return found


def test_every_declared_failpoint_is_reached_somewhere_and_no_other() -> None:
    assert set(reached_in_the_product()) == set(FAILPOINTS)
    assert len(FAILPOINTS) >= 24


def test_an_unarmed_failpoint_costs_next_to_nothing() -> None:
    passes = 100_000
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(passes):
            reach("shard.apply.before")
        best = min(best, time.perf_counter() - start)
    assert best / passes < 1e-6  # 34 ns on an idle machine; this one may be busy


def test_an_error_is_raised_at_the_nth_pass_only() -> None:
    with armed("freeze.before=error@2") as passes:
        reach("freeze.before")
        with pytest.raises(InternalError, match=r"failpoint freeze\.before"):
            reach("freeze.before")
        reach("freeze.before")
        reach("freeze.after")
    reach("freeze.before")
    assert (passes.passed["freeze.before"], passes.fired["freeze.before"]) == (3, 1)


def test_a_disk_fails_with_the_errno_given() -> None:
    with armed("file.sync.before=error(ENOSPC)"), pytest.raises(OSError, match="No space left") as caught:
        reach("file.sync.before")
    assert caught.value.errno == errno.ENOSPC


def test_a_paused_thread_goes_on_when_the_file_is_there(tmp_path: Path) -> None:
    flag, gone_on = tmp_path / "go", threading.Event()

    def work() -> None:
        reach("thaw.before")
        gone_on.set()

    with armed(f"thaw.before=pause({flag})"):
        thread = threading.Thread(target=work)
        thread.start()
        assert not gone_on.wait(0.1)
        flag.touch()
        assert gone_on.wait(10)
        thread.join()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("shard.aply.before=kill", r"no failpoint 'shard.aply.before'; did you mean 'shard.apply.before'"),
        ("zzz=kill", r"no failpoint 'zzz'; there are"),
        *(
            (text, r"cannot be armed.*write thaw.before=kill")
            for text in (
                "thaw.before=kil",
                "thaw.before",
                "thaw.before=kill@0",
                "thaw.before=sleep",
                "thaw.before=sleep(long)",
                "thaw.before=sleep(-1)",
                "thaw.before=kill(9)",
                "thaw.before=kill;thaw.before=stop",
            )
        ),
        ("shard.apply.after=error", r"cannot be armed.*there nothing can fail"),
        ("freeze.before=error(EIO)", r"'freeze.before=error\(EIO\)' cannot be armed"),
        ("file.sync.before=error(ENOWHERE)", r"'file.sync.before=error\(ENOWHERE\)' cannot be armed"),
    ],
)
def test_what_cannot_be_armed_is_refused_by_name(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        require_allowed(environ={VARIABLE: text})


@pytest.fixture
def disarmed() -> Iterator[None]:
    """Afterwards, also in the compiled part: there an armed process asks Python, which other tests do not expect."""
    yield
    arm_failpoints(False)


@pytest.mark.usefixtures("disarmed")
def test_the_environment_arms_once_and_warns(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "_armed", [])
    monkeypatch.setattr(failpoints, "_read", set())
    environ = {VARIABLE: " thaw.before = sleep(0) ; freeze.before=error@2"}
    with caplog.at_level(logging.WARNING):
        arm_from_environment(environ=environ)
        reach("freeze.before")
        arm_from_environment(environ=environ)  # a second client of the process: the count goes on
        with pytest.raises(InternalError):
            reach("freeze.before")
    assert "will misbehave on purpose" in caplog.text
    assert "failpoint freeze.before: error@2" in caplog.text


@pytest.mark.parametrize(
    ("mode", "environ"), [("production", {}), (None, {"GEARTRAIN_MODE": "production"})], ids=["given", "environment"]
)
def test_production_refuses_failpoints(mode: str | None, environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"GEARTRAIN_FAILPOINTS is set .* mode is production"):
        arm_from_environment(mode, {VARIABLE: "thaw.before=kill", **environ})
    arm_from_environment(mode, environ)
