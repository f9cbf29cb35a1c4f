"""DIN, DIEN and CrossMedia: against plain loops over samples and events in float64, and that they learn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.bridge.models.dien import auxiliary_loss
from geartrain.bridge.models.sequences import sequences_of

LENGTHS = (3, 0, 1, 5)
DIM, PIXELS = 4, 6


def jagged(parts: list[Tensor]) -> Tensor:
    offsets = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(torch.cat(parts), offsets)


def sample_vectors(**dims: int) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
    """Vectors of pooled fields ``dims`` and, apart, the sequences of history and history_shop by sample."""
    rng = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64)  # noqa: E731
    pooled = {name: draw(len(LENGTHS), dim) for name, dim in dims.items()}
    events = {name: [draw(length, DIM) for length in LENGTHS] for name in ("history", "history_shop")}
    return pooled, events


DIMS = {"user": 3, "item": DIM, "shop": DIM, "weight": 1, "history": DIM, "history_shop": DIM}
HISTORY = {"history": "item", "history_shop": "shop"}


def settled(model: nn.Module) -> nn.Module:
    """In float64 and evaluating, its parameters large enough to matter."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model.double().eval()


def made(name: str) -> tuple[Any, dict[str, Tensor], dict[str, list[Tensor]]]:
    pooled, events = sample_vectors(user=3, item=DIM, shop=DIM, weight=1)
    model: Any = settled(getattr(gt.models, name)(DIMS, HISTORY, hidden=(5,), activation="prelu"))
    return model, {**pooled, **{field: jagged(parts) for field, parts in events.items()}}, events


def deep_of(model: Any, vectors: Mapping[str, Tensor], row: int, last: Tensor) -> Tensor:
    inputs = torch.cat([*(vectors[name][row] for name in ("user", "item", "shop")), last])
    return model.bias + vectors["weight"][row, 0] + model.deep(inputs[None])[0, 0]


def test_din_weighs_each_event_by_the_item_at_hand() -> None:
    model, vectors, events = made("DIN")
    expected = []
    for row, length in enumerate(LENGTHS):
        query = torch.cat([vectors["item"][row], vectors["shop"][row]])
        interest = torch.zeros(2 * DIM, dtype=torch.float64)
        for step in range(length):
            event = torch.cat([events["history"][row][step], events["history_shop"][row][step]])
            unit = torch.cat([query, event, query - event, query * event])
            interest += (model.attention.network(unit[None])[0, 0] + model.attention.bias) * event
        expected.append(deep_of(model, vectors, row, interest))
    torch.testing.assert_close(model(vectors), torch.stack(expected))


def test_dien_reads_events_one_after_the_other() -> None:
    model, vectors, events = made("DIEN")
    w_in, b_in = model.extractor.weight_ih_l0, model.extractor.bias_ih_l0
    w_state, b_state = model.extractor.weight_hh_l0, model.extractor.bias_hh_l0
    expected = []
    for row, length in enumerate(LENGTHS):
        query = torch.cat([vectors["item"][row], vectors["shop"][row]])
        state, states, scores = torch.zeros(2 * DIM, dtype=torch.float64), [], []
        for step in range(length):
            event = torch.cat([events["history"][row][step], events["history_shop"][row][step]])
            reset_in, keep_in, new_in = (w_in @ event + b_in).chunk(3)
            reset, keep, new = (w_state @ state + b_state).chunk(3)
            keep = torch.sigmoid(keep_in + keep)  # torch's gate says how much of the old state stays
            state = keep * state + (1 - keep) * torch.tanh(new_in + torch.sigmoid(reset_in + reset) * new)
            states.append(state)
            scores.append(state @ model.relevance.weight @ query)
        final = torch.zeros(2 * DIM, dtype=torch.float64)
        cell = model.evolution
        for state, weight in zip(states, torch.stack(scores).softmax(0) if scores else [], strict=True):
            update_in, reset_in, new_in = (cell.inputs.weight @ state + cell.inputs.bias).chunk(3)
            update, reset, new = (cell.states.weight @ final).chunk(3)
            gate = weight * torch.sigmoid(update_in + update)
            final = (1 - gate) * final + gate * torch.tanh(new_in + torch.sigmoid(reset_in + reset) * new)
        expected.append(deep_of(model, vectors, row, final))
    torch.testing.assert_close(model(vectors), torch.stack(expected))


@pytest.mark.parametrize("name", ["DIN", "DIEN"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sequences_are_read_under_autocast(name: str, dtype: torch.dtype) -> None:
    pooled, events = sample_vectors(user=3, item=DIM, shop=DIM, weight=1)
    vectors = {key: one.float() for key, one in pooled.items()}
    vectors |= {key: jagged([one.float() for one in parts]) for key, parts in events.items()}
    torch.manual_seed(0)
    model = getattr(gt.models, name)(DIMS, HISTORY, hidden=(5,)).eval()
    with torch.autocast("cpu", dtype):
        logits = model(vectors)
    torch.testing.assert_close(logits, model(vectors), rtol=0.02, atol=0.02)
    with torch.autocast("cpu", dtype):
        model.train()(vectors, torch.tensor([1.0, 0.0, 0.0, 1.0])).backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def test_the_auxiliary_loss_asks_each_state_for_the_event_after_it() -> None:
    _, vectors, _ = made("DIEN")
    events = sequences_of("DIEN", vectors, {"history": DIM})
    rng = torch.Generator().manual_seed(2)
    states, others = (torch.randn(9, DIM, generator=rng, dtype=torch.float64) for _ in range(2))
    terms, first = [], 0
    for length in LENGTHS:
        for step in range(first, first + length - 1):
            right, wrong = states[step] @ events.values_ND[step + 1], states[step] @ others[step + 1]
            terms.append(-right.sigmoid().log() - (1 - wrong.sigmoid()).log())
        first += length
    assert len(terms) == 6
    torch.testing.assert_close(auxiliary_loss(events, states, others), torch.stack(terms).mean())
    alone = sequences_of("DIEN", {"history": torch.ones(3, 1, DIM)}, {"history": DIM})
    assert auxiliary_loss(alone, torch.ones(3, DIM), torch.ones(3, DIM)) == 0


def crossmedia() -> tuple[Any, dict[str, Tensor], list[Tensor]]:
    model: Any = settled(
        gt.models.CrossMedia(
            {"user": 3, "item": DIM, "weight": 1},
            image="image",
            history="seen",
            image_dim=PIXELS,
            query="item",
            image_width=2,
            hidden=(5,),
        )
    )
    pooled, _ = sample_vectors(user=3, item=DIM, weight=1, image=PIXELS)
    rng = torch.Generator().manual_seed(3)
    seen = [torch.randn(length, PIXELS, generator=rng, dtype=torch.float64) for length in LENGTHS]
    return model, {**pooled, "seen": jagged(seen)}, seen


def test_crossmedia_asks_the_images_of_a_history_in_two_ways() -> None:
    model, vectors, seen = crossmedia()
    expected = []
    for row, length in enumerate(LENGTHS):
        own, item = model.descriptor(vectors["image"][row][None])[0], vectors["item"][row]
        pooled = []
        for network, query in ((model.by_image, own), (model.by_id, item)):
            mean = torch.zeros(2, dtype=torch.float64)
            if length:
                made_of = [model.descriptor(image[None])[0] for image in seen[row]]
                scores = torch.stack([network(torch.cat([query, item])[None])[0, 0] for item in made_of])
                mean = sum((share * item for share, item in zip(scores.softmax(0), made_of, strict=True)), mean)
            pooled.append(mean)
        inputs = torch.cat([vectors["user"][row], item, own, *pooled])
        expected.append(model.bias + vectors["weight"][row, 0] + model.deep(inputs[None])[0, 0])
    torch.testing.assert_close(model(vectors), torch.stack(expected))


@pytest.mark.parametrize("name", ["DIN", "DIEN", "CrossMedia"])
def test_gradients_are_those_of_the_formula_and_reach_every_event(name: str) -> None:
    model, vectors = crossmedia()[:2] if name == "CrossMedia" else made(name)[:2]
    sequences = [field for field, value in vectors.items() if value.is_nested]
    lengths = torch.tensor(LENGTHS)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])

    def logits(*values: Tensor) -> Tensor:
        again = {f: torch.nested.nested_tensor_from_jagged(v, offsets) for f, v in zip(sequences, values, strict=True)}
        return model({**vectors, **again})

    values = [vectors[field].values().detach().clone().requires_grad_() for field in sequences]
    assert torch.autograd.gradcheck(logits, values)
    gradients = torch.autograd.grad(logits(*values).sum(), values)
    assert all(bool((gradient != 0).any(1).all()) for gradient in gradients)


def test_dice_is_a_prelu_around_the_mean_of_the_batch() -> None:
    dice = gt.models.Dice(3).double()
    nn.init.constant_(dice.alpha, 0.3)
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 4 + 2
    share = ((x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-8).sqrt()).sigmoid()
    torch.testing.assert_close(dice(x), share * x + (1 - share) * 0.3 * x)
    for _ in range(200):
        dice(x)
    one = dice.eval()(x)
    share = ((x - x.mean(0)) / (x.var(0) + 1e-8).sqrt()).sigmoid()
    torch.testing.assert_close(one, share * x + (1 - share) * 0.3 * x)
    before = dice.train().running_mean.clone()
    torch.testing.assert_close(dice(x[:1]), one[:1])  # one vector has no variance
    assert dice(x[:0]).shape == (0, 3)
    torch.testing.assert_close(dice.running_mean, before)


def seen_before(rng: torch.Generator) -> tuple[dict[str, Any], Tensor]:
    """Clicked is an item that the history has, at any place."""
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randint(5, (128,), generator=rng).cumsum(0)])
    items, history = (torch.randint(8, (n,), generator=rng) for n in (128, int(offsets[-1])))
    seen = [float(item in history[a:b]) for item, a, b in zip(items, offsets[:-1], offsets[1:], strict=True)]
    return {"item": items, "history": (history, offsets)}, torch.tensor(seen)


def comes_next(rng: torch.Generator) -> tuple[dict[str, Any], Tensor]:
    """Clicked is the item after the last one of the history, which counts up."""
    first = torch.randint(8, (128, 1), generator=rng)
    history = (first + torch.arange(4)) % 8
    items = torch.where(torch.rand(128, generator=rng) < 0.5, first[:, 0] + 4, first[:, 0] + 5) % 8
    return {"item": items, "history": history}, (items == (first[:, 0] + 4) % 8).float()


@pytest.mark.parametrize(("name", "draw"), [("DIN", seen_before), ("DIEN", comes_next)])
def test_a_model_learns_what_only_item_and_history_together_tell(name: str, draw: Any) -> None:
    rng = torch.Generator().manual_seed(0)
    with gt.local() as cluster:
        members = [
            gt.Field("item", dim=8, initializer=gt.Normal(std=0.3)),
            gt.Field("history", table="item", pooling=None),
        ]
        fields = gt.EmbeddingGroup(cluster, "ctr", members, optimizer=gt.Adam(0.02))
        torch.manual_seed(0)
        model = getattr(gt.models, name)({"item": 8, "history": 8}, {"history": "item"}, hidden=(32,))
        optimizer = gt.joint(torch.optim.Adam(model.parameters(), lr=0.02), fields)
        for _ in range(100):
            batch, clicks = draw(rng)
            loss = model(fields(batch), clicks)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        batch, clicks = draw(rng)
        with torch.no_grad():
            right = (model(fields(batch)) > 0) == (clicks > 0)
    assert 0.1 < clicks.mean() < 0.6
    assert right.float().mean() > 0.93


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gt.models.DIN({"item": 4}, {"history": "item"}), "DIN has no dim of field 'history'"),
        (lambda: gt.models.DIN({"item": 4, "history": 8}, {"history": "item"}), "which DIN has with dim 4"),
        (lambda: gt.models.DIEN({"item": 4, "history": 4}, {"history": "film"}), "field 'film', which DIEN has not"),
        (lambda: gt.models.DIEN({"item": 4, "history": 4}, {}), "history of DIEN is {}"),
        (lambda: gt.models.DIN({"item": 4, "h": 4}, {"h": "item"}, activation="gelu"), "activation is 'gelu'"),
        (lambda: gt.models.DIEN({"item": 4, "h": 4}, {"h": "item"}, auxiliary=-1), "auxiliary is -1; it must be >= 0"),
        (
            lambda: gt.models.CrossMedia({"item": 4}, image="i", history="h", image_dim=6, query="user"),
            "query of CrossMedia is 'user'",
        ),
    ],
)
def test_a_sequence_model_that_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(gt.errors.InvalidArgument, match=message):
        make()


def test_sequences_that_do_not_fit_are_named() -> None:
    model, vectors, _ = made("DIN")
    with pytest.raises(gt.errors.InvalidArgument, match="field 'history' of DIN is not among"):
        model({name: value for name, value in vectors.items() if name != "history"})
    with pytest.raises(gt.errors.InvalidArgument, match=r"'history' have shape \[4, 4\]; DIN takes sequences"):
        model({**vectors, "history": vectors["item"]})
    with pytest.raises(gt.errors.InvalidArgument, match="'history_shop' of DIN have other lengths than those of 'hist"):
        model({**vectors, "history_shop": torch.zeros(4, 2, DIM)})
    media, vectors, _ = crossmedia()
    with pytest.raises(gt.errors.InvalidArgument, match=r"images 'image' are of shape \[4, 5\]; .* \[4, 6\]"):
        media({**vectors, "image": vectors["image"][:, 1:]})
