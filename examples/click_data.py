"""Clicks that somebody could have made: users like items along a few hidden directions. The same for whoever asks."""

import torch
from torch import Tensor

USERS, ITEMS, DIRECTIONS = 200, 100, 4
DIMS = {"user": 8, "item": 8, "user_weight": 1, "item_weight": 1}  # of the fields that the examples train


def batch(seed: int, size: int = 512) -> dict[str, Tensor]:
    """Ids of users [B], of the items that they saw [B], and whether they clicked [B]."""
    hidden = torch.Generator().manual_seed(0)
    tastes, traits = (torch.randn(count, DIRECTIONS, generator=hidden) for count in (USERS, ITEMS))
    drawn = torch.Generator().manual_seed(seed)
    users, items = (torch.randint(count, (size,), generator=drawn) for count in (USERS, ITEMS))
    chances = torch.sigmoid(2 * (tastes[users] * traits[items]).sum(1))
    clicks = (torch.rand(size, generator=drawn) < chances).float()
    return {"user": users, "user_weight": users, "item": items, "item_weight": items, "click": clicks}


def auc(scores: Tensor, clicks: Tensor) -> float:
    """The probability that a clicked sample has a higher score than another."""
    above, below = scores[clicks > 0], scores[clicks == 0]
    return float((above[:, None] > below).float().mean())
