"""What all tests share: tests marked ``cuda`` or ``slow`` are skipped, with the reason, where that is not to be had.

What ``GEARTRAIN_TEST_REMOVE`` names is taken out of the product while they run.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Before anything else: it loads the core without what GEARTRAIN_TEST_REMOVE names, and sets security.folder to none.
import tests.faults  # noqa: F401

# Before torch is loaded, here and in what tests start: its idle threads sleep. As a rule they spin for a while,
# which takes the cores from the other processes of a run: threefold the time of some files.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Those of numpy spin, too, and cannot be told not to: five times the processor time of a test that multiplies matrices.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Where no GPU is, kernels run in Triton's interpreter, which is chosen before Triton is loaded.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# No test is about speed: on a busy machine an example takes as long as it takes.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


@pytest.fixture(scope="session", autouse=True)
def removed_mechanisms() -> Iterator[None]:
    """Show that the suite can fail: see ``tests/faults/mutations.py``."""
    if "GEARTRAIN_TEST_REMOVE" not in os.environ:
        yield
        return
    from tests.faults.mutations import removed_by_environment

    with removed_by_environment():
        yield


def _as_before() -> Iterator[None]:
    from geartrain.ams.values import config  # not before the lines above

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_identity", "_token"):
            patch.setattr(config, name, getattr(config, name))
        yield


@pytest.fixture(autouse=True)
def nobodys_certificate() -> Iterator[None]:
    """Take back who a command that ran in this process said that it is: see :func:`identify`."""
    yield from _as_before()


@pytest.fixture(autouse=True, scope="module")
def nobodys_certificate_after_a_module() -> Iterator[None]:
    """The same of what ran for the fixtures of a module."""
    yield from _as_before()


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """Take back what a command that ran in this process did to the root logger, for the tests after it."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    for handler in root.handlers[:]:
        if handler not in handlers:
            root.removeHandler(handler)


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """Take back the signal handlers that a test has set: torchrun in this process leaves its own."""
    before = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    }
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def random_numbers_of_its_own() -> None:
    """Give every test the same random numbers of torch, whichever ran before it in its process."""
    if (torch := sys.modules.get("torch")) is not None:  # else its generator is as it begins
        torch.manual_seed(0)


@pytest.fixture
def memory_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let snapshots lie below memory:// URLs, which no process of ours takes by itself: an object store for tests."""
    from geartrain.ams.storage.snapshot import store as snapshot_store

    monkeypatch.setattr(snapshot_store, "SCHEMES", (*snapshot_store.SCHEMES, "memory"))


def pytest_configure(config: pytest.Config) -> None:
    """Shift torch's seeds by ``--perturb``.

    Let Ctrl-C reach tests and their children where the shell started us in the background, which ignores it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if shift := config.getoption("--perturb"):
        import torch

        seeded = torch.manual_seed
        torch.manual_seed = lambda seed: seeded(int(seed) + shift)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give a process a file at a time; all files of the recorder are one, since they share a recording."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            recorder = "tests/recorder"
            return recorder if nodeid.startswith(recorder) else super()._split_scope(nodeid)

    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take ``--slow`` and ``--perturb``."""
    parser.addoption("--slow", action="store_true", help="run the tests that are marked slow, too")
    parser.addoption("--perturb", type=int, default=0, help="other random numbers of torch: does a test hold by luck?")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs a CUDA device if there is none, and what takes long unless it is asked for.

    Files that take longest come first, so that no process of a run is left with one at its end.
    """
    seconds = json.loads(Path(__file__).with_name("seconds.json").read_text("utf-8"))
    items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], 0))
    if not config.getoption("--slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow; --slow runs it"))
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if not marked:
        return
    import torch  # only where a test asks for it

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
