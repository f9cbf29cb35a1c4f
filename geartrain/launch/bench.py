"""Runner of the benches in ``benchmarks/`` of a checkout: Geartrain against a rival in one run, as ratios.

The bench ``rows`` is every file ``rows.py`` or ``rows_*.py`` there (helpers start with "_"); ``rows_inprocess``
is the one file of that name. Each has a function ``results(full=False)`` that yields :class:`Result` dictionaries; it
alternates Geartrain and the rival and quotes medians. Benches are not part of the installed package: figures mean
something only beside the source they come from.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict

from geartrain.ams.values.errors import ConfigError, GeartrainError


class Result(TypedDict):
    """Result of one case of a bench."""

    case: str
    """Measured case, with its sizes."""
    ours: float
    """Geartrain's figure, in ``unit``."""
    rival: str
    """Name of the rival."""
    theirs: float
    """The rival's figure, in ``unit``."""
    unit: str
    """Unit, such as "ms" or "MB/s"."""
    ratio: float
    """Ratio of the figures; above 1 Geartrain wins."""
    target: float | None
    """Promised ratio; None: shown for comparison only."""


class BrokenBench(GeartrainError):
    """A bench file is not of the form described above."""


def benches(folder: Path) -> dict[str, dict[str, str]]:
    """Return the benches of a folder by name, sorted: the name of each of its files, with the first sentence.

    Raises:
        ConfigError: ``folder`` is no folder.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"there is no folder {str(folder)!r}; benches are part of the source tree, not of the installed package: "
            "run this in a checkout, or give its benchmarks folder with --folder"
        )
    found: dict[str, dict[str, str]] = {}
    for path in sorted(folder.glob("[!_]*.py")):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        found.setdefault(path.stem.partition("_")[0], {})[path.stem] = text.partition("\n\n")[0].replace("\n", " ")
    return found


def run_bench(name: str, folder: Path, *, full: bool = False) -> Iterator[Result]:
    """Yield the results of one bench as they come.

    Args:
        name: a bench, or one of its files.
        folder: the ``benchmarks`` folder of a checkout.
        full: also run cases that take longer than a minute.

    Raises:
        ConfigError: there is no such bench (lists those there are), or it needs a package that is missing (names it).
        BrokenBench: a file has no ``results``, or a result lacks a field.
    """
    found = benches(folder)
    chosen = found.get(name) or [file for files in found.values() for file in files if file == name]
    if not chosen:
        shown = {bench: "" if set(files) == {bench} else f" ({', '.join(files)})" for bench, files in found.items()}
        known = "; ".join(bench + files for bench, files in shown.items())
        raise ConfigError(
            f"there is no bench {name!r} in {str(folder)!r}. There are (with the files of each, which run alone, too): "
            f"{known}. 'geartrain bench' says what each measures"
        )
    paths = [folder / f"{file}.py" for file in chosen]
    for path in paths:
        require_packages(path)
    for path in paths:
        for result in _module(path).results(full=full):
            if set(result) != set(Result.__annotations__):
                raise BrokenBench(f"{path} yields {sorted(result)}; a result has {sorted(Result.__annotations__)}")
            yield result


def require_packages(path: Path) -> None:
    """Raise ConfigError if a package is missing that a bench needs: one that the file, or a helper beside it, imports
    or lists in ``NEEDS`` (for imports of the product itself). An import in a ``try`` may fail."""
    missing = sorted(
        package for package in _needed(path, set()) & set(EXTRAS) if importlib.util.find_spec(package) is None
    )
    if missing:
        extras = ",".join(sorted({EXTRAS[package] for package in missing}))
        raise ConfigError(
            f"bench {path.stem} needs {', '.join(missing)}, which is not installed; pip install '.[{extras}]'"
        )


def _needed(path: Path, seen: set[Path]) -> set[str]:
    if path in seen or not path.exists():
        return set()
    seen.add(path)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    optional = {id(node) for body in ast.walk(tree) if isinstance(body, ast.Try) for node in ast.walk(body)}
    modules, programs = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and id(node) not in optional:
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and id(node) not in optional:
            modules.add(node.module or "")
        elif isinstance(node, ast.Assign) and "NEEDS" in [getattr(target, "id", "") for target in node.targets]:
            modules |= set(ast.literal_eval(node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.endswith(".py"):
            programs.add(path.parent / node.value)
    for module in modules:
        programs |= {root / f"{module.replace('.', '/')}.py" for root in _roots(path)}
    return {module.partition(".")[0] for module in modules}.union(*(_needed(used, seen) for used in programs))


def _roots(path: Path) -> tuple[Path, Path]:
    """Return the folders of a bench's modules: the bench's own, and the examples."""
    return path.parent, path.parent.parent / "examples"


EXTRAS = {
    "confluent_kafka": "kafka",
    "faiss": "bench",
    "fastapi": "bench",
    "fonticon_mdi7": "bench",
    "matplotlib": "bench",
    "onnx": "onnx",
    "onnxruntime": "serve",
    "onnxscript": "onnx",
    "prometheus_client": "metrics",
    "pyarrow": "data",
    "redis": "redis",
    "starlette": "serve",
    "uvicorn": "serve",
    "wordfreq": "bench",
}
"""Extra of pyproject.toml by module that a bench may lack."""


def machine() -> dict[str, object]:
    """Return the processor, memory, system and versions of the measurement."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": device,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _cpu_name() -> str:
    names = (line.partition(":")[2].strip() for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name"))
    return next(names, platform.processor())


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"geartrain_benchmarks.{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and typing look up a class's module here
    for folder in _roots(path):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    spec.loader.exec_module(module)
    if not callable(getattr(module, "results", None)):
        raise BrokenBench(f"{path} has no function results(full=False) that yields its results")
    return module
