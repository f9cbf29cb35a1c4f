"""Compiles and loads a device "cuda" that does nothing.

Nothing here imports torch: it asks what devices there are once, when it is first imported.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

from tests.recorder.report import REPOSITORY

_SOURCE = Path(__file__).with_name("fake_device.cpp")


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def why_not() -> str:
    """Why nothing can be recorded here; "" if it can."""
    version = runpy.run_path(str(_torch() / "version.py"))
    if version["cuda"] or version["hip"]:
        return "torch is built for GPUs: the fake device takes the place that only a build for CPUs leaves free"
    if importlib.util.find_spec("triton") is None:
        return "no triton: on a GPU the reference of its kernels would run"
    return "" if shutil.which("g++") else "no g++, which compiles the fake device"


def load() -> None:
    """Load the guard, compiled anew where that was not done for this torch. Before torch is imported."""
    assert "torch" not in sys.modules
    home = _torch()
    text = _SOURCE.read_bytes() + (home / "version.py").read_bytes() + bytes(home)
    library = REPOSITORY / ".cache/recorder" / f"{hashlib.sha256(text).hexdigest()[:16]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        unfinished = library.with_suffix(f".{os.getpid()}")
        paths = [f"-I{home}/include", f"-L{home}/lib", f"-Wl,-rpath,{home}/lib", "-lc10", "-ltorch_cpu"]
        options = ["-O1", "-shared", "-fPIC", "-std=c++20"]
        subprocess.run(["g++", *options, str(_SOURCE), *paths, "-o", str(unfinished)], check=True)
        unfinished.replace(library)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
