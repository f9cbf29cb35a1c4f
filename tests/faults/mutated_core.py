"""The compiled core with one mechanism taken out: one source file of it has other words, and is compiled as it was.

It is loaded in the place of the core by a process that has not loaded that yet: see :func:`load_named_by_environment`.
This module imports nothing of Geartrain.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = REPOSITORY / "ams/kernels/csrc"
MODULE = "geartrain.ams.kernels._core"
VARIABLE = "GEARTRAIN_TEST_REMOVE"
_TARGET = f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"


@dataclass(frozen=True)
class Removal:
    """What is taken out of one source file."""

    file: str
    """Below ``ams/kernels/csrc``."""
    edits: tuple[tuple[str, str], ...]
    """Words that occur there once, and those in their place."""


REMOVALS: Mapping[str, Removal] = {
    # A shard answers calls that mean the one before it.
    "shard fence": Removal(
        "engine/engine.cpp",
        (
            ("if (shard_incarnation != 0 && shard_incarnation != incarnation_)", "if (false)"),
            ("cluster_version != 0 && cluster_version < own)", "own < 0)"),
        ),
    ),
    # A shard forgets what it applied.
    "dedup": Removal(
        "writes/completed_writes.cpp",
        (("  entry.value.done.insert(std::move(waiting.mark));\n", ""),),
    ),
    # A shard takes writes of a process that was replaced.
    "client fence": Removal(
        "writes/completed_writes.cpp",
        (
            ("  require_current(context.stream, context.incarnation);\n  if (forgotten", "  if (forgotten"),
            ("if (context.incarnation < entry.value.incarnation)", "if (false)"),
        ),
    ),
    # Writes come between the blocks of others' writes.
    "writes wait": Removal(
        "carriers/served_call.cpp",
        (("if (pull == nullptr || pull->required_sync) return false;", "if (pull == nullptr) continue;"),),
    ),
    # A client uses memory again in which the shard may still be at work.
    "one use": Removal(
        "ring/ring_client.cpp",
        (("      ring_->retire(*mailbox_);", "      ring_->give_back(*mailbox_);"),),
    ),
}


class NoBuildFolder(Exception):
    """The core was not built here, so that it cannot be built anew with other words in it."""


def load_named_by_environment() -> None:
    """Load the core without what ``GEARTRAIN_TEST_REMOVE`` names, separated by commas, as far as it is compiled."""
    names = [name.strip() for name in os.environ.get(VARIABLE, "").split(",")]
    removed = [name for name in names if name in REMOVALS]
    if not removed or MODULE in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(MODULE, core_without(removed))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    spec.loader.exec_module(module)


def core_without(names: Sequence[str]) -> Path:
    """Build the core without some mechanisms, unless that was done before; return its file. Raises NoBuildFolder."""
    sources: dict[str, str] = {}
    for removal in (REMOVALS[name] for name in names):
        text = sources.get(removal.file) or (SOURCES / removal.file).read_text(encoding="utf-8")
        for words, instead in removal.edits:
            assert text.count(words) == 1, f"{removal.file} has {words!r} {text.count(words)} times"
            text = text.replace(words, instead)
        sources[removal.file] = text
    build = _build_folder()
    built = (build / _TARGET).stat()
    key = hashlib.sha256(repr((built.st_mtime_ns, built.st_size, sorted(sources.items()))).encode()).hexdigest()[:16]
    core = build / f"mutants/_core-{key}.so"
    if not core.exists():
        _build(sources, build, core)
    return core


def _build_folder() -> Path:
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for folder in REPOSITORY.glob(f"build/{tag}-*"):
        if (folder / "build.ninja").exists() and (folder / _TARGET).exists():
            return folder
    raise NoBuildFolder(f"{REPOSITORY}/build has no folder of a build for {tag}: 'make dev' makes one")


def _build(sources: Mapping[str, str], build: Path, core: Path) -> None:
    ninja = Path(sys.executable).with_name("ninja")
    told = [str(ninja if ninja.exists() else "ninja"), "-C", str(build), "-t", "commands", _TARGET]
    commands = subprocess.run(told, check=True, capture_output=True, text=True).stdout.splitlines()
    link = commands[-1]
    core.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=core.parent) as folder:
        for file, text in sources.items():
            changed, object_file = Path(folder, Path(file).name), Path(folder, Path(file).name + ".o")
            changed.write_text(text, encoding="utf-8")
            command = next((command for command in commands if command.endswith(f" -c {SOURCES / file}")), None)
            if command is None:
                raise NoBuildFolder(f"{build} was built from other sources than {SOURCES}: 'make dev' builds it anew")
            old_object = re.search(r" -o (\S+) -c ", command)[1]  # type: ignore[index]
            compiled = _without_dependencies(shlex.split(command.replace(str(SOURCES / file), str(changed))))
            compiled[compiled.index("-o") + 1] = str(object_file)
            subprocess.run(compiled, cwd=build, check=True, capture_output=True)
            link = link.replace(f" {old_object} ", f" {object_file} ")
        made = Path(folder, core.name)
        link = link.replace(f" -o {_TARGET} ", f" -o {made} ")
        subprocess.run(link, cwd=build, check=True, capture_output=True, shell=True)
        made.rename(core)
    with contextlib.suppress(FileNotFoundError):  # somebody else has
        for other in core.parent.glob("_core-*.so"):
            if other.stat().st_mtime < (build / _TARGET).stat().st_mtime:  # of the core as it was before
                other.unlink()


def _without_dependencies(command: list[str]) -> list[str]:
    """The command of a compiler that writes no file of dependencies, in which the build believes."""
    start = command.index("-MD")
    return command[:start] + command[start + 5 :]
