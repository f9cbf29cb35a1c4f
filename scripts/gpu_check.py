"""Build the core and run the CUDA tests and benches on a machine without a network (``make gpu-check``).

Needs python >= 3.11 with torch, numpy, nanobind and pytest, and cmake, ninja and a C++ compiler. The extension is built
beside its Python files and the repository itself is what is imported; nothing is installed and nothing is downloaded.
Packages the machine lacks may lie as wheels in a folder (``make gpu-check WHEELS=folder``; with their dependencies).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
BUILD = REPOSITORY / "build" / "gpu-check"
PACKAGES = BUILD / "packages"

NEEDED = ("torch", "numpy", "ml_dtypes", "pydantic", "yaml", "pytest", "nanobind")
NEEDED_BY_BENCHES = ("typer", "rich")
# An editable install of Geartrain would come before what is built here, also in child processes.
SITECUSTOMIZE = """import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"]
"""
PROGRAMS = ("cmake", "ninja")
BENCHES = ("rows", "head")


def run(*command: str | Path, environ: dict[str, str] | None = None) -> int:
    """Run a command in the repository, its output being ours; return its exit code."""
    print("+", *command, flush=True)
    return subprocess.run(command, cwd=REPOSITORY, env=environ, check=False).returncode


def must_run(*command: str | Path, environ: dict[str, str] | None = None) -> None:
    """Run a command and give up if it fails."""
    if code := run(*command, environ=environ):
        raise SystemExit(code)


def unpack_wheels(folder: Path) -> None:
    """Lay the wheels of ``folder`` beside the machine's own packages."""
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise SystemExit(f"no wheels in {folder}; give a folder of .whl files with WHEELS=")
    shutil.rmtree(PACKAGES, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(PACKAGES)]
    must_run(*pip, *wheels)
    sys.path.insert(0, str(PACKAGES))


def require(modules: tuple[str, ...], programs: tuple[str, ...]) -> None:
    """Name everything that is missing at once, and the remedy."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    missing += [name for name in programs if shutil.which(name) is None]
    if missing:
        raise SystemExit(f"missing here: {', '.join(missing)}. Install them, or pass their wheels with WHEELS=folder")


def build_core() -> None:
    """Compile the extension into ``ams/kernels``."""
    tree = BUILD / "cmake"
    must_run(
        *("cmake", "-S", REPOSITORY, "-B", tree, "-G", "Ninja"),
        *("-DCMAKE_BUILD_TYPE=Release", f"-DPython_EXECUTABLE={sys.executable}"),
    )
    must_run("cmake", "--build", tree)


def environment(wheels: Path | None) -> dict[str, str]:
    """The environment in which ``geartrain`` is this repository, and check that it is."""
    (BUILD / "sitecustomize.py").write_text(SITECUSTOMIZE, encoding="utf-8")
    paths = [REPOSITORY, BUILD, *([PACKAGES] if wheels is not None else [])]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    check = (
        f"import geartrain.ams.kernels._core as c; assert c.__file__.startswith({str(REPOSITORY / 'geartrain')!r}), c"
    )
    must_run(sys.executable, "-c", check, environ=environ)
    return environ


def cuda_tests() -> list[str]:
    """The test files that hold tests for a CUDA device."""
    files = sorted((REPOSITORY / "tests").rglob("test_*.py"))
    return [str(path.relative_to(REPOSITORY)) for path in files if "mark.cuda" in path.read_text(encoding="utf-8")]


def main() -> None:
    """Build, test, bench; exit with the first failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, help="folder of wheels that the machine lacks")
    wheels = parser.parse_args().wheels
    if wheels is not None:
        unpack_wheels(wheels)
    require(NEEDED, PROGRAMS)
    build_core()
    environ = environment(wheels)
    tests = cuda_tests()
    if tests:
        must_run(sys.executable, "-m", "pytest", "-m", "cuda", "-rs", *tests, environ=environ)
    else:
        print("no test is marked cuda")
    import torch

    if not torch.cuda.is_available():
        print("benches skipped: no CUDA device on this machine")
        return
    require(NEEDED_BY_BENCHES, ())
    for name in BENCHES:
        must_run(sys.executable, "-m", "geartrain", "bench", name, environ=environ)


if __name__ == "__main__":
    main()
