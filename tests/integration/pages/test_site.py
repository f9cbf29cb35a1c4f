"""The documentation site builds strictly, says all there is to say, and shows nothing that is not so."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import BaseModel
from torch.distributed.run import get_args_parser

import geartrain
from geartrain.ams.values import errors
from geartrain.cli.main import COMMANDS, build_app
from geartrain.cli.shared.help import EXAMPLES
from geartrain.launch.configuration import sections
from tests.support.pages import run

REPOSITORY = Path(__file__).resolve().parents[3]
DOCS = REPOSITORY / "docs"
BY_HAND = [path for path in sorted(DOCS.rglob("*.md")) if path.parent.name != "decisions"]
"""Decisions tell of their own time, in which a file may have had another name."""
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)

OF_OTHERS = {"--slow", "--help", "--index-url", "--explain"}
"""Options of pytest, of every command, of pip, and of a script of the tutorials; those of torchrun are asked for."""
NO_COMMANDS = ("step", "pull", "write")
"""The names of spans in traces begin as a command does."""


def build(repository: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    return subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=150, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    subprocess.run(["make", "-s", "links"], cwd=REPOSITORY, check=True)
    out = tmp_path_factory.mktemp("site")
    done = build(REPOSITORY, out)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.slow
def test_every_public_name_command_setting_error_and_call_has_its_place(site: Path) -> None:
    api = "".join(page.read_text(encoding="utf-8") for page in (site / "reference" / "api").glob("*.html"))
    documented = set(geartrain.__all__) - {"__version__", "errors"}
    documented |= {f"{part}.{name}" for part in ("models", "ops", "ray") for name in getattr(geartrain, part).__all__}
    assert {name for name in documented if f'id="geartrain.{name}"' not in api} == set()

    cli = "".join(page.read_text(encoding="utf-8") for page in (site / "reference" / "cli").glob("*.html"))
    assert {name for name in COMMANDS if f'id="geartrain-{name}"' not in cli} == set()

    configuration = (site / "reference" / "configuration.html").read_text(encoding="utf-8")
    keys = {key for section in sections().values() for key in section.model_fields}
    assert {key for key in keys if f"<code>{key}</code>" not in configuration} == set()

    tree = (site / "reference" / "errors.html").read_text(encoding="utf-8")
    names = {name for name, value in vars(errors).items() if isinstance(value, type) and name.isidentifier()}
    assert {name for name in names if f'id="{errors.__name__}.{name}"' not in tree} == set()

    wire = (site / "reference" / "wire.html").read_text(encoding="utf-8")
    protos = "".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "proto").rglob("*.proto"))
    assert {name for name in re.findall(r"\brpc (\w+)", protos) if f"<code>{name}</code>" not in wire} == set()
    assert {name for name in re.findall(r"^message (\w+)", protos, re.MULTILINE) if f'id="{name}"' not in wire} == set()


def test_what_takes_more_than_eight_arguments_explains_each() -> None:
    public = [value for name in geartrain.__all__ if callable(value := getattr(geartrain, name))]
    methods = [m for c in public if inspect.isclass(c) for n, m in vars(c).items() if callable(m) and n[0] != "_"]
    unexplained = []
    for value in (*public, *methods):
        explained = f"{value.__doc__} {value.__init__.__doc__ if inspect.isclass(value) else ''}"
        is_record = dataclasses.is_dataclass(value) or isinstance(value, type(BaseModel))  # each field has a docstring
        parameters = [] if is_record else [name for name in inspect.signature(value).parameters if name != "self"]
        if len(parameters) > 8:
            unexplained += [f"{value.__qualname__}: {name}" for name in parameters if f" {name}: " not in explained]
    assert unexplained == []


@pytest.mark.slow
def test_a_search_puts_what_shows_how_before_decisions(site: Path) -> None:
    found = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    boosts = {entry["location"].partition("/")[0]: entry["boost"] for entry in found if "/" in entry["location"]}
    assert boosts["tutorials"] > boosts["how-to"] > boosts["explanation"] > boosts["decisions"]


def test_pictures_are_small_and_have_a_dark_form() -> None:
    pictures = [path for path in DOCS.rglob("*") if path.suffix in (".png", ".svg", ".webp")]
    assert len(pictures) > 10
    assert [path.name for path in pictures if path.stat().st_size > 200_000] == []
    plain = {path.name for path in pictures if path.suffix == ".svg" and "scheme: dark" not in path.read_text("utf-8")}
    assert plain == {"logo.svg"}


@pytest.mark.slow
def test_every_word_of_a_drawing_fits_and_can_be_read(browser: Any) -> None:
    page = browser.new_page()
    for drawing in DOCS.rglob("*.svg"):
        page.goto(drawing.as_uri())
        assert page.evaluate("document.documentElement.viewBox.baseVal.width > 0"), drawing
        assert page.evaluate(WORDS_THAT_DO_NOT_FIT) == [], drawing


WORDS_THAT_DO_NOT_FIT = """() => {
  const {x, y, width, height} = document.documentElement.viewBox.baseVal;
  const toDrawing = document.documentElement.getScreenCTM().inverse();
  const boxes = [...document.querySelectorAll("rect")].map(rect => rect.getBBox());
  return [...document.querySelectorAll("text")].filter(text => {
    const box = text.getBoundingClientRect(), own = text.getBBox(), middle = own.x + own.width / 2;
    const from = new DOMPoint(box.left, box.top).matrixTransform(toDrawing);
    const to = new DOMPoint(box.right, box.bottom).matrixTransform(toDrawing);
    const parts = [text, ...text.querySelectorAll("tspan")].filter(part => part.textContent.trim());
    return from.x < x - 1 || from.y < y - 1 || to.x > x + width + 1 || to.y > y + height + 1
      || parts.some(part => parseFloat(getComputedStyle(part).fontSize) < 10)
      || boxes.some(rect => middle > rect.x && middle < rect.x + rect.width && own.y > rect.y
        && own.y < rect.y + rect.height && (own.x < rect.x || own.x + own.width > rect.x + rect.width));
  }).map(text => text.textContent);
}"""
"""Those beyond the drawing or beyond the box that they stand in, and those too small."""


@pytest.mark.slow
def test_no_page_is_wider_than_a_phone(site: Path, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 844})
    wide = []
    for path in (path for path in site.rglob("*.html") if path.parent.name not in ("api", "decisions")):
        page.goto(path.as_uri(), wait_until="domcontentloaded")
        wide += [path.name] if page.evaluate("document.documentElement.scrollWidth > innerWidth") else []
    assert wide == []


@pytest.mark.slow
def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    loads = re.compile(r'<(?:script|img|iframe|source)\b[^>]*\bsrc="(?:https?:)?//|<link\b[^>]*\bhref="(?:https?:)?//')
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    assert [page for page in pages if loads.search(page.read_text(encoding="utf-8"))] == []
    assert not any("mermaid" in page.read_text(encoding="utf-8") for page in pages)  # it would be loaded from one


@pytest.mark.slow
def test_a_broken_link_a_missing_page_and_a_missing_docstring_fail_the_build(tmp_path: Path) -> None:
    for name in ("docs", "scripts/site", "geartrain", "ams", "bridge", "workers", "serving", "proto"):
        unneeded = shutil.ignore_patterns("__pycache__", "*.so", "*.cpp", "*.hpp")
        shutil.copytree(REPOSITORY / name, tmp_path / name, symlinks=True, ignore=unneeded)
    for name in ("mkdocs.yml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(REPOSITORY / name, tmp_path)
    page = tmp_path / "docs" / "start" / "install.md"
    page.write_text(page.read_text(encoding="utf-8") + "\n[nowhere](nowhere.md)\n", encoding="utf-8")
    settings = tmp_path / "mkdocs.yml"
    settings.write_text(settings.read_text(encoding="utf-8").replace("how-to/transport.md", "how-to/gone.md"), "utf-8")
    cluster = tmp_path / "geartrain" / "ams" / "client" / "cluster.py"
    undocumented = re.sub(
        r'(    def drop_table\(.*?\n)        """.*?"""\n', r"\1", cluster.read_text(encoding="utf-8"), flags=re.DOTALL
    )
    cluster.write_text(undocumented, encoding="utf-8")
    with (tmp_path / "scripts" / "site" / "api_pages.py").open("a", encoding="utf-8") as pages:
        pages.write("\n_all = render\n\n\ndef render():  # one page of the API: all of them take thrice as long\n")
        pages.write("    return {name: text for name, text in _all().items() if 'clusters' in name}\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    assert "'nowhere.md'" in done.stderr
    assert "'how-to/gone.md'" in done.stderr
    assert "Cluster.drop_table is public and has no docstring" in done.stderr


def test_every_link_of_a_page_leads_somewhere_in_a_checkout() -> None:
    if not (REPOSITORY / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a checkout of git")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.splitlines()
    there = {os.path.normpath(path) for file in files for path in (file, *Path(file).parents)}
    broken = []
    for page in (file for file in files if file.endswith((".md", ".ipynb"))):
        text = re.sub(r"^( *)```.*?^\1```", "", (REPOSITORY / page).read_text(encoding="utf-8"), flags=re.M | re.S)
        for target in re.findall(r"\]\(([^)#\s]+)", text):
            if "://" not in target and os.path.normpath(Path(page).parent / target) not in there:
                broken.append(f"{page}: {target}")
    assert broken == []


def test_the_files_that_pages_name_exist() -> None:
    path = re.compile(r"`((?:ams|bridge|workers|geartrain|tests|examples|scripts|benchmarks|deploy)/[\w/.-]+\.\w+)")
    pages = [*BY_HAND, REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md"]
    named = {(page.name, name) for page in pages for name in path.findall(page.read_text(encoding="utf-8"))}
    assert {(page, name) for page, name in named if not (REPOSITORY / name).exists()} == set()


def test_the_commands_that_pages_show_exist_with_their_options() -> None:
    root = typer.main.get_command(build_app([]))
    # Neither a folder nor the name of a rendezvous, or of a release, is the command.
    shown = re.compile(r"^[^#\n]*?(?<![/\w])(?<!rdzv-backend )(?<!helm install )geartrain ([^#\n]*)", re.MULTILINE)
    unknown = []
    for page in (*BY_HAND, *REPOSITORY.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        typed = [
            line for language, code in FENCE.findall(text) if language == "sh" for line in shown.findall(joined(code))
        ]
        for line in (*typed, *named_in(text)):
            unknown += [f"{page.name}: geartrain {line}: {word}" for word in unknown_words(root, line)]
    assert unknown == []


def test_the_options_that_pages_name_exist() -> None:
    root = typer.main.get_command(build_app([]))
    known = options_below(root) | set(get_args_parser()._option_string_actions) | OF_OTHERS
    unknown = set()
    for page in (*BY_HAND, *REPOSITORY.glob("*.md")):
        for option in re.findall(r"`(--[a-z][\w-]*)", FENCE.sub("", page.read_text(encoding="utf-8"))):
            unknown |= set() if option in known else {(page.name, option)}
    assert unknown == set()


def joined(code: str) -> str:
    return code.replace("\\\n", " ")


def named_in(text: str) -> list[str]:
    """The commands within sentences: ``geartrain certs init|issue FOLDER`` is two."""
    lines = []
    for line in re.findall(r"`geartrain (\w[^`\n]*)`", FENCE.sub("", text)):
        words = [word.split("|") if re.fullmatch(r"[a-z|]+", word) else [word] for word in line.split(" ")]
        lines += [" ".join(chosen) for chosen in itertools.product(*words) if chosen[0] not in NO_COMMANDS]
    return lines


def options_below(command: typer.core.TyperCommand) -> set[str]:
    own = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return own.union(*(options_below(below) for below in getattr(command, "commands", {}).values()))


def unknown_words(command: typer.core.TyperGroup, line: str) -> list[str]:
    """The words of a command line that name no command and no option."""
    options, unknown = set(), []
    words = shlex.shlex(line, posix=True, punctuation_chars=">")  # one in quotes redirects nothing
    words.whitespace_split = True
    for word in itertools.takewhile(lambda word: not word.startswith(">"), words):
        below = getattr(command, "commands", {})
        options |= {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        if word in below:
            command = below[word]
        elif word.startswith("-"):
            unknown += [] if word.partition("=")[0] in options | {"--help"} else [word]
        elif below and re.fullmatch(r"[A-Z.]+", word):
            break  # a placeholder: any of them
        elif below:
            unknown.append(word)
    return unknown


RUN = "start/your-loop how-to/snapshots how-to/click-models how-to/run-slow-gears explanation/gear"


@pytest.mark.parametrize("page", RUN.split())
def test_the_examples_of_a_page_run_twice_and_each_prints_something(page: str, tmp_path: Path) -> None:
    blocks = [
        code for language, code in FENCE.findall((DOCS / f"{page}.md").read_text("utf-8")) if language == "python"
    ]
    printed = [[run(code, tmp_path) for code in blocks] for _ in range(2)]
    assert [code for code, text in zip(blocks, printed[0], strict=True) if not text] == []


def test_every_command_has_an_example_of_options_that_exist() -> None:
    root = typer.main.get_command(build_app([]))

    def commands(command: typer.core.TyperCommand, name: str) -> Iterator[tuple[str, typer.core.TyperCommand]]:
        below = getattr(command, "commands", {})
        if not below or name == "graph":  # a role, and what it is asked
            yield name, command
        for sub in below.values():
            yield from commands(sub, f"{name} {sub.name}".strip())

    found = dict(commands(root, ""))
    assert EXAMPLES.keys() == found.keys()
    for name, line in EXAMPLES.items():
        found[name].make_context(name, shlex.split(line)[1 + len(name.split()) :])  # it takes these, and needs no more
        assert str(found[name].help).count(f"Example: {line}") == 1
