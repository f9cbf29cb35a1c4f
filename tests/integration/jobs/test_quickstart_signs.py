"""``geartrain quickstart --small``: drawn signs, a real training, and what to do next; only the package is needed."""

from __future__ import annotations

import base64
import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from geartrain.ams.values.errors import ConfigError
from geartrain.cli.main import build_app
from geartrain.cli.training import quickstart
from geartrain.serving.folder import load_folder
from geartrain.serving.models.pictures import PictureModel
from geartrain.workers.recipes import signs
from tests.support.served_models import require_onnx


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Few signs, few steps, in a folder of its own."""
    monkeypatch.setattr(signs, "NUM_SIGNS", 12)
    monkeypatch.setattr(quickstart, "SMALL_STEPS", 6)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> str:
    done = CliRunner().invoke(build_app([arguments[0]]), arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_it_trains_tells_accuracies_and_what_it_says_next_works(tiny: Path) -> None:
    (tiny / "runs" / "small").mkdir(parents=True)  # of an earlier time
    (tiny / "runs" / "small" / "run.json").write_text("{}", encoding="utf-8")
    said = run("quickstart", "--small")
    told = re.search(r"Of (\d+) pictures that it never saw it named (\d+) before training, and (\d+) after it", said)
    assert told is not None
    images, before, after = map(int, told.groups())
    assert 3 * before < after <= images  # an untrained model guesses
    assert (tiny / "runs/small.previous/run.json").exists()
    nexts = re.findall(r"geartrain (.+?)(?:;| {2}|$)", said.partition("Next:")[2], re.MULTILINE)
    assert len(nexts) == 6
    for words in map(shlex.split, nexts):
        command = typer.main.get_command(build_app(words))
        for place, word in enumerate(words):
            if not hasattr(command, "commands"):
                break
            command = command.commands[word]
            rest = words[place + 1 :]
        command.make_context(words[0], rest)  # it takes these options, and needs no more
    named = run(*shlex.split(nexts[0]))
    assert named.startswith("runs/small-pictures/sign-007/14.png  sign-0")

    require_onnx()
    run("export", "runs/small", "--to", "model")
    served = load_folder(tiny / "model")
    assert isinstance(served, PictureModel)
    sign = served.names.index("sign-007")
    picture = served.picture(sign)
    assert picture is not None
    body = {"images": [base64.b64encode(picture).decode()]}
    classify = served.operations["classify"]
    assert sign in {one["id"] for one in classify.write(classify.run(classify.read(body)))[0]}  # it is of that class


def test_signs_are_a_function_of_the_seed_and_take_no_folder_of_somebody(tiny: Path) -> None:
    first, second, other = (signs.drawn_signs(tiny / name, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    pictures = [[path.read_bytes() for path in sorted(folder.rglob("*.png"))] for folder in (first, second, other)]
    assert len(pictures[0]) == 12 * signs.IMAGES_OF_EACH
    assert pictures[0] == pictures[1] != pictures[2]
    first.joinpath("sign-000", "0.png").unlink()
    assert not signs.drawn_signs(first).joinpath("sign-000", "0.png").exists()  # what lies there is taken
    (tiny / "mine").mkdir()
    with pytest.raises(ConfigError, match="mine is there and holds no drawn signs"):
        signs.drawn_signs(tiny / "mine")
