"""Builds the C++ core with sanitizers and runs its tests with each: ``make sanitize``.

"address" is AddressSanitizer with UndefinedBehaviorSanitizer, "thread" is ThreadSanitizer; each build has a folder of
its own below ``build/sanitize``. The interpreter is the usual one, into which the sanitizer's library is preloaded; it
and every process that a test starts find the sanitized core. What is given goes to pytest, in place of :data:`TESTS`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
BUILD = REPOSITORY / "build" / "sanitize"
TESTS = (
    "tests/unit/ams/kernels",
    "--ignore=tests/unit/ams/kernels/test_class_pass.py",  # loads torch, which alone takes minutes
    "tests/unit/ams/server",
    "tests/unit/ams/tables/test_array_update.py",
    "tests/unit/ams/tables/test_row_table.py",
    "tests/unit/ams/tables/test_row_table_growth.py",
    # A client and its shards: in the process, by mailboxes, by TCP.
    "tests/unit/ams/client/test_writes.py",
    "tests/integration/rows/test_row_calls.py",
    "tests/integration/rows/test_row_connections.py",
)
TEST_SECONDS = 900
"""Of one test: sanitizers take their time."""
OPTIONS = {
    # The interpreter keeps much until it ends, and takes no harm from what it cannot have.
    "address": {"ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1", "UBSAN_OPTIONS": "print_stacktrace=1"},
    # Forked children start threads: ThreadSanitizer cannot promise to follow them, but need not end them.
    "thread": {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1:die_after_fork=0"},
}
SETTINGS = {
    "address": {},
    # ThreadSanitizer makes a fork of vfork, with all that is done in a forked child: gRPC's part of it ends programs
    # that tests start. Without it a forked child cannot use gRPC.
    "thread": {"GRPC_ENABLE_FORK_SUPPORT": "0"},
}
# Before the finder of an editable install, in every process that inherits the environment.
SITECUSTOMIZE = """import importlib.util
import sys


class SanitizedCore:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "geartrain.ams.kernels._core":
            return importlib.util.spec_from_file_location(name, {core!r})
        return None


sys.meta_path.insert(0, SanitizedCore)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(OPTIONS), help="one of them alone")
    chosen, pytest = parser.parse_known_args()
    kinds = [chosen.only] if chosen.only else list(OPTIONS)
    failed = [kind for kind in kinds if not tests_pass(kind, build(kind), pytest or list(TESTS))]
    if failed:
        sys.exit(f"failed under: {', '.join(failed)}")


def build(kind: str) -> Path:
    """Build the core with one kind of sanitizer; return its file."""
    folder = BUILD / kind
    programs = Path(sys.executable).parent
    cmake, ninja = (shutil.which(name, path=f"{programs}:{os.environ['PATH']}") for name in ("cmake", "ninja"))
    if cmake is None or ninja is None:
        sys.exit("cmake or ninja is missing: 'make dev' installs them")
    options = [f"-DGEARTRAIN_SANITIZE={kind}", "-DCMAKE_BUILD_TYPE=Release", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    options.append(f"-DPython_EXECUTABLE={sys.executable}")
    subprocess.run([cmake, "-S", REPOSITORY, "-B", folder, "-G", "Ninja", *options], check=True, stdout=sys.stderr)
    subprocess.run([cmake, "--build", folder], check=True, stdout=sys.stderr)
    (core,) = folder.glob("_core*.so")
    return core


def tests_pass(kind: str, core: Path, pytest: list[str]) -> bool:
    """Run the tests; what the sanitizer reports, in whatever process, is printed and fails them."""
    site, reports = core.parent / "site", core.parent / "reports"
    shutil.rmtree(reports, ignore_errors=True)
    for folder in (site, reports):
        folder.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(SITECUSTOMIZE.format(core=str(core)), encoding="utf-8")
    environ = {
        **os.environ,
        "PYTHONPATH": str(site),
        # The C++ library, too: exceptions are intercepted when the sanitizer starts, before the core is loaded.
        "LD_PRELOAD": " ".join(library(name) for name in (f"lib{kind[0]}san.so", "libstdc++.so.6")),
        "OMP_NUM_THREADS": "1",
        **SETTINGS[kind],
    }
    for name, options in OPTIONS[kind].items():
        environ[name] = f"{options}:log_path={reports / name.partition('_')[0].lower()}"
    used = "import geartrain.ams.kernels._core as core; print(core.__file__)"
    found = subprocess.run([sys.executable, "-c", used], env=environ, check=True, stdout=subprocess.PIPE, text=True)
    if Path(found.stdout.strip()) != core:
        sys.exit(f"Python loads {found.stdout.strip()}, not {core}")
    print(f"== {kind}: pytest {' '.join(pytest)}", flush=True)
    # What a sanitizer says last must not be lost in a capture.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--capture=sys",
        "-m",
        "not exact_memory",
        "-o",
        f"timeout={TEST_SECONDS}",
        *pytest,
    ]
    code = subprocess.run(command, cwd=REPOSITORY, env=environ, check=False).returncode
    if code < 0:
        print(f"pytest was ended by signal {-code}")
    found_reports = sorted(reports.iterdir())
    for report in found_reports:
        print(report.read_text(encoding="utf-8", errors="replace"))
    return code == 0 and not found_reports


def library(name: str) -> str:
    """The path of a library of the compiler."""
    compiler = os.environ.get("CXX", "g++")
    found = subprocess.run([compiler, f"-print-file-name={name}"], check=True, stdout=subprocess.PIPE, text=True)
    path = Path(found.stdout.strip())
    if not path.is_absolute():
        sys.exit(f"{compiler} has no {name}; install the sanitizers' libraries of that compiler")
    return str(path.resolve())


if __name__ == "__main__":
    main()
