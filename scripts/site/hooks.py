"""mkdocs hooks: pages that are made from the code when the site is built, so that none can grow stale.

``make docs`` runs them (mkdocs.yml names this file). What cannot be right is logged as a warning, and ``strict: true``
makes an error of it.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import api_pages
import bench_charts
import cli_page
import configuration_page
import errors_page
import wire_page
from mkdocs.structure.files import File, Files

REPOSITORY = Path(__file__).resolve().parents[2]
DECISIONS = "decisions"
BOOSTS = {
    "start": 6,
    "tutorials": 6,
    "how-to": 4,
    "reference/wire": 0.1,
    "reference/api": 0.5,
    "reference/errors": 0.5,
    DECISIONS: 0.3,
    "project": 0.3,
    "": 1,
}
"""Of the pages whose path begins so, in the results of a search; the first that fits."""
TWO_PICTURES = re.compile(
    r'<picture><source media="[^"]*dark[^"]*" srcset="([^"]*)"><img src="([^"]*)" alt="([^"]*)"></picture>'
)
"""As a checkout shows a picture that has a dark form; of the site the reader chooses the form."""
ROOMS_ENDING = """The folders are top-level. In Python they are `geartrain.ams`, `geartrain.bridge`,
`geartrain.workers`; `make links` shows editors and mypy the same names
([why](../decisions/0001-import-names-by-mapped-folders.md)). Imports point one way,
`geartrain → serving → workers → bridge → ams`: `tests/unit/test_imports.py` says who may import what, and enforces it.
"""


def on_config(config: Any) -> Any:
    """Put the pages into the navigation that are many: ``FOLDER/*`` there stands for them."""
    found = sorted((Path(config.docs_dir) / DECISIONS).glob("[0-9]*.md"))
    decisions = [f"{DECISIONS}/index.md", *(f"{DECISIONS}/{path.name}" for path in found)]
    commands = [{name: f"{cli_page.FOLDER}/{name}.md"} for name in cli_page.COMMANDS]
    many = {
        f"{DECISIONS}/*": decisions,
        "reference/api/*": sorted(api_pages.render()),
        f"{cli_page.FOLDER}/*": [f"{cli_page.FOLDER}/index.md", *commands],
    }
    config.nav = _expanded(config.nav, many)
    return config


def _expanded(nav: Any, patterns: dict[str, list[Any]]) -> Any:
    """``nav`` with each of the ``patterns`` replaced by the pages it stands for."""
    if isinstance(nav, dict):
        return {title: _expanded(entry, patterns) for title, entry in nav.items()}
    if isinstance(nav, list):
        return [page for entry in nav for page in patterns.get(str(entry), [_expanded(entry, patterns)])]
    return nav


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let the search put what shows how before what tells why; lead to pages of notebooks; draw bars."""
    boost = next(boost for beginning, boost in BOOSTS.items() if page.file.src_uri.startswith(beginning))
    page.meta.setdefault("search", {"boost": boost})
    markdown = TWO_PICTURES.sub(r"![\3](\2#only-light)![\3](\1#only-dark)", markdown)
    markdown = re.sub(r"\]\(([\w/-]+)\.ipynb\)(?!\{)", r"](\1.md)", markdown)
    return bench_charts.with_charts(markdown)


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    for name, text in _generated(Path(config.docs_dir)).items():
        if (stub := files.get_file_from_path(name)) is not None:  # for whoever reads the pages in a checkout
            files.remove(stub)
        files.append(File.generated(config, name, content=text))
    return files


def _generated(docs: Path) -> dict[str, str]:
    return {
        **api_pages.render(),
        **cli_page.render(),
        "reference/configuration.md": configuration_page.render(),
        "reference/errors.md": errors_page.render(),
        "reference/wire.md": wire_page.render(REPOSITORY / "proto"),
        "explanation/rooms.md": _rooms(),
        f"{DECISIONS}/index.md": _decisions(docs / DECISIONS),
        **{f"{path.relative_to(docs).with_suffix('.md')}": _notebook(path) for path in docs.rglob("*.ipynb")},
        "index.md": _from_root("README.md", ""),
        "project/contributing.md": _from_root("CONTRIBUTING.md", "../"),
        "project/changelog.md": _from_root("CHANGELOG.md", "../"),
    }


def _decisions(folder: Path) -> str:
    """The list of the decisions by their titles."""
    lines = ["# Decisions", "", "Choices that somebody could want to change: context, choice, measured reason.", ""]
    for path in sorted(folder.glob("[0-9]*.md")):
        title, _, status, *_ = path.read_text(encoding="utf-8").splitlines()
        lines.append(f"- [{title.lstrip('# ')}]({path.name}). {status.removeprefix('**Status.** ')}")
    return "\n".join(lines) + "\n"


def _rooms() -> str:
    """The folders of the code, each with its sentence; those of the compiled core from the bottom up."""
    lines = [
        "# Where things are",
        "",
        "A folder is a role and one sentence.",
        "",
        "| Folder | What is in it |",
        "|---|---|",
    ]
    for top in ("ams", "bridge", "workers", "serving", "geartrain"):
        for path in sorted((REPOSITORY / top).rglob("__init__.py")):
            folder = path.parent.relative_to(REPOSITORY).as_posix()
            docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
            if docstring is not None and not path.parent.is_symlink():
                sentence = " ".join(docstring.partition("\n\n")[0].split())
                lines.append(f"| `{folder}/` | {sentence.replace('``', '`').replace('|', '&#124;')} |")
    compiled = (REPOSITORY / "ams/kernels/csrc/README.md").read_text(encoding="utf-8")
    for room, sentence in re.findall(r"^\| `(\w+)` \| (.+) \|$", compiled, flags=re.MULTILINE):
        lines.append(f"| `ams/kernels/csrc/{room}/` | {sentence} |")
    return "\n".join([*lines, "", ROOMS_ENDING])


def _notebook(path: Path) -> str:
    """The cells of a notebook; none has an output."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
    parts.insert(1, f"This page is a notebook: [download it]({path.name}){{ download }}, and run it cell by cell.")
    return "\n\n".join(parts) + "\n"


def _from_root(name: str, to_docs: str) -> str:
    """A page of the repository's root; its links become links of the site, ``to_docs`` away from its first page."""
    text = (REPOSITORY / name).read_text(encoding="utf-8")
    text = re.sub(r"\]\((CHANGELOG|CONTRIBUTING)\.md", lambda found: f"]({to_docs}project/{found[1].lower()}.md", text)
    text = text.replace("](docs/decisions)", "](docs/decisions/index.md)")
    return text.replace("](docs/", f"]({to_docs}").replace('"docs/', f'"{to_docs}')
