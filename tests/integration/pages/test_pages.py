"""What pages show is what happens: their programs run, both sides of a diff where both can, and print what is shown."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.pages import Block, blocks_of, losses_in, program_of, run
from tests.support.rank_processes import run_ranks
from tests.support.served_models import require_onnx


@pytest.fixture
def alone_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What torchrun tells the only rank of a group; the port is a free one."""
    told = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    yield
    if dist.is_initialized():  # the program failed before its end
        dist.destroy_process_group()


def diff_of(page: str) -> Block:
    (diff,) = [block for block in blocks_of(page) if block.language == "diff"]
    return diff


def file_of(page: str, title: str) -> str:
    (block,) = [block for block in blocks_of(page) if block.title == title]
    return block.code


def right_in(printed: str) -> float:
    return float(re.search(r"right: (\S+)", printed)[1])


def test_a_classifier_with_nn_linear_learns_as_well_with_a_class_head(tmp_path: Path) -> None:
    diff = diff_of("how-to/from-nn-linear.md")
    before, after = run(diff.before, tmp_path), run(diff.after, tmp_path)
    assert losses_in(after)[-1] < losses_in(after)[0] / 4, after
    assert right_in(after) > right_in(before) - 0.03, (before, after)
    assert (tmp_path / "model.pt").is_file()
    assert (tmp_path / "model").is_dir()


def test_weights_of_nn_linear_go_on_with_the_same_losses(tmp_path: Path) -> None:
    losses = losses_in(run(file_of("how-to/from-nn-linear.md", "weights.py"), tmp_path))
    assert len(losses) == 10
    assert max(abs(old - new) for old, new in zip(losses[::2], losses[1::2], strict=True)) < 1e-4
    assert (tmp_path / "classes.safetensors").is_file()


@pytest.mark.usefixtures("alone_under_torchrun")
def test_a_script_of_partial_fc_learns_and_is_saved(tmp_path: Path) -> None:
    printed = run(diff_of("how-to/from-partial-fc.md").after, tmp_path)
    assert losses_in(printed)[0] > 50 > 2 * losses_in(printed)[-1], printed
    assert right_in(printed) > 0.8, printed
    assert (tmp_path / "checkpoint" / "model.json").is_file()


def test_class_centers_of_partial_fc_are_those_of_the_head(tmp_path: Path) -> None:
    printed = run(file_of("how-to/from-partial-fc.md", "centers.py"), tmp_path)
    centers = torch.load(tmp_path / "checkpoint_gpu_1.pt", weights_only=True)["state_dict_softmax_fc"]["weight"]
    assert str(centers[0, :4].tolist()) in printed
    assert (tmp_path / "centers.safetensors").is_file()


@pytest.mark.usefixtures("alone_under_torchrun")
def test_a_training_of_plsc_learns_and_is_saved(tmp_path: Path) -> None:
    printed = run(diff_of("how-to/from-plsc.md").after, tmp_path)
    assert losses_in(printed)[0] > 40 > 2 * losses_in(printed)[-1], printed
    assert (tmp_path / "checkpoint" / "model.json").is_file()


def test_class_centers_of_plsc_are_those_of_the_head(tmp_path: Path) -> None:
    printed = run(file_of("how-to/from-plsc.md", "centers.py"), tmp_path)
    centers = np.load(tmp_path / "centers_1.npy").astype(np.float32)
    assert str(centers[0, :4].tolist()) in printed


def train_page_of_stages(rank: int) -> None:
    page: dict[str, Any] = {"__name__": "page"}
    exec(file_of("how-to/stages.md", "train_in_stages.py"), page)
    train = page["train"]
    losses = train()
    assert losses[-1] < losses[0] - 0.02, (rank, losses)
    assert losses[:3] == pytest.approx(train(None, 3), abs=1e-5)


def test_a_model_in_stages_learns_as_its_page_says(tmp_path: Path) -> None:
    run_ranks(train_page_of_stages, 3, tmp_path)


def test_classes_come_and_go_as_their_page_says(tmp_path: Path) -> None:
    printed = run(program_of("how-to/new-classes.md"), tmp_path)
    assert printed.splitlines() == [
        "their labels: [1000, 1001, 1002]",
        "1002 live",
        "1002 live",
        "the next label: 1000",
    ]


def test_tables_of_today_go_on_tomorrow_as_their_page_says(tmp_path: Path) -> None:
    printed = run(file_of("how-to/row-lifetimes.md", "days.py"), tmp_path)
    assert printed.splitlines() == ["goes on at step 200", "items of today that are left: 0"]


def test_a_model_of_several_tensors_answers_as_its_page_says(tmp_path: Path) -> None:
    (block,) = [block for block in blocks_of("how-to/save-a-model.md") if "class Reader" in block.code]
    run(f"import torch\nfrom torch import nn\nimport geartrain as gt\n{block.code}", tmp_path)
    assert (tmp_path / "runs" / "reader" / "model.json").is_file()


def test_a_model_is_exported_as_its_page_says(tmp_path: Path) -> None:
    require_onnx()
    assert "features differ by" in run(program_of("how-to/export-a-model.md"), tmp_path)
    assert (tmp_path / "models" / "mine" / "backbone.onnx").is_file()


@pytest.mark.parametrize("page", ["how-to/from-partial-fc.md", "how-to/from-plsc.md"])
def test_the_other_side_of_a_diff_is_a_program_too(page: str) -> None:
    compile(diff_of(page).before, page, "exec")


def test_the_page_about_the_loss_shows_what_its_program_prints(tmp_path: Path) -> None:
    page = "explanation/loss.md"
    shown = "".join(block.code for block in blocks_of(page) if block.language == "text")
    printed = run(program_of(page), tmp_path)
    assert losses_in(printed) == pytest.approx(losses_in(shown), abs=0.02)
    assert re.sub(r"[\d.]+$", "", printed, flags=re.MULTILINE) == re.sub(r"[\d.]+$", "", shown, flags=re.MULTILINE)


def test_samples_are_read_as_their_page_says(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="needs pip install 'geartrain[data]'")
    alone, shared = (
        next(block.code for block in blocks_of(page) if block.language == "python" and not block.title)
        for page in ("how-to/samples.md", "how-to/shared-samples.md")
    )
    (missing,) = [block.code for block in blocks_of("how-to/samples.md") if block.title == "missing"]
    program = f"{alone}\n{missing}\nwith gt.local() as cluster:\n{textwrap.indent(shared, '    ')}"
    assert run(program, tmp_path) == "40 batches, 20,000 samples\n"


def test_followers_of_the_page_have_what_was_trained(tmp_path: Path) -> None:
    first, *_ = [block for block in blocks_of("how-to/serve-embeddings.md") if block.language == "python"]
    printed = run(first.code, tmp_path)
    assert printed.startswith("version 1\nversion 2\n2 2\ntorch.Size([2, 16]) ")


def test_a_model_with_other_fields_takes_what_both_have(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (block,) = [block for block in blocks_of("how-to/save-a-model.md") if "runs/clicks" in block.code]
    run(f"from torch import nn\nimport geartrain as gt\n{block.code}", tmp_path)
    (said,) = [record.message for record in caplog.records]
    assert said.partition(": ")[2] in block.code
