"""The bench runner: what it finds, what it prints, what it says of a bench that is wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from geartrain.ams.values.errors import ConfigError, GeartrainError
from geartrain.cli.main import build_app
from geartrain.launch.bench import EXTRAS, BrokenBench, Result, benches, require_packages, run_bench

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
GOOD = """
import _helper

def results(full=False):
    print("chatter on the way")
    for case in ("small", "large") if full else ("small",):
        theirs = _helper.THEIRS
        yield {"case": case, "ours": 1.0, "rival": "r", "theirs": theirs, "unit": "ms", "ratio": 2.0, "target": 1.5}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "_helper.py").write_text("THEIRS = 2.0", encoding="utf-8")
    (tmp_path / "rows_a.py").write_text(GOOD, encoding="utf-8")
    (tmp_path / "rows_b.py").write_text(GOOD, encoding="utf-8")
    return tmp_path


def test_a_bench_is_all_files_of_its_name_and_each_runs_alone(folder: Path) -> None:
    assert [result["case"] for result in run_bench("rows", folder)] == ["small", "small"]
    (folder / "rows.py").write_text(GOOD, encoding="utf-8")
    assert len(list(run_bench("rows", folder, full=True))) == 6
    assert len(list(run_bench("rows_b", folder))) == 1


def test_the_json_form_is_one_object_and_nothing_else_on_stdout(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "geartrain", "bench", "rows", "--json", "--folder", str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found = json.loads(done.stdout)
    assert sorted(found) == ["bench", "machine", "results"]
    assert found["bench"] == "rows"
    assert found["machine"]["cores"] >= 1
    assert (found["results"][0]["case"], set(found["results"][0])) == ("small", set(Result.__annotations__))
    assert "chatter on the way" in done.stderr


def test_an_unknown_bench_lists_those_there_are_with_their_files(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"no bench 'raws'.* rows \(rows_a, rows_b\)"):
        list(run_bench("raws", folder))


def test_the_list_of_benches_has_the_first_sentence_of_each_file(folder: Path) -> None:
    (folder / "head.py").write_text('"""A head against\na layer.\n\nMore of it.\n"""\n' + GOOD, encoding="utf-8")
    assert benches(folder) == {"head": {"head": "A head against a layer."}, "rows": {"rows_a": "", "rows_b": ""}}
    done = CliRunner().invoke(build_app(["bench"]), ["bench", "--folder", str(folder)])
    assert "geartrain bench head\n  head    A head against a layer.\n" in done.stdout


def test_outside_a_checkout_the_error_says_where_benches_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"part of the source tree.*--folder"):
        list(run_bench("rows", tmp_path / "benchmarks"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("def results(full=False):\n    yield {'case': 'x'}\n", r"yields \['case'\]"),
        ("", "has no function results"),
    ],
)
def test_a_file_that_is_no_bench_is_refused(folder: Path, text: str, complaint: str) -> None:
    (folder / "rows_a.py").write_text(text, encoding="utf-8")
    with pytest.raises(BrokenBench, match=rf"rows_a\.py {complaint}"):
        list(run_bench("rows", folder))


@pytest.mark.parametrize(
    "text", ["import pyarrow.parquet", "def results(full=False):\n    import pyarrow.parquet\n    yield {}"]
)
def test_a_bench_without_a_package_names_its_extra(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as where it is not installed
    (folder / "rows_a.py").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"bench rows_a needs pyarrow.*pip install '\.\[data\]'"):
        list(run_bench("rows", folder))


def test_nothing_is_run_of_a_bench_of_which_a_file_lacks_a_package(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "rows_b.py").write_text("import _beside\n" + GOOD, encoding="utf-8")
    (folder / "_beside.py").write_text('PROGRAM = "_program.py"', encoding="utf-8")
    (folder / "_program.py").write_text('NEEDS = ("faiss", "uvicorn")', encoding="utf-8")
    for package in ("faiss", "uvicorn"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=r"rows_b needs faiss, uvicorn.*'\.\[bench,serve\]'"):
        next(run_bench("rows", folder))


def test_an_import_that_may_fail_is_no_need(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    optional = "try:\n    import redis\nexcept ImportError:\n    redis = None\n"
    (folder / "rows_a.py").write_text(optional + GOOD, encoding="utf-8")
    monkeypatch.setitem(sys.modules, "redis", None)
    assert len(list(run_bench("rows_a", folder))) == 1


SERVES = {"onnx", "onnxruntime", "onnxscript", "starlette", "uvicorn"}
NEEDS = {
    "ctr_steps": {"pyarrow"},
    "defaults": {"fonticon_mdi7", "wordfreq"},
    "graph": {"faiss"},
    "metrics": {"prometheus_client"},
    "metrics_scheduler": {"prometheus_client"},
    "search": {"faiss"},
    "samples_parquet": {"pyarrow"},
    "serve": {*SERVES, "fastapi"},
    "click_job": {"pyarrow"},
    "click_job_prefetch": {"pyarrow"},
    "serve_clicks": {*SERVES, "fastapi"},
    "serve_live": SERVES,
    "serve_parts": {*SERVES, "fastapi"},
    "serve_start": SERVES,
    "sparse_compression": {"pyarrow"},
    "sparse_workers": {"pyarrow"},
    "stream_day": {*SERVES, "confluent_kafka", "pyarrow"},
}
"""Packages that a bench starts nothing without."""


@pytest.mark.parametrize("name", [file for files in benches(BENCHMARKS).values() for file in files])
def test_a_bench_without_its_extras_is_one_sentence_before_anything_starts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in EXTRAS:
        monkeypatch.setitem(sys.modules, package, None)
    if not (needs := NEEDS.get(name, set())):
        require_packages(BENCHMARKS / f"{name}.py")
        return
    monkeypatch.setattr("geartrain.launch.bench._module", lambda path: pytest.fail(f"{path} was loaded"))
    with pytest.raises(ConfigError, match="which is not installed; pip install") as told:
        next(run_bench(name, BENCHMARKS))
    assert all(package in str(told.value) for package in needs)
    assert not any(package in str(told.value) for package in EXTRAS.keys() - needs - {"onnx", "redis"})


def test_no_bench_starts_a_folder_of_the_checkout_in_place_of_the_installed_package() -> None:
    for path in BENCHMARKS.glob("*.py"):
        assert not re.search(r'sys\.executable, "-[mc]"', path.read_text("utf-8")), path


def test_a_cluster_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import _up

    flags = ["--snapshot-root=no-such-flag"]
    with pytest.raises(GeartrainError, match=r"up .*ended with 2: .*--snapshot-root"), _up.running_cluster(flags=flags):
        pass


def test_in_a_checkout_a_bench_starts_the_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which the folder ``geartrain`` there is a part."""
    (tmp_path / "geartrain").mkdir()
    (tmp_path / "geartrain" / "__init__.py").write_text("raise SystemExit('not this one')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import _up

    with _up.running_cluster() as facts:
        assert facts["scheduler"].startswith("127.0.0.1:")


def test_every_extra_that_a_bench_names_is_one_of_the_project() -> None:
    text = (Path(__file__).resolve().parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    distributions = {"fonticon_mdi7": "fonticon-materialdesignicons7"}
    for module, extra in EXTRAS.items():
        name = distributions.get(module, module)
        assert any(line.replace("_", "-").startswith(name.replace("_", "-")) for line in extras[extra]), module


def test_every_bench_of_this_repository_has_the_right_form() -> None:
    for name in benches(BENCHMARKS):
        files = [*BENCHMARKS.glob(f"{name}.py"), *BENCHMARKS.glob(f"{name}_*.py")]
        assert all("def results(" in path.read_text(encoding="utf-8") for path in files), name
