"""DSSM: the formula in float64, what is no wrong answer, and that its towers find items alone."""

from __future__ import annotations

import pytest
import torch

import geartrain as gt

DIM = 6


def test_the_loss_is_the_log_loss_and_a_softmax_over_other_items() -> None:
    rng = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = gt.models.DSSM({"user": DIM}, {"item": DIM, "shop": 2}, (5,), width=3, negatives=0.7).double()
    torch.nn.init.constant_(model.bias, -0.4)
    of_item, of_shop = (torch.randn(4, dim, generator=rng, dtype=torch.float64) for dim in (DIM, 2))
    items, clicks = torch.tensor([0, 1, 0, 2, 3, 1]), torch.tensor([1.0, 0, 1, 1, 0, 1])
    vectors = {
        "user": torch.randn(6, DIM, generator=rng, dtype=torch.float64),
        "item": of_item[items],
        "shop": of_shop[items],
    }
    users = [model.user_tower(vector[None])[0] for vector in vectors["user"]]
    wares = [model.item_tower(torch.cat([item, two])[None])[0] for item, two in zip(of_item, of_shop, strict=True)]
    scale = model.log_scale.exp()
    cosine = [[scale * torch.cosine_similarity(user, ware, dim=0) for ware in wares] for user in users]
    logits = torch.stack([cosine[row][item] for row, item in enumerate(items)]) + model.bias
    torch.testing.assert_close(model(vectors), logits)

    log_loss = -torch.where(clicks > 0, logits.sigmoid().log(), (1 - logits.sigmoid()).log()).mean()
    terms = []
    for row in range(6):
        if clicks[row]:
            beside = [cosine[row][item] for place, item in enumerate(items) if place == row or item != items[row]]
            terms.append(torch.stack(beside).logsumexp(0) - cosine[row][items[row]])
    torch.testing.assert_close(model(vectors, clicks), log_loss + 0.7 * torch.stack(terms).mean())
    none = torch.zeros(6)
    torch.testing.assert_close(model(vectors, none), -(1 - logits.sigmoid()).log().mean())


def test_users_find_the_items_of_their_kind() -> None:
    """Only clicks are given: without other items of the batch, saying yes to everything would be perfect."""
    rng = torch.Generator().manual_seed(0)
    with gt.local() as cluster:
        members = [gt.Field(name, dim=DIM, initializer=gt.Normal(std=0.3)) for name in ("user", "item")]
        fields = gt.EmbeddingGroup(cluster, "ctr", members, optimizer=gt.Adam(0.02))
        torch.manual_seed(0)
        model = gt.models.DSSM({"user": DIM}, {"item": DIM}, (16,), width=8, negatives=1.0)
        optimizer = gt.joint(torch.optim.Adam(model.parameters(), lr=0.02), fields)
        for _ in range(180):
            users = torch.randint(40, (64,), generator=rng)
            items = torch.randint(10, (64,), generator=rng) * 4 + users % 4  # of the user's kind
            loss = model(fields({"user": users, "item": items}), torch.ones(64))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        everything = torch.arange(40)
        model.eval()
        with torch.no_grad():
            vectors = fields({"user": everything, "item": everything})
            scores = model.user_vectors(vectors) @ model.item_vectors(vectors).T
    torch.testing.assert_close(model.item_vectors(vectors).norm(dim=1), torch.ones(40))
    assert (scores.topk(10).indices % 4 == everything[:, None] % 4).float().mean() > 0.95


def test_a_dssm_that_cannot_be_is_refused() -> None:
    with pytest.raises(gt.errors.InvalidArgument, match="field 'weight' of DSSM has dim 1"):
        gt.models.DSSM({"user": 4, "weight": 1}, {"item": 4})
    with pytest.raises(gt.errors.InvalidArgument, match="negatives is -1"):
        gt.models.DSSM({"user": 4}, {"item": 4}, negatives=-1)
    with pytest.raises(gt.errors.InvalidArgument, match=r"scale is 0\.0; it must be > 0"):
        gt.models.DSSM({"user": 4}, {"item": 4}, scale=0.0)
