"""Installs the wheel in dist/ into a fresh environment that sees no compiler, and trains with it: ``make wheel-check``.

What is given is passed on to ``pip install``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
LIMIT_SECONDS = 60.0


def main() -> None:
    wheels = sorted((REPOSITORY / "dist").glob("geartrain-*.whl"))
    if len(wheels) != 1:
        sys.exit(f"dist/ holds {len(wheels)} wheels of geartrain; 'make wheel' makes one")
    with tempfile.TemporaryDirectory(prefix="geartrain-wheel-") as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        programs = folder / "venv" / "bin"
        # No compiler, no cmake, no checkout: the environment's own programs are all that can be found.
        environ = {key: value for key, value in os.environ.items() if key not in ("CC", "CXX", "PYTHONPATH")}
        environ["PATH"] = str(programs)

        def run(*command: str) -> float:
            began = time.monotonic()
            subprocess.run([str(programs / command[0]), *command[1:]], cwd=folder, env=environ, check=True)
            return time.monotonic() - began

        constraints = str(REPOSITORY / "constraints.txt")
        run("python", "-m", "pip", "install", "--only-binary=:all:", "-c", constraints, *sys.argv[1:], str(wheels[0]))
        run("geartrain", "--version")
        seconds = run("geartrain", "quickstart", "--small")
    print(f"{wheels[0].name} installs without a compiler; its quickstart took {seconds:.0f} s")
    if seconds > LIMIT_SECONDS:
        sys.exit(f"that is more than {LIMIT_SECONDS:g} s")


if __name__ == "__main__":
    main()
