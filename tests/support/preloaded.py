"""Imports what children of :mod:`tests.support.forkserver` use, so that they need not. Nothing here starts a thread."""

from __future__ import annotations

import gc

import numpy.ma
import numpy.testing  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401

import geartrain
import tests.faults.restored_jobs
import tests.faults.scenarios
import tests.support.heads
import tests.support.rank_processes  # noqa: F401

for name in geartrain.__all__:
    getattr(geartrain, name)
gc.freeze()  # a child's garbage collector need not copy these pages
