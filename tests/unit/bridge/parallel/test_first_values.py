"""A model on the meta device gets its values by part, the same whatever the number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.parallel.scopes import Scope
from tests.support.rank_processes import run_ranks

CLASSES, DIM, WORDS, PADDING = 1003, 24, 501, 7


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, DIM, padding_idx=PADDING)
        self.backbone = nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), nn.Linear(DIM, DIM))
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.backbone(self.words(ids)))
        return logits


def made(*, shard: bool, seed: int = 4) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = Classifier()
    scopes: dict[str, Scope] = {
        "words": gt.Split(),
        "backbone": gt.Replicate(shard=shard),
        "head": gt.Split(),
    }
    parallel = gt.parallelize(model, gt.mesh(), scopes, seed=seed)
    state = parallel.state_dict()
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}


def check_values(folder: Path) -> None:
    alone = torch.load(folder / "alone.pt", weights_only=True)
    for shard in (False, True):
        for name, value in made(shard=shard).items():
            assert torch.equal(value, alone[name]), name


def test_first_values_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    alone = made(shard=False)
    torch.save(alone, tmp_path / "alone.pt")
    run_ranks(check_values, 3, tmp_path)


def test_first_values_do_not_depend_on_the_scopes() -> None:
    with torch.device("meta"):
        model = Classifier()
    replicated = gt.parallelize(model, gt.mesh(), {"": gt.Replicate()}, seed=4).state_dict()
    for name, value in made(shard=False).items():
        assert torch.equal(value, replicated[name]), name


def test_first_values_are_those_of_the_layers_and_follow_the_seed() -> None:
    values, others = made(shard=False), made(shard=True, seed=5)
    bound = DIM**-0.5
    for name in ("head.weight", "head.bias", "backbone.0.weight"):
        assert -bound <= float(values[name].min()) < -0.9 * bound
        assert bound >= float(values[name].max()) > 0.9 * bound
        assert float(values[name].mean()) == pytest.approx(0, abs=0.1 * bound)
        assert not torch.equal(values[name], others[name])
    assert not torch.equal(values["backbone.0.weight"], values["backbone.2.weight"])
    assert not values["words.weight"][PADDING].any()
    assert float(values["words.weight"].std()) == pytest.approx(1, abs=0.05)
    assert torch.equal(values["backbone.1.running_var"], torch.ones(DIM))


def test_a_module_without_reset_parameters_has_no_first_values() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    with torch.device("meta"):
        model = nn.Sequential(Scale())
    with pytest.raises(InvalidArgument, match=r"module '0' \(Scale\) is on the meta device and has no reset_param"):
        gt.parallelize(model, gt.mesh(), {"0": gt.Replicate()})
