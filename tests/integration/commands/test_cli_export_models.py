"""``geartrain export RUN --to DIR``: of a run that was really trained, with its held-out images."""

from __future__ import annotations

import http.client
import json
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

import geartrain as gt
from geartrain.ams.values.errors import GeartrainError
from geartrain.cli.main import build_app
from geartrain.serving.folder import load_folder
from geartrain.workers.models.saved_model import read_config
from geartrain.workers.recipes import signs
from tests.support.role_process import RoleProcess
from tests.support.served_models import exported, in_base64, require_onnx
from tests.unit.workers.models.test_verification import pairs


def typed(*arguments: object) -> Result:
    """What a command line gives."""
    line = [str(argument) for argument in arguments]
    return CliRunner().invoke(build_app(line), line)


def refusal(*arguments: object) -> str:
    """The sentence with which a command line is refused."""
    done = typed(*arguments)
    assert isinstance(done.exception, GeartrainError), done.output
    return str(done.exception)


def asked(address: str, path: str) -> dict[str, Any]:
    """What a service answers to GET."""
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        connection.request("GET", path)
        answer: dict[str, Any] = json.loads(connection.getresponse().read())
        return answer
    finally:
        connection.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_onnx()
    folder = tmp_path_factory.mktemp("signs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signs, "NUM_SIGNS", 12)
        signs.drawn_signs(folder / "pictures")
    look = ("--set", "look.kind=ink", "--set", "look.size=32")
    done = typed("worker", "classify", "--data", folder / "pictures", "--out", folder / "run", "--steps", 6, *look)
    assert done.exit_code == 0, done.output
    return folder / "run"


def test_a_run_is_exported_with_what_its_held_out_images_say(run: Path, tmp_path: Path) -> None:
    done = typed("export", run, "--to", tmp_path / "m", "--json")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    report = json.loads((run / "report.json").read_text(encoding="utf-8"))["held_out"]["validation"]
    assert facts["parity"]["held_out"] and facts["parity"]["images"] == report["images"]
    assert facts["parity"]["max_error"] < 1e-4 and facts["parity"]["same_top1"] == 1
    assert facts["accuracy"]["fp32"] == pytest.approx(report["top1"])
    assert facts["version"] == gt.load_model(run).training["best"]["step"]
    picture = run.parent / "pictures" / "sign-003" / "1.png"
    assert typed("predict", tmp_path / "m", picture).output == typed("predict", run, picture).output
    again = typed("export", run / "model", "--to", tmp_path / "m", "--precision", "int8")
    assert "in int8" in again.output and "Named rightly: PyTorch" in again.output
    assert read_config(tmp_path / "m")["precision"] == "int8"


def test_pairs_say_from_which_cosine_on_two_pictures_show_the_same(run: Path, tmp_path: Path) -> None:
    pictures, same = pairs()
    (tmp_path / "pairs.bin").write_bytes(pickle.dumps((pictures, same)))
    done = typed("export", run, "--to", tmp_path / "m", "--pairs", tmp_path / "pairs.bin")
    assert done.exit_code == 0, done.output
    assert "Two pictures show the same from a cosine of" in done.output
    found = json.loads(typed("verify", run, tmp_path / "pairs.bin", "--no-mirror", "--json").stdout)[0]
    verify = read_config(tmp_path / "m")["verify"]
    assert verify == {
        "threshold": pytest.approx(1 - found["threshold"] / 2),
        "accuracy": pytest.approx(found["accuracy"]),
        "pairs": 20,
    }
    operation = load_folder(tmp_path / "m").operations["verify"]
    asked = [[in_base64(one) for one in pictures[2 * at : 2 * at + 2]] for at in range(20)]
    answers = operation.write(operation.run(operation.read({"pairs": asked})))
    for answer in answers:
        assert answer["same"] is (answer["score"] >= answer["threshold"] == verify["threshold"])
    assert {answer["same"] for answer in answers} == {True, False}
    with pytest.raises(GeartrainError, match=r"nowhere\.bin"):
        raise typed("export", run, "--to", tmp_path / "n", "--pairs", tmp_path / "nowhere.bin").exception
    assert not (tmp_path / "n").exists()


def test_a_folder_of_versions_gets_one_more_and_keeps_the_newest(run: Path, tmp_path: Path) -> None:
    step = gt.load_model(run).training["best"]["step"]
    for _ in range(2):  # the same step of the same run is the same version
        assert typed("export", run, "--to", tmp_path / "v", "--keep", 2).exit_code == 0
    assert [path.name for path in (tmp_path / "v").iterdir()] == [f"{step:06}"]
    for later in (step + 1, step + 2):
        exported(tmp_path / "v" / f"{later:06}", version=later)
    (tmp_path / "v" / f"{step + 3:06}").mkdir()  # somebody else is at it
    done = typed("export", run, "--to", tmp_path / "v", "--keep", 2, "--json")
    facts = json.loads(done.stdout)
    assert (facts["version"], facts["folder"]) == (step + 4, str(tmp_path / "v" / f"{step + 4:06}"))
    assert gt.load_model(tmp_path / "v").class_names == gt.load_model(run).class_names  # of the newest
    assert sorted(path.name for path in (tmp_path / "v").glob("*/")) == [f"{step + n:06}" for n in (2, 3, 4)]


def test_a_new_run_that_is_exported_into_a_followed_folder_is_served_and_kept(run: Path, tmp_path: Path) -> None:
    step, models = gt.load_model(run).training["best"]["step"], tmp_path / "models"
    for before in (80, 90, 100):
        exported(models / f"{before:06}", version=before)
    with RoleProcess(
        "serve", "--follow", f"signs={models}", "--listen", "127.0.0.1:0", errors=tmp_path / "log"
    ) as service:

        def wait_for(version: int, step: int) -> None:
            end = time.monotonic() + 60
            while True:
                said = asked(service.address, "/v1/models/signs")
                if (said["current"], said["following"].get("step")) == (version, step):
                    return
                assert time.monotonic() < end, said
                time.sleep(0.02)

        wait_for(100, 100)
        assert json.loads(typed("export", run, "--to", models, "--keep", 2, "--json").stdout)["version"] == 101
        wait_for(101, step)
    assert sorted(path.name for path in models.iterdir()) == ["000100", "000101"]
    fresh = read_config(models / "000101")
    assert typed("export", run, "--to", models, "--keep", 2).exit_code == 0  # the newest, once more
    again = read_config(models / "000101")
    assert (again["version"], again["created"] > fresh["created"]) == (101, True)


def test_an_export_that_fails_leaves_no_version(run: Path, tmp_path: Path) -> None:
    exported(tmp_path / "v" / "000100", version=100)
    refusal("export", run, "--to", tmp_path / "v", "--data", tmp_path / "nothing")
    assert [path.name for path in (tmp_path / "v").iterdir()] == ["000100"]


def test_held_out_images_that_moved_are_named_or_said_to_be_missing(run: Path, tmp_path: Path) -> None:
    pictures = run.parent / "pictures"
    moved = pictures.rename(run.parent / "moved")
    try:
        without = typed("export", run, "--to", tmp_path / "m")
        assert without.exit_code == 0 and "No held-out images: " in without.output and str(pictures) in without.output
        assert str(pictures) in refusal("export", run, "--to", tmp_path / "n", "--precision", "int8")
        assert not (tmp_path / "n").exists()
        found = typed("export", run, "--to", tmp_path / "m", "--data", moved)
        assert found.exit_code == 0 and "held-out images: features are" in found.output
    finally:
        moved.rename(pictures)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "where to? Give --to DIR"),
        (("out", "--to", "m"), "a model goes to --to"),
        (("--to", "m", "--since", "0"), "--since, --follow and --compact are for versions of a table"),
        (("--to", "m", "--precision", "fp8"), "it must be one of fp32, fp16, int8"),
        (("--to", "m", "--index", "tree", "--backbone", "none:none"), "kind is 'tree'; it must be one of exact"),
        (("--to", "m", "--recall", "0", "--backbone", "none:none"), "it must be above 0"),
    ],
)
def test_what_does_not_go_together_is_said(arguments: tuple[str, ...], message: str, run: Path) -> None:
    assert message in refusal("export", run, *arguments)


def test_what_is_no_run_and_what_is_no_place_for_a_model_is_named(run: Path, tmp_path: Path) -> None:
    assert "the model folder of a run?" in refusal("export", tmp_path / "nothing", "--to", tmp_path / "m")
    assert "holds other files" in refusal("export", run, "--to", run.parent)
    assert typed("export", run, "--to", tmp_path / "m").exit_code == 0
    assert "holds one model" in refusal("export", run, "--to", tmp_path / "m", "--keep", 3)
