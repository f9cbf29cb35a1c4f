"""Check of a GPU host: build, test, and measure kernels and steps beside what a model says.

``make gpu-check``. Needs python >= 3.11 with torch, triton, numpy, nanobind and pytest, and cmake, ninja and a C++
compiler; no network. The extension is built beside its Python files and the repository itself is what is imported;
nothing is installed. Packages that the machine lacks may lie as wheels in a folder (``make gpu-check WHEELS=folder``;
with their dependencies).

Every part runs in a process of its own and has a time after which it is ended. None stops the others; report.json is
written anew after each. At the end stand the kernels and steps by what they take over what the model says, worst first.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
BUILD = REPOSITORY / "build" / "gpu-check"
PACKAGES = BUILD / "packages"

NEEDED = (
    *("torch", "triton", "numpy", "ml_dtypes", "safetensors", "xxhash", "fsspec", "pydantic", "yaml", "platformdirs"),
    *("grpc", "grpc_health", "grpc_reflection", "lmdb", "rich", "nanobind", "pytest", "pytest_timeout", "hypothesis"),
)
# An editable install of Geartrain would come before what is built here, also in child processes.
SITECUSTOMIZE = """import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"]
"""
PROGRAMS = ("cmake", "ninja")
SLOWER = 1.4
"""What is measured over modelled may be this much."""

Report = dict[str, Any]


def run(*command: str | Path, environ: dict[str, str] | None = None) -> int:
    """Run a command in the repository, its output being ours; return its exit code."""
    print("+", *command, flush=True)
    return subprocess.run(command, cwd=REPOSITORY, env=environ, check=False).returncode


def unpack_wheels(folder: Path) -> None:
    """Lay the wheels of ``folder`` beside the machine's own packages."""
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise SystemExit(f"no wheels in {folder}; give a folder of .whl files with WHEELS=")
    shutil.rmtree(PACKAGES, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(PACKAGES)]
    if code := run(*pip, *wheels):
        raise SystemExit(code)
    sys.path.insert(0, str(PACKAGES))


def require(modules: tuple[str, ...], programs: tuple[str, ...]) -> None:
    """Name everything that is missing at once, and the remedy."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    missing += [name for name in programs if shutil.which(name) is None]
    if missing:
        raise SystemExit(f"missing here: {', '.join(missing)}. Install them, or pass their wheels with WHEELS=folder")


def require_device() -> None:
    """Say at once that there is no GPU, before minutes of building."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit(
            f"torch {torch.__version__} sees no CUDA device here; with --dry the parts run small, on a CPU"
        )


def build_core() -> None:
    """Compile the extension into ``ams/kernels``, and give up if that fails: nothing runs without it."""
    tree = BUILD / "cmake"
    configure = ("cmake", "-S", REPOSITORY, "-B", tree, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release")
    for command in ((*configure, f"-DPython_EXECUTABLE={sys.executable}"), ("cmake", "--build", tree)):
        if code := run(*command):
            raise SystemExit(code)


def environment(wheels: Path | None) -> dict[str, str]:
    """The environment in which ``geartrain`` is this repository."""
    BUILD.mkdir(parents=True, exist_ok=True)
    (BUILD / "sitecustomize.py").write_text(SITECUSTOMIZE, encoding="utf-8")
    paths = [REPOSITORY, BUILD, *([PACKAGES] if wheels is not None else [])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "TRITON_INTERPRET": "0"}


def cuda_tests() -> list[str]:
    """The test files that hold tests for a CUDA device."""
    files = sorted((REPOSITORY / "tests").rglob("test_*.py"))
    return [str(path.relative_to(REPOSITORY)) for path in files if "mark.cuda" in path.read_text(encoding="utf-8")]


def parts(*, dry: bool, ranks: bool) -> list[tuple[str, list[str], int]]:
    """(name, command, seconds after which it is ended), in the order in which they run."""
    python = sys.executable
    measure = [python, "-m", "scripts.kernels.on_device"]
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rsf", "--no-header"]
    small = ["--dry"] if dry else []
    listed: list[tuple[str, list[str], int]] = [
        ("rates", [*measure, "rates", *small], 60),
        (
            "kernels",
            [*pytest, "--deselect", "tests/unit/bridge/kernels/test_compiled.py", "tests/unit/bridge/kernels"],
            150,
        ),
        ("cuda tests", [*pytest, "-m", "cuda", *cuda_tests()], 150),
        ("waits", [*measure, "waits", *small], 90),
        ("captured", [*measure, "captured", *small], 60),
        ("head", [*measure, "head", *small], 150),
        ("embeddings", [*measure, "embeddings", *small], 90),
        ("graph", [*measure, "graph", *small], 90),
    ]
    alone = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    listed.append(("collectives", [*alone, "-m", "scripts.kernels.on_device", "head", *small], 60))
    if ranks:
        script = ["-m", "torch.distributed.run", "--rdzv-backend", "static", "--standalone", "--nproc-per-node", "gpu"]
        for name, part in (("ranks", "head"), ("embeddings on ranks", "embeddings")):
            listed.append((name, [python, *script, "-m", "scripts.kernels.on_device", part, *small], 150))
    return listed


def run_part(command: Sequence[str], seconds: int, environ: dict[str, str]) -> Report:
    """What one part found: its JSON, or the end of its output where it has none, and how it ended."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environ, stdout=subprocess.PIPE, text=True, timeout=seconds, check=False
        )
        code, out = done.returncode, done.stdout
    except subprocess.TimeoutExpired as exc:
        code, out = 124, exc.stdout.decode() if isinstance(exc.stdout, bytes) else str(exc.stdout or "")
    report: Report = {"seconds": round(time.monotonic() - began, 1), "exit": code}
    try:
        report["found"] = json.loads(out)
    except ValueError:
        report["output"] = out[-6000:]
    return report


def worst_first(report: Report) -> list[tuple[float, str]]:
    """Kernels and steps by (measured over modelled, what they are)."""
    lines = []
    for part in ("head", "embeddings", "collectives"):
        for case in report.get(part, {}).get("found", {}).get("cases", ()):
            for kernel in case.get("kernels", ()):
                if kernel["modelled_ms"]:
                    ratio = kernel["measured_ms"] / kernel["modelled_ms"]
                    text = f"{kernel['kernel']}, {kernel['starts']} x, {kernel['measured_ms']:.3f} ms: {case['case']}"
                    lines.append((ratio, text))
            if case.get("modelled_ms"):
                beside = f", {case['rival']} {case['theirs_ms']:.2f} ms" if "theirs_ms" in case else ""
                text = f"the whole step, {case['launches']} launches, {case['ours_ms']:.2f} ms{beside}: {case['case']}"
                lines.append((case["ours_ms"] / case["modelled_ms"], text))
    return sorted(lines, reverse=True)


def failures(report: Report) -> list[str]:
    """What went wrong, a line each."""
    lines = []
    for name, part in report.items():
        if part.get("exit"):
            lines.append(f"{name}: exit code {part['exit']}{' (out of time)' if part['exit'] == 124 else ''}")
        found = part.get("found", {})
        lines += [f"{name}: {case}: {text}" for case, text in found.get("failures", {}).items()]
        lines += [f"{name}: {case['case']}: {case['failed']}" for case in found.get("cases", ()) if "failed" in case]
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, run every part, write the report; 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, help="folder of wheels that the machine lacks")
    parser.add_argument("--out", type=Path, default=BUILD, help="folder of report.json; default: build/gpu-check")
    parser.add_argument("--only", nargs="+", metavar="PART", help="these parts")
    parser.add_argument("--ranks", action="store_true", help="also with one rank on each GPU of this machine")
    parser.add_argument("--dry", action="store_true", help="what measures runs small, on a CPU; nothing is built")
    given = parser.parse_args(arguments)
    if given.wheels is not None:
        unpack_wheels(given.wheels)
    if given.dry:
        environ = dict(os.environ)
    else:
        require(NEEDED, PROGRAMS)
        require_device()
        environ = environment(given.wheels)
        build_core()
    report: Report = {}
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "report.json"
    for name, command, seconds in parts(dry=given.dry, ranks=given.ranks):
        if given.only is not None and name not in given.only:
            continue
        print(f"== {name}: at most {seconds} s", flush=True)
        alone = {"GEARTRAIN_COLLECTIVES_OF_ONE": "1"} if name == "collectives" else {}
        report[name] = run_part(command, seconds, environ | alone)
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(
            report[name].get("output", ""), f"   {report[name]['seconds']} s, exit {report[name]['exit']}", flush=True
        )
    print(f"\nmeasured over modelled, worst first (at most {SLOWER} is right):")
    for ratio, text in worst_first(report):
        print(f"  {ratio:6.2f}  {text}")
    failed = failures(report)
    for line in failed:
        print(f"  FAILED {line}")
    print(f"written: {path}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
