"""The page about serving one's own model, from ``gt.save`` to curl: each of its sections is done as it stands."""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.pages import Block, blocks_of, run
from tests.support.role_process import RoleProcess
from tests.support.served_models import require_onnx

PAGE = "how-to/serve-my-own-model.md"


def asked(block: Block, address: str, folder: Path) -> dict[str, Any]:
    """What curl prints."""
    line = block.code.replace("localhost:8000", address)
    done = subprocess.run(
        ["bash", "-euc", f"{line.strip()} --fail-with-body"], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def served(block: Block, folder: Path) -> RoleProcess:
    """The service of a line ``[PYTHONPATH=.] geartrain serve NAME=DIR ...``."""
    _, _, words = block.code.strip().partition("geartrain ")
    arguments = [word.replace("=served/", f"={folder}/served/") for word in shlex.split(words)]
    return RoleProcess(*arguments, "--listen", "127.0.0.1:0", errors=folder / "log", PYTHONPATH=str(folder))


@pytest.fixture
def blocks() -> list[Block]:
    require_onnx()
    return blocks_of(PAGE)


def test_tensors_are_asked_for_by_the_names_of_forward(blocks: list[Block], tmp_path: Path) -> None:
    program, serve, classify, infer = blocks[:4]
    assert run(program.code, tmp_path).startswith("a service takes readings float32 [N, 5], is_day bool [N]\n[[('")
    with served(serve, tmp_path) as service:
        said = asked(classify, service.address, tmp_path)
        best = said["answers"][0]
        assert len(best) == 2 and best[0]["class"] == "moss"
        answered = asked(infer, service.address, tmp_path)
        outputs = {output["name"]: output["data"] for output in answered["outputs"]}
        assert outputs["classes"][0] == "moss"
        assert outputs["scores"][0] == pytest.approx(best[0]["score"], rel=1e-6)


def test_texts_become_tensors_by_code_that_the_service_was_told(
    blocks: list[Block], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, program, serve, classify = blocks[4:8]
    (tmp_path / words.title).write_text(words.code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "'cat'" in run(program.code, tmp_path)
    with served(serve, tmp_path) as service:
        assert asked(classify, service.address, tmp_path)["answers"][0][0]["class"] == "dog"
    told = Block("sh", "", serve.code.replace(" --preprocessing words:tensors", ""))
    with pytest.raises(AssertionError, match=r"code of your own.*--preprocessing words:tensors"):
        served(told, tmp_path)


def test_pictures_are_taken_as_their_preprocessing_says(blocks: list[Block], tmp_path: Path) -> None:
    program, serve, classify = blocks[8:]
    pixels = np.random.default_rng(0).integers(0, 256, (20, 24, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "picture.png")
    with contextlib.chdir(tmp_path):
        printed = run(program.code, tmp_path)
    with served(serve, tmp_path) as service:
        assert asked(classify, service.address, tmp_path)["answers"][0][0]["class"] in printed
