"""Every ``sh`` block of a page is typed as it stands, in the order of the page, or says why not.

The line before a block that is not run is a comment, which no reader sees: ``<!-- not run: needs Docker -->``. The
terminals of pages of ``TYPED_ELSEWHERE`` are typed by ``test_tutorials.py``. Each page is read in a folder of its own,
in which lies what a reader has (``give``); ``BEFORE`` has commands that a page takes as given. What differs from the
page:

- ``STANDS_FOR`` replaces addresses, folders and numbers of steps; MovieLens and the signs of the quickstart are few.
- Of ``pip install`` and ``make`` only the names are looked up.
- What serves until it is stopped runs until the page ends, or until the next one of its kind.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import shlex
import signal
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import geartrain as gt
from geartrain.cli.training import quickstart
from geartrain.workers.ctr.samples import sources
from geartrain.workers.ctr.samples.movielens import read_movielens
from geartrain.workers.recipes import signs
from tests.support import pages
from tests.support.command_line import typed
from tests.support.face_files import encoded, glyph, write_records
from tests.support.movielens_files import write_movielens
from tests.support.pages import DEADLINE_SECONDS, DOCS, await_text
from tests.support.served_models import require_onnx

REPOSITORY = DOCS.parent
TYPED_ELSEWHERE = ("first-cluster.md", "parallel.md", "recover.md", "stream.md")
BLOCK = re.compile(
    r"(?:^ *<!-- not run: (?P<why>[^\n]+) -->\n)?"
    r"^(?P<indent> *)```(?:sh|bash|shell|console)\b(?P<title>[^\n]*)\n(?P<code>.*?)^(?P=indent)```",
    re.MULTILINE | re.DOTALL,
)
SERVES = re.compile(r"(?:\w+=\S+ )*geartrain (up|serve|scheduler|server|slowgear|events --follow|export .*--follow)\b")
STANDS_FOR = [
    (r"geartrain worker (\w+)(?!.*--steps)", r"geartrain worker \1 --steps 8"),
    (r"--steps \d{3,}", "--steps 12"),
    (r"--data FOLDER", "--data photos"),
    (r"s3://bucket/", "bucket/"),
    (r"/etc/geartrain", "host1"),
    (r"\.venv/bin/", ""),
    (r"certs (backup|restore)", r"certs \1 --passphrase-file passphrase"),
    (r"\[0\.1, \.\.\.\]", str([0.1] * 128)),
    (r"--dashboard", "--dashboard --dashboard-listen 127.0.0.1:0"),
    (r"--(listen|metrics|grpc) [\w.]+:\d+", r"--\1 127.0.0.1:0"),
]
NUMBER = r'(--to |"version": )\d+'
"""The number of a version, which depends on the training; the newest one stands for it."""
BEFORE = {
    "kserve.md": ["geartrain quickstart --small --out runs/quickstart"],
    "search.md": ["geartrain quickstart --small --out runs/quickstart"],
    "install.md": ["geartrain quickstart --small --out runs/quickstart"],
    "row-lifetimes.md": ["geartrain up"],
    "events.md": ["geartrain up"],
    "on-call.md": ["geartrain up"],
    "one-command.md": ["geartrain up"],
    "serve-embeddings.md": ["geartrain up"],
    "several-machines.md": ["geartrain up", "until geartrain health 10.0.0.1:7000 --service ready; do sleep 0.1; done"],
    "snapshots.md": ["geartrain up"],
}


def blocks_of(page: Path) -> list[re.Match[str]]:
    return list(BLOCK.finditer(page.read_text(encoding="utf-8")))


def to_run(page: Path) -> list[str]:
    """The blocks of a page that this test types."""
    typed_elsewhere = page.name in TYPED_ELSEWHERE
    return [block["code"] for block in blocks_of(page) if not block["why"] and not (typed_elsewhere and block["title"])]


ALL_PAGES = sorted([*DOCS.rglob("*.md"), *REPOSITORY.glob("*.md")])
PAGES = [page for page in ALL_PAGES if to_run(page)]


def commands_of(code: str) -> Iterator[str]:
    """Commands as a shell reads them: one goes on after a backslash, and until quotes end."""
    begun = ""
    for line in code.replace("\\\n", " ").splitlines(keepends=True):
        begun += line
        with contextlib.suppress(ValueError):  # it has not ended
            if shlex.split(begun, comments=True):
                yield begun.strip()
            begun = ""
    assert not begun.strip(), begun


SAYS = {
    "up": {"7000": r"scheduler ([\d.:]+)", "7100": r"graph service ([\d.:]+)"},
    "scheduler": {"7000": r'"address": "([\d.:]+)"', "9100": r'"metrics": "([\d.:]+)"'},
    "serve": {"8000": r'"address": "([\d.:]+)"'},
}
"""By the word after ``geartrain``: how it says where it serves, by the ports that pages name."""


class Reader:
    """Somebody who types the commands of a page."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = self.exported = patch
        self.addresses: dict[str, str] = {}
        """Of what serves now, by the port that pages name."""
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        """What serves until it is stopped, by the word after ``geartrain``."""

    def type(self, command: str) -> None:
        for shown, real in STANDS_FOR:
            command = re.sub(shown, real, command)
        if re.search(NUMBER, command):
            with urllib.request.urlopen(f"http://{self.addresses['8000']}/v1/models") as answer:
                newest = max(json.load(answer)["models"][0]["versions"])
            command = re.sub(NUMBER, rf"\g<1>{newest}", command)
        for port, address in self.addresses.items():
            command = re.sub(rf"\b(127\.0\.0\.1|localhost|HOST|host|10\.0\.0\.\d):{port}\b", address, command)
        words = shlex.split(command, comments=True)
        if words[0] == "export":
            for word in words[1:]:
                self.exported.setenv(*word.split("=", 1))
        elif words[:2] == ["pip", "install"]:
            assert extras_of(words[2]) <= extras_of_the_package(), command
        elif words[0] == "make":
            assert re.search(rf"^{words[1]}:", (REPOSITORY / "Makefile").read_text(), re.MULTILINE), command
        elif serves := SERVES.match(command):
            self.start(serves[1].split()[0], command)
        elif words[0] == "geartrain" and not re.search(r"[|<>$]", command):  # in this process, which has loaded torch
            done = typed(*words[1:])
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        else:
            done = self.shell(command)
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
            assert not done.stdout.startswith('{"error"'), f"{command}\n{done.stdout}"

    def shell(self, command: str) -> subprocess.CompletedProcess[str]:
        bash = ["bash", "-euo", "pipefail", "-c", command]
        return subprocess.run(bash, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)

    def start(self, kind: str, command: str) -> None:
        """Leave a role running that has said where it serves."""
        self.stop(kind)
        shown = Path(f"{kind}.txt")
        with shown.open("wb") as out:
            bash = ["bash", "-euc", "exec env " + re.split(r"\s[#&]", command)[0]]
            self.running[kind] = subprocess.Popen(bash, stdout=out, stderr=subprocess.STDOUT)
        await_text(shown, "version|shard" if kind.split()[0] in ("events", "export") else "ready")
        says = SAYS.get(kind, {})
        found = {port: re.search(pattern, shown.read_text()) for port, pattern in says.items()}
        self.addresses |= {port: match[1] for port, match in found.items() if match}
        if kind == "serve" and "--follow" in command:  # there is a first version after some seconds
            self.shell(f"curl -s --retry 90 --retry-delay 1 {self.addresses['8000']}/readyz")
        if kind in ("up", "scheduler"):
            for role in ("SERVER", "GRAPH", "SLOWGEAR"):
                self.patch.setenv(f"GEARTRAIN_{role}__SCHEDULER", self.addresses["7000"])
        if kind == "up":
            fill(self.addresses["7000"])

    def stop(self, kind: str) -> None:
        """Type Ctrl-C."""
        if process := self.running.pop(kind, None):
            process.send_signal(signal.SIGINT)
            try:
                assert process.wait(30) == 0, Path(f"{kind}.txt").read_text()
            finally:
                process.kill()


def extras_of(requirement: str) -> set[str]:
    return set(re.findall(r"[\w-]+", requirement.partition("[")[2]))


def extras_of_the_package() -> set[str]:
    return set(tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def fill(scheduler: str) -> None:
    """Make tables of the names of pages."""
    with gt.connect(scheduler) as cluster:
        cluster.create_table("sku", num_rows=40, dim=8, optimizer=gt.SGD(0.1))
        for name in ("ctr/user", "ctr/item"):
            table = cluster.create_table(name, dim=8, optimizer=gt.SGD(0.1), expiry=gt.Unseen(steps=1000))
            table.push(np.arange(9), np.ones((9, 8), np.float32))


def give(folder: Path) -> None:
    """Write what a reader has."""
    for number, name in enumerate("abc"):
        (folder / "photos" / name).mkdir(parents=True)
        for seed in range(6):
            glyph(name, seed).save(folder / "photos" / name / f"{seed}.png")
        glyph(name, number).save(folder / {"a": "a.png", "b": "image.png", "c": "cat.jpg"}[name])
    rng = np.random.default_rng(0)
    clicks = {name: rng.integers(9, size=400) for name in ("user", "page", "item", "time")}
    table = pa.table({**clicks, "click": rng.integers(2, size=400).astype(np.float32)})
    (folder / "clicks").mkdir()
    for name in ("clicks.parquet", "tomorrow.parquet", "clicks/first.parquet"):
        pq.write_table(table, folder / name)
    (folder / "ijbc" / "faces").mkdir(parents=True)
    (folder / "faces").mkdir()
    people = [(label, encoded(glyph("ab"[label], seed))) for label in (0, 1) for seed in range(10)]
    write_records(folder / "faces" / "train.rec", people)
    pairs = [(one, other, int(one // 10 == other // 10)) for one in range(20) for other in range(one)]
    for name in ("lfw.bin", "agedb_30.bin"):
        faces = [people[number][1] for one, other, _ in pairs for number in (one, other)]
        (folder / name).write_bytes(pickle.dumps((faces, [bool(same) for *_, same in pairs])))
    for number, (_, picture) in enumerate(people):
        (folder / "ijbc" / "faces" / f"{number}.png").write_bytes(picture)
    (folder / "ijbc" / "face_tid_mid.txt").write_text("".join(f"{n}.png {n} {n}\n" for n in range(20)))
    (folder / "ijbc" / "template_pair_label.txt").write_text("".join(f"{a} {b} {same}\n" for a, b, same in pairs))
    (folder / "passphrase").write_text("twelve words or more")
    recipe = next(block.code for block in pages.blocks_of("how-to/faces.md") if block.language == "yaml")
    small = {"backbone": "stroke_net", "look": {"size": 16}, "dim": 8, "batch_size": 8}
    (folder / "faces.yaml").write_text(yaml.safe_dump(yaml.safe_load(recipe) | small))
    for page, name in (("how-to/own-images.md", "nets.py"), ("tutorials/slow-gear.md", "parts.py")):
        code = next(block.code for block in pages.blocks_of(page) if "def build(" in block.code)
        (folder / name).write_text(code, encoding="utf-8")


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    ratings = write_movielens(tmp_path / "ratings")
    monkeypatch.setitem(sources.PUBLIC, "movielens", (lambda *_: ratings, read_movielens))
    monkeypatch.setattr(signs, "NUM_SIGNS", 12)
    monkeypatch.setattr(quickstart, "SMALL_STEPS", 6)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv(
        "GEARTRAIN_SECURITY__FOLDER"
    )  # other tests do without certificates; a reader has a private folder
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    for role in ("SCHEDULER", "SERVE", "GRAPH"):
        monkeypatch.setenv(f"GEARTRAIN_{role}__LISTEN", "127.0.0.1:0")
    monkeypatch.chdir(tmp_path)
    give(tmp_path)
    reader = Reader(monkeypatch)
    try:
        yield reader
    finally:
        with contextlib.ExitStack() as stack:
            for kind in list(reader.running):
                stack.callback(reader.stop, kind)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_the_commands_of_a_page_do_what_it_says(page: Path, reader: Reader) -> None:
    require_onnx()
    for command in BEFORE.get(page.name, ()):
        reader.type(command)
    for block in to_run(page):
        with pytest.MonkeyPatch.context() as reader.exported:  # what it exports ends with it
            for command in commands_of(block):
                reader.type(command)


def test_a_reason_stands_before_a_block_and_names_what_exists() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    for page in ALL_PAGES:
        reasons = [block["why"] for block in blocks_of(page) if block["why"]]
        assert page.read_text(encoding="utf-8").count("\n<!-- not run") == len(reasons), page
        for reason in reasons:
            assert all((REPOSITORY / path).exists() for path in re.findall(r"tests/[\w/]+\.py", reason)), reason
            assert all(f"\n{target}:" in makefile for target in re.findall(r"'make ([\w-]+)'", reason)), reason
