"""Compile every kernel for GPUs without having one, and compare registers, memory and spills with a table.

    python -m scripts.kernels.compile                 # compare with scripts/kernels/compiled.json
    python -m scripts.kernels.compile --write         # write the table anew
    python -m scripts.kernels.compile head --capability 90
    python -m scripts.kernels.compile --changed       # what is in .cache/kernels is not compiled again

Triton names what the compiled code takes. A kernel that spills registers to memory is refused, as is one whose
registers or shared memory grew. Versions of Triton differ, so each has a column.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("compiled.json")
CACHE = Path(__file__).parents[2] / ".cache/kernels"
os.environ |= {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(CACHE), "TRITON_STORE_BINARY_ONLY": "1"}

CAPABILITIES = (80, 90)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel as it is started."""

    name: str
    """Unique; what the table calls it."""
    module: str
    """Below geartrain.bridge.kernels.triton."""
    kernel: str
    signature: Mapping[str, str]
    """By argument, Triton's name of its type ("*bf16", "i32", "fp32", "constexpr"), in the kernel's order."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    """num_warps, num_stages."""
    odd: tuple[str, ...] = ()
    """Integers that need not be divisible by 16. Pointers and other integers are taken to be, as a launch finds."""
    capabilities: tuple[int, ...] = CAPABILITIES


def cases(only: str = "") -> Iterator[Case]:
    """All of them, or those of one file."""
    from scripts.kernels import cases as folder

    for module in pkgutil.iter_modules(folder.__path__):
        if only in ("", module.name):
            yield from importlib.import_module(f"{folder.__name__}.{module.name}").CASES


def resources(case: Case, capability: int) -> dict[str, int]:
    """Registers a thread, bytes of stack (spills) a thread and KiB of shared memory a program."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module = importlib.import_module(f"geartrain.bridge.kernels.triton.{case.module}")
    attrs = {
        (place,): [["tt.divisibility", 16]]
        for place, (name, kind) in enumerate(case.signature.items())
        if kind.startswith("*") or (kind in ("i32", "i64", "u32", "u64") and name not in case.odd)
    }
    source = ASTSource(
        fn=getattr(module, case.kernel), signature=dict(case.signature), constexprs=dict(case.constants), attrs=attrs
    )
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(case.options))
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        dumped = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", dumped.stdout))
    return {
        "registers": int(found["REG"]),
        "stack": int(found["STACK"]) + int(found["LOCAL"]),
        "shared_kib": -(-int(made.metadata.shared) // 1024),
    }


def compiled(case: Case, capability: int) -> tuple[str, dict[str, Any]]:
    """(its line in the table, what it takes or why it does not compile)."""
    name = f"{case.name} sm_{capability}"
    try:
        return name, resources(case, capability)
    except Exception as exc:  # of a compiler: anything
        return name, {"failed": f"{type(exc).__name__}: {str(exc)[-600:]}"}


def worse(found: Mapping[str, Any], known: Mapping[str, Any] | None) -> str:
    """What is worse than the table says; empty: nothing."""
    if "failed" in found:
        return str(found["failed"])
    if found["stack"]:
        return f"spills {found['stack']} bytes a thread"
    if known is None:
        return "is not in the table; add it with --write"
    grown = [
        f"{name} {known[name]} -> {found[name]}" for name in ("registers", "shared_kib") if found[name] > known[name]
    ]
    return ", ".join(grown)


def main(arguments: list[str] | None = None) -> int:
    """Return 1 if a kernel is worse than the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="?", default="", help="one file of scripts/kernels/cases")
    parser.add_argument("--capability", type=int, choices=CAPABILITIES, help="default: all")
    parser.add_argument("--write", action="store_true", help="write the table")
    parser.add_argument("--changed", action="store_true", help="only sources, cases or Tritons not compiled before")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    given = parser.parse_args(arguments)
    os.environ["TRITON_ALWAYS_COMPILE"] = str(int(not given.changed))
    import triton

    version = triton.__version__.rpartition(".")[0]
    table: dict[str, dict[str, Any]] = json.loads(TABLE.read_text("utf-8")) if TABLE.exists() else {}
    known = table.setdefault(version, {})
    todo = [(case, at) for case in cases(given.only) for at in case.capabilities if given.capability in (None, at)]
    began, bad = time.monotonic(), 0
    with ProcessPoolExecutor(given.jobs) as pool:
        for name, found in pool.map(compiled, *zip(*todo, strict=True)) if todo else ():
            problem = worse(found, found if given.write else known.get(name))
            bad += bool(problem)
            print(f"{name:60s} {problem or found}", flush=True)
            if given.write and not problem:
                known[name] = found
    if given.write:
        TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", "utf-8")
    print(f"triton {version}: {len(todo)} kernels compiled in {time.monotonic() - began:.0f} s, {bad} refused")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
