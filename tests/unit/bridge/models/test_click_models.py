"""DeepFM and Wide & Deep over rows of a cluster: the formulas of their papers, and torch's own training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.bridge.embedding.levels import Nodes
from geartrain.bridge.models.click_model import ClickModel
from geartrain.workers.samples.batches import SampleBatch

DIM, ROWS, BATCH = 4, 30, 16
NAMES = ("user", "item", "genres")


class TorchDeepFM(nn.Module):
    """The same model over ``nn.Embedding`` and ``nn.EmbeddingBag``, the pairs summed one by one."""

    def __init__(self, ours: gt.models.DeepFM, rows: dict[str, Tensor]) -> None:
        super().__init__()
        as_module = {"user": nn.Embedding, "item": nn.Embedding, "genres": nn.EmbeddingBag}
        self.factors = nn.ModuleDict()
        self.weights = nn.ModuleDict()
        for name in NAMES:
            settings = {"mode": "mean"} if name == "genres" else {}
            self.factors[name] = as_module[name].from_pretrained(rows[name].clone(), freeze=False, **settings)
            self.weights[name] = as_module[name].from_pretrained(rows[f"{name}_bias"].clone(), freeze=False, **settings)
        self.deep = nn.Sequential(nn.Linear(3 * DIM, 8), nn.ReLU(), nn.Linear(8, 1, bias=False))
        self.deep[0].load_state_dict(ours.deep[0].state_dict())
        self.deep[2].load_state_dict(ours.deep[3].state_dict())
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        vectors = [self.factors[name](batch[name]) for name in NAMES]
        logits = self.bias + sum(self.weights[name](batch[name]) for name in NAMES).squeeze(1)
        for first in range(3):
            for second in range(first):
                logits = logits + (vectors[first] * vectors[second]).sum(1)
        return logits + self.deep(torch.cat(vectors, 1)).squeeze(1)


def batch_of(step: int) -> tuple[dict[str, Tensor], Tensor]:
    rng = torch.Generator().manual_seed(step)
    ids = {name: torch.randint(ROWS, (BATCH,), generator=rng) for name in ("user", "item")}
    ids["genres"] = torch.randint(ROWS, (BATCH, 3), generator=rng)
    clicks = ((ids["user"] + ids["item"]) % 2).float()
    return ids | {f"{name}_bias": ids[name] for name in NAMES}, clicks


def test_deepfm_trains_as_one_of_plain_torch(cluster: Cluster) -> None:
    dims = dict.fromkeys(NAMES, DIM) | {f"{name}_bias": 1 for name in NAMES}
    members = [
        gt.Field(name, dim=dim, pooling="mean" if "genres" in name else "sum", initializer=gt.Normal(std=0.3))
        for name, dim in dims.items()
    ]
    fields = gt.EmbeddingGroup(cluster, "ctr", members, optimizer=gt.Adagrad(0.1))
    torch.manual_seed(0)
    ours = gt.models.DeepFM(dims, (8,))
    before = {name: fields.table(name).pull(torch.arange(ROWS)) for name in dims}
    theirs = TorchDeepFM(ours, before)
    optimizer = gt.joint(torch.optim.Adam(ours.parameters(), lr=0.01), fields)
    embeddings = [*theirs.factors.parameters(), *theirs.weights.parameters()]
    dense = [*theirs.deep.parameters(), theirs.bias]
    torch_optimizers = torch.optim.Adagrad(embeddings, lr=0.1), torch.optim.Adam(dense, lr=0.01)
    for step in range(20):
        batch, clicks = batch_of(step)
        logits, expected = ours(fields(batch)), theirs(batch)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        for item in (optimizer, *torch_optimizers):
            item.zero_grad()
        for item in (logits, expected):
            nn.functional.binary_cross_entropy_with_logits(item, clicks).backward()
        for item in (optimizer, *torch_optimizers):
            item.step()
    for name in NAMES:
        after = fields.table(name).pull(torch.arange(ROWS))
        torch.testing.assert_close(after, theirs.factors[name].weight.data, rtol=1e-4, atol=1e-4)
        assert (after - before[name]).abs().max() > 0.1


def test_wide_and_deep_is_a_linear_model_beside_a_network() -> None:
    model = gt.models.WideDeep({"user": 3, "item": 5, "user_bias": 1, "cross": 1}, (4,))
    rng = torch.Generator().manual_seed(1)
    vectors = {
        name: torch.randn(BATCH, dim, generator=rng)
        for name, dim in {"cross": 1, "item": 5, "other": 2, "user": 3, "user_bias": 1}.items()
    }
    hidden = model.deep[0](torch.cat([vectors["user"], vectors["item"]], 1)).relu()
    wide = vectors["cross"] + vectors["user_bias"]
    expected = (model.bias + wide + hidden @ model.deep[3].weight.T).squeeze(1)
    torch.testing.assert_close(model(vectors), expected)


def test_a_model_without_first_order_weights_has_none() -> None:
    model = gt.models.DeepFM({"user": 2, "item": 2}, ())
    vectors = {"user": torch.tensor([[1.0, 2.0]]), "item": torch.tensor([[3.0, -1.0]])}
    linear = model.deep[0](torch.tensor([[1.0, 2.0, 3.0, -1.0]])).squeeze(1)
    torch.testing.assert_close(model(vectors), linear + 1.0)


@pytest.mark.parametrize("kind", [gt.models.DeepFM, gt.models.WideDeep])
def test_nodes_that_samples_share_are_seen_as_the_samples_of_each(kind: Any) -> None:
    torch.manual_seed(0)
    model = kind({"user": 4, "age": 4, "item": 4, "user_bias": 1, "item_bias": 1}, (8,))
    index = torch.tensor([0, 0, 2, 1, 0])
    of_nodes = {name: torch.randn(3, 4 - 3 * (name == "user_bias")) for name in ("user", "age", "user_bias")}
    own = {"item": torch.randn(5, 4), "item_bias": torch.randn(5, 1)}
    batch = SampleBatch({}, 5, {}, dict.fromkeys(of_nodes, "user"), {"user": Nodes(index, 3)})
    clicks = torch.tensor([1.0, 0, 0, 1, 0])
    found = model({**of_nodes, **own}, batch=batch), model({**of_nodes, **own}, clicks, batch)
    of_samples = {**{name: values[index] for name, values in of_nodes.items()}, **own}
    torch.testing.assert_close(found, (model(of_samples), model(of_samples, clicks)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gt.models.DeepFM({"user": 8, "item": 16}), "'user': 8, 'item': 16.* must be equal"),
        (lambda: gt.models.DeepFM({"bias": 1}), "no field wider than 1"),
        (lambda: gt.models.WideDeep({"user": 0}), "dim of field 'user' is 0"),
        (lambda: gt.models.WideDeep(["user"]), r"dims of WideDeep is \['user'\]"),
        (lambda: gt.models.WideDeep({"user": 4}, 64), "hidden is 64"),
        (lambda: gt.models.WideDeep({"user": 4}, (0,)), "a width of hidden is 0"),
        (lambda: gt.models.DeepFM({"user": 4}, dropout=1.0), r"dropout is 1.0; it must lie in \[0, 1\)"),
    ],
)
def test_a_model_that_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(gt.errors.InvalidArgument, match=message):
        make()


def test_vectors_that_are_missing_or_of_another_shape_are_named() -> None:
    model = gt.models.DeepFM({"user": 4, "user_bias": 1})
    with pytest.raises(gt.errors.InvalidArgument, match="field 'user_bias' of DeepFM is not among"):
        model({"user": torch.zeros(2, 4)})
    with pytest.raises(gt.errors.InvalidArgument, match=r"field 'user' have shape \[2, 3, 4\]; DeepFM takes \[B, 4\]"):
        model({"user": torch.zeros(2, 3, 4), "user_bias": torch.zeros(2, 1)})


def test_a_model_without_logits_cannot_be_made() -> None:
    class Silent(ClickModel):
        pass

    with pytest.raises(TypeError, match=r"Silent.*logits"):
        Silent()  # type: ignore[abstract]
