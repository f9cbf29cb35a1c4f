"""Requirements on a model and an optimizer whose gradients are sparsified."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.text import quoted
from geartrain.bridge.rows.stand_in import named_dense_parameters

DTYPES = (torch.float32, torch.bfloat16)
_COMPILED = "_orig_mod."
"""Prefix that torch.compile adds to names of parameters."""


def replicated_part(model: object) -> tuple[DistributedDataParallel, nn.Module]:
    """Return the DDP module that averages the gradients of ``model``, and the module that names its parameters.

    Raises InvalidArgument if no process group averages them.
    """
    if isinstance(model, DistributedDataParallel):
        return model, model.module
    ddp, module = getattr(model, "ddp", None), getattr(model, "module", None)
    if isinstance(ddp, DistributedDataParallel) and isinstance(module, nn.Module):  # from gt.parallelize
        return ddp, module
    raise InvalidArgument(
        f"model is {quoted(type(model).__name__)}; it must be a torch.nn.parallel.DistributedDataParallel, whose "
        "gradients the ranks exchange: wrap the module in it first. What gt.parallelize made needs several ranks, and "
        "a part that is gt.Replicate()"
    )


def trained_parameters(model: DistributedDataParallel, named: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters whose gradients DDP exchanges, by their names in ``named``."""
    ignored: set[str] = getattr(model, "parameters_to_ignore", set())
    averaged = {
        id(parameter)
        for name, parameter in named_dense_parameters(model.module)
        if parameter.requires_grad and name not in ignored
    }
    return {
        name.replace(_COMPILED, ""): parameter
        for name, parameter in named_dense_parameters(named)
        if id(parameter) in averaged
    }


def require_types(parameters: Mapping[str, nn.Parameter], sparsity: float) -> None:
    """Raise InvalidArgument if a parameter is of a type whose gradients cannot be sparsified."""
    allowed = DTYPES if sparsity else (*DTYPES, torch.float64)
    for name, parameter in parameters.items():
        if parameter.dtype not in allowed:
            raise InvalidArgument(
                f"parameter {name!r} is {parameter.dtype}; it must be one of {', '.join(map(str, allowed))}: keep the "
                "parameters in float32 and compute under torch.autocast"
            )


def require_plain(optimizer: object, parameters: Mapping[str, nn.Parameter]) -> Optimizer:
    """Return ``optimizer``, which trains all ``parameters`` without momentum or decay; else raises InvalidArgument."""
    if not isinstance(optimizer, Optimizer):
        raise InvalidArgument(f"optimizer is {quoted(optimizer)}; it must be a torch.optim.Optimizer, such as SGD")
    require_no_momentum(optimizer)
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in parameters.items():
        if id(parameter) not in trained:
            raise InvalidArgument(
                f"the optimizer does not train parameter {name!r}, whose gradient would be taken out of the residuals "
                "and lost; give it all parameters of the model, or set requires_grad=False before DDP is made"
            )
    return optimizer


def require_no_momentum(optimizer: Optimizer) -> None:
    """Raise InvalidArgument if the optimizer would apply momentum or decay a second time.

    Schedulers (``OneCycleLR``) and a loaded ``state_dict`` may add some later.
    """
    for number, group in enumerate(optimizer.param_groups):
        if "betas" in group:
            raise InvalidArgument(
                f"{type(optimizer).__name__} has betas {group['betas']} of its own (param_groups[{number}]), and its "
                "second moment is not that of gradients that arrive summed and late; use torch.optim.SGD(lr=...) "
                "without momentum: TopKGradients(momentum=...) has it"
            )
        for key in ("momentum", "weight_decay"):
            if group.get(key):
                raise InvalidArgument(
                    f"{type(optimizer).__name__} has {key}={group[key]} (param_groups[{number}]), which TopKGradients "
                    f"applies; give {key}=0 to the optimizer and {key}={group[key]} to TopKGradients"
                )
