"""Geartrain: train models whose first or last layer does not fit beside the network.

The public names are loaded when they are first used, so that ``import geartrain`` costs nothing, a shard process never
imports torch, and a machine that only talks to tables needs neither.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from geartrain import models
    from geartrain.ams.client.cluster import Cluster
    from geartrain.ams.client.factory import connect
    from geartrain.ams.client.snapshots.follower import TableFollower
    from geartrain.ams.client.table import Table
    from geartrain.ams.programs.selection import ActiveClasses, FullSoftmax, PartialFC, Selection
    from geartrain.ams.values import errors
    from geartrain.ams.values.admission.rules import MinCount, Probability
    from geartrain.ams.values.config import ClientConfig
    from geartrain.ams.values.expiry.rules import RowBlock, Rule, SmallerThan, Unseen, expiry_rule
    from geartrain.ams.values.optimizers.registry import (
        FTRL,
        SGD,
        Adagrad,
        Adam,
        AdamW,
        Momentum,
        RMSProp,
        RowWiseAdagrad,
        RowWiseAdam,
        SparseMomentum,
    )
    from geartrain.ams.values.specs import Constant, Normal, TableSpec, Uniform
    from geartrain.ams.values.strings import hash_strings
    from geartrain.bridge.checkpoint.loading import load
    from geartrain.bridge.checkpoint.saving import save
    from geartrain.bridge.dense.dense_table import DenseTable, attach
    from geartrain.bridge.embedding.field import Field
    from geartrain.bridge.embedding.group import Embedding, EmbeddingGroup
    from geartrain.bridge.embedding.group_follower import GroupFollower
    from geartrain.bridge.embedding.levels import LevelLinear, per_level
    from geartrain.bridge.embedding.modes import SSP
    from geartrain.bridge.gear.config import SlowGearConfig
    from geartrain.bridge.gear.slow_gear import SlowGear
    from geartrain.bridge.head.class_head import ClassHead
    from geartrain.bridge.head.config import HeadConfig
    from geartrain.bridge.head.loss.functional import class_center_sample, margin_cross_entropy
    from geartrain.bridge.head.loss.margins.adaface import AdaFace
    from geartrain.bridge.head.loss.margins.angular import ArcFace, CombinedMargin, CosFace, SphereFace
    from geartrain.bridge.head.loss.margins.curricularface import CurricularFace
    from geartrain.bridge.head.loss.margins.elasticface import ElasticArcFace, ElasticCosFace
    from geartrain.bridge.head.loss.margins.filtered import FilteredMargin
    from geartrain.bridge.head.loss.margins.magface import MagFace
    from geartrain.bridge.head.loss.margins.margin import (
        AdaptiveMargin,
        Margin,
        MarginBatch,
        NegativesMargin,
        TargetLogits,
    )
    from geartrain.bridge.head.loss.margins.scheduled import ScheduledMargin
    from geartrain.bridge.head.memory import memory_report
    from geartrain.bridge.head.selection.knn_selection import KNNSoftmax
    from geartrain.bridge.head.weights import export_class_weights, import_class_weights
    from geartrain.bridge.optim.fccs import FCCS
    from geartrain.bridge.optim.lamb import LAMB
    from geartrain.bridge.optim.lars import LARS
    from geartrain.bridge.parallel.mesh import mesh
    from geartrain.bridge.parallel.overlap.micro_batches import MicroBatches
    from geartrain.bridge.parallel.overlap.trace import trace_step
    from geartrain.bridge.parallel.parallelize import parallelize
    from geartrain.bridge.parallel.plan.auto import auto_plan
    from geartrain.bridge.parallel.plan.hardware.hardware import Hardware
    from geartrain.bridge.parallel.scopes import Replicate, Split, replicate, split
    from geartrain.bridge.parallel.topk.hook import TopKGradients
    from geartrain.bridge.pipeline.prefetch import prefetch
    from geartrain.bridge.retrieval.item_tree import ItemTree
    from geartrain.bridge.retrieval.tdm import TDM
    from geartrain.bridge.rows.joint import joint
    from geartrain.bridge.rows.optimizer import RowOptimizer, clip_grad_norm_
    from geartrain.bridge.rows.state import state_from_bytes, state_to_bytes
    from geartrain.launch.hosting import local
    from geartrain.workers.data.streams import StreamReader
    from geartrain.workers.models.trained_model import TrainedModel, load_model
    from geartrain.workers.samples.files import CsvSamples, ParquetSamples, TreeSamples
    from geartrain.workers.samples.kafka.samples import KafkaSamples
    from geartrain.workers.samples.trees.compress import compress_samples

__version__ = "0.1.0"

__all__ = [
    "FCCS",
    "FTRL",
    "LAMB",
    "LARS",
    "SGD",
    "SSP",
    "TDM",
    "ActiveClasses",
    "AdaFace",
    "Adagrad",
    "Adam",
    "AdamW",
    "AdaptiveMargin",
    "ArcFace",
    "ClassHead",
    "ClientConfig",
    "Cluster",
    "CombinedMargin",
    "Constant",
    "CosFace",
    "CsvSamples",
    "CurricularFace",
    "DenseTable",
    "ElasticArcFace",
    "ElasticCosFace",
    "Embedding",
    "EmbeddingGroup",
    "Field",
    "FilteredMargin",
    "FullSoftmax",
    "GroupFollower",
    "Hardware",
    "HeadConfig",
    "ItemTree",
    "KNNSoftmax",
    "KafkaSamples",
    "LevelLinear",
    "MagFace",
    "Margin",
    "MarginBatch",
    "MicroBatches",
    "MinCount",
    "Momentum",
    "NegativesMargin",
    "Normal",
    "ParquetSamples",
    "PartialFC",
    "Probability",
    "RMSProp",
    "Replicate",
    "RowBlock",
    "RowOptimizer",
    "RowWiseAdagrad",
    "RowWiseAdam",
    "Rule",
    "ScheduledMargin",
    "Selection",
    "SlowGear",
    "SlowGearConfig",
    "SmallerThan",
    "SparseMomentum",
    "SphereFace",
    "Split",
    "StreamReader",
    "Table",
    "TableFollower",
    "TableSpec",
    "TargetLogits",
    "TopKGradients",
    "TrainedModel",
    "TreeSamples",
    "Uniform",
    "Unseen",
    "__version__",
    "attach",
    "auto_plan",
    "class_center_sample",
    "clip_grad_norm_",
    "compress_samples",
    "connect",
    "errors",
    "expiry_rule",
    "export_class_weights",
    "hash_strings",
    "import_class_weights",
    "joint",
    "load",
    "load_model",
    "local",
    "margin_cross_entropy",
    "memory_report",
    "mesh",
    "models",
    "parallelize",
    "per_level",
    "prefetch",
    "replicate",
    "save",
    "split",
    "state_from_bytes",
    "state_to_bytes",
    "trace_step",
]

_HOMES = {
    "geartrain.ams.client.table": ("Table",),
    "geartrain.ams.client.snapshots.follower": ("TableFollower",),
    "geartrain.ams.client.cluster": ("Cluster",),
    "geartrain.ams.client.factory": ("connect",),
    "geartrain.ams.values.admission.rules": ("MinCount", "Probability"),
    "geartrain.ams.values.expiry.rules": ("RowBlock", "Rule", "SmallerThan", "Unseen", "expiry_rule"),
    "geartrain.ams.values.config": ("ClientConfig",),
    "geartrain.ams.values.optimizers.registry": (
        "SGD",
        "Adam",
        "Momentum",
        "SparseMomentum",
        "Adagrad",
        "AdamW",
        "RowWiseAdagrad",
        "RowWiseAdam",
        "RMSProp",
        "FTRL",
    ),
    "geartrain.ams.values.specs": ("Constant", "Normal", "TableSpec", "Uniform"),
    "geartrain.ams.values.strings": ("hash_strings",),
    "geartrain.bridge.checkpoint.loading": ("load",),
    "geartrain.bridge.checkpoint.saving": ("save",),
    "geartrain.bridge.dense.dense_table": ("DenseTable", "attach"),
    "geartrain.bridge.embedding.field": ("Field",),
    "geartrain.bridge.embedding.group": ("Embedding", "EmbeddingGroup"),
    "geartrain.bridge.embedding.levels": ("LevelLinear", "per_level"),
    "geartrain.bridge.embedding.group_follower": ("GroupFollower",),
    "geartrain.bridge.embedding.modes": ("SSP",),
    "geartrain.bridge.gear.config": ("SlowGearConfig",),
    "geartrain.bridge.gear.slow_gear": ("SlowGear",),
    "geartrain.bridge.head.class_head": ("ClassHead",),
    "geartrain.bridge.head.config": ("HeadConfig",),
    "geartrain.bridge.head.loss.functional": ("class_center_sample", "margin_cross_entropy"),
    "geartrain.bridge.head.selection.knn_selection": ("KNNSoftmax",),
    "geartrain.bridge.head.loss.margins.adaface": ("AdaFace",),
    "geartrain.bridge.head.loss.margins.angular": ("ArcFace", "CombinedMargin", "CosFace", "SphereFace"),
    "geartrain.bridge.head.loss.margins.curricularface": ("CurricularFace",),
    "geartrain.bridge.head.loss.margins.elasticface": ("ElasticArcFace", "ElasticCosFace"),
    "geartrain.bridge.head.loss.margins.filtered": ("FilteredMargin",),
    "geartrain.bridge.head.loss.margins.magface": ("MagFace",),
    "geartrain.bridge.head.loss.margins.margin": (
        "AdaptiveMargin",
        "Margin",
        "MarginBatch",
        "NegativesMargin",
        "TargetLogits",
    ),
    "geartrain.bridge.head.loss.margins.scheduled": ("ScheduledMargin",),
    "geartrain.bridge.head.memory": ("memory_report",),
    "geartrain.ams.programs.selection": ("ActiveClasses", "FullSoftmax", "PartialFC", "Selection"),
    "geartrain.bridge.head.weights": ("export_class_weights", "import_class_weights"),
    "geartrain.bridge.optim.fccs": ("FCCS",),
    "geartrain.bridge.optim.lamb": ("LAMB",),
    "geartrain.bridge.optim.lars": ("LARS",),
    "geartrain.bridge.parallel.mesh": ("mesh",),
    "geartrain.bridge.parallel.parallelize": ("parallelize",),
    "geartrain.bridge.parallel.plan.auto": ("auto_plan",),
    "geartrain.bridge.parallel.plan.hardware.hardware": ("Hardware",),
    "geartrain.bridge.parallel.scopes": ("Replicate", "Split", "replicate", "split"),
    "geartrain.bridge.parallel.overlap.micro_batches": ("MicroBatches",),
    "geartrain.bridge.parallel.overlap.trace": ("trace_step",),
    "geartrain.bridge.parallel.topk.hook": ("TopKGradients",),
    "geartrain.bridge.pipeline.prefetch": ("prefetch",),
    "geartrain.bridge.retrieval.item_tree": ("ItemTree",),
    "geartrain.bridge.retrieval.tdm": ("TDM",),
    "geartrain.bridge.rows.joint": ("joint",),
    "geartrain.bridge.rows.optimizer": ("RowOptimizer", "clip_grad_norm_"),
    "geartrain.bridge.rows.state": ("state_from_bytes", "state_to_bytes"),
    "geartrain.launch.hosting": ("local",),
    "geartrain.workers.data.streams": ("StreamReader",),
    "geartrain.workers.models.trained_model": ("TrainedModel", "load_model"),
    "geartrain.workers.samples.files": ("CsvSamples", "ParquetSamples", "TreeSamples"),
    "geartrain.workers.samples.kafka.samples": ("KafkaSamples",),
    "geartrain.workers.samples.trees.compress": ("compress_samples",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def _require_built() -> None:
    """Refuse a bare source folder: Python looks into the current folder before it looks for an installed package."""
    try:
        built = importlib.util.find_spec("geartrain.ams.kernels._core") is not None
    except ModuleNotFoundError:
        built = False
    if not built:
        folder = Path(__file__).resolve().parent
        raise ImportError(
            f"{folder} is Geartrain's source folder, which holds no built package. Run Python from another folder than "
            f"{folder.parent}, or install the checkout in place: pip install -e {folder.parent}"
        )


_require_built()


def __getattr__(name: str) -> object:
    if name == "errors":
        return importlib.import_module("geartrain.ams.values.errors")
    if name == "models":
        return importlib.import_module("geartrain.models")
    home = _HOME_OF.get(name)
    if home is None:
        import difflib

        close = difflib.get_close_matches(name, __all__, 1)
        names = f"did you mean {close[0]!r}?" if close else f"its public names are {', '.join(__all__)}"
        raise AttributeError(f"module 'geartrain' has no attribute {name!r}; {names}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value  # found once, then an ordinary attribute
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
