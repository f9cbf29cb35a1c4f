"""Geartrain: train models whose first or last layer does not fit beside the network.

Public names are loaded on first use: ``import geartrain`` is then fast, a shard process never imports torch, and a
machine that only reads and writes tables needs no torch.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # "X as X" is how a module gives a name of another on
    from geartrain import models as models
    from geartrain import ops as ops
    from geartrain import ray as ray
    from geartrain.ams.client.factory import connect as connect
    from geartrain.ams.programs.selection import FullSoftmax as FullSoftmax
    from geartrain.ams.programs.selection import PartialFC as PartialFC
    from geartrain.ams.values import errors as errors
    from geartrain.ams.values.admission.rules import MinCount as MinCount
    from geartrain.ams.values.admission.rules import Probability as Probability
    from geartrain.ams.values.arrays import fold_ids as fold_ids
    from geartrain.ams.values.config import ClientConfig as ClientConfig
    from geartrain.ams.values.expiry.rules import Rule as Rule
    from geartrain.ams.values.expiry.rules import SmallerThan as SmallerThan
    from geartrain.ams.values.expiry.rules import Unseen as Unseen
    from geartrain.ams.values.expiry.rules import expiry_rule as expiry_rule
    from geartrain.ams.values.optimizers.registry import FTRL as FTRL
    from geartrain.ams.values.optimizers.registry import SGD as SGD
    from geartrain.ams.values.optimizers.registry import Adagrad as Adagrad
    from geartrain.ams.values.optimizers.registry import Adam as Adam
    from geartrain.ams.values.optimizers.registry import AdamW as AdamW
    from geartrain.ams.values.optimizers.registry import Momentum as Momentum
    from geartrain.ams.values.optimizers.registry import RMSProp as RMSProp
    from geartrain.ams.values.optimizers.registry import RowWiseAdagrad as RowWiseAdagrad
    from geartrain.ams.values.optimizers.registry import RowWiseAdam as RowWiseAdam
    from geartrain.ams.values.optimizers.registry import SparseMomentum as SparseMomentum
    from geartrain.ams.values.scheduler_messages import RestoreOrder as RestoreOrder
    from geartrain.ams.values.specs import Constant as Constant
    from geartrain.ams.values.specs import Normal as Normal
    from geartrain.ams.values.specs import Uniform as Uniform
    from geartrain.ams.values.strings import hash_strings as hash_strings
    from geartrain.bridge.checkpoint.loading import load as load
    from geartrain.bridge.checkpoint.saving import save as save
    from geartrain.bridge.collectives.scheduler_store import init_process_group as init_process_group
    from geartrain.bridge.dense.dense_table import attach as attach
    from geartrain.bridge.embedding.field import Field as Field
    from geartrain.bridge.embedding.group import Embedding as Embedding
    from geartrain.bridge.embedding.group import EmbeddingGroup as EmbeddingGroup
    from geartrain.bridge.embedding.levels import LevelLinear as LevelLinear
    from geartrain.bridge.embedding.levels import per_level as per_level
    from geartrain.bridge.embedding.modes import SSP as SSP
    from geartrain.bridge.gear.config import SlowGearConfig as SlowGearConfig
    from geartrain.bridge.gear.slow_gear import SlowGear as SlowGear
    from geartrain.bridge.head.class_head import ClassHead as ClassHead
    from geartrain.bridge.head.loss.config import HeadConfig as HeadConfig
    from geartrain.bridge.head.loss.functional import class_center_sample as class_center_sample
    from geartrain.bridge.head.loss.functional import margin_cross_entropy as margin_cross_entropy
    from geartrain.bridge.head.loss.margins.adaface import AdaFace as AdaFace
    from geartrain.bridge.head.loss.margins.angular import ArcFace as ArcFace
    from geartrain.bridge.head.loss.margins.angular import CombinedMargin as CombinedMargin
    from geartrain.bridge.head.loss.margins.angular import CosFace as CosFace
    from geartrain.bridge.head.loss.margins.angular import SphereFace as SphereFace
    from geartrain.bridge.head.loss.margins.curricularface import CurricularFace as CurricularFace
    from geartrain.bridge.head.loss.margins.elasticface import ElasticArcFace as ElasticArcFace
    from geartrain.bridge.head.loss.margins.elasticface import ElasticCosFace as ElasticCosFace
    from geartrain.bridge.head.loss.margins.filtered import FilteredMargin as FilteredMargin
    from geartrain.bridge.head.loss.margins.magface import MagFace as MagFace
    from geartrain.bridge.head.memory import memory_report as memory_report
    from geartrain.bridge.head.selection.knn_selection import KNNSoftmax as KNNSoftmax
    from geartrain.bridge.head.weights import export_class_weights as export_class_weights
    from geartrain.bridge.head.weights import import_class_weights as import_class_weights
    from geartrain.bridge.optim.fccs import FCCS as FCCS
    from geartrain.bridge.optim.lamb import LAMB as LAMB
    from geartrain.bridge.optim.lars import LARS as LARS
    from geartrain.bridge.parallel.global_mean import mean_over_ranks as mean_over_ranks
    from geartrain.bridge.parallel.mesh import mesh as mesh
    from geartrain.bridge.parallel.overlap.micro_batches import MicroBatches as MicroBatches
    from geartrain.bridge.parallel.overlap.trace import trace_step as trace_step
    from geartrain.bridge.parallel.parallelize import parallelize as parallelize
    from geartrain.bridge.parallel.plan.auto import auto_plan as auto_plan
    from geartrain.bridge.parallel.plan.hardware import Hardware as Hardware
    from geartrain.bridge.parallel.scopes import Replicate as Replicate
    from geartrain.bridge.parallel.scopes import Split as Split
    from geartrain.bridge.parallel.scopes import replicate as replicate
    from geartrain.bridge.parallel.scopes import split as split
    from geartrain.bridge.parallel.topk.hook import TopKGradients as TopKGradients
    from geartrain.bridge.pipeline.prefetch import prefetch as prefetch
    from geartrain.bridge.retrieval.item_tree import ItemTree as ItemTree
    from geartrain.bridge.retrieval.tdm import TDM as TDM
    from geartrain.bridge.rows.joint import joint as joint
    from geartrain.bridge.rows.optimizer import RowOptimizer as RowOptimizer
    from geartrain.bridge.rows.optimizer import clip_grad_norm_ as clip_grad_norm_
    from geartrain.bridge.rows.serialization import state_from_bytes as state_from_bytes
    from geartrain.bridge.rows.serialization import state_to_bytes as state_to_bytes
    from geartrain.launch.hosting import local as local
    from geartrain.serving.http.app import serve_app as serve_app
    from geartrain.workers.data.bitmaps import Preprocessing as Preprocessing
    from geartrain.workers.live.publisher import Publisher as Publisher
    from geartrain.workers.models.trained_model import load_model as load_model
    from geartrain.workers.samples.files import CsvSamples as CsvSamples
    from geartrain.workers.samples.files import ParquetSamples as ParquetSamples
    from geartrain.workers.samples.files import TreeSamples as TreeSamples
    from geartrain.workers.samples.kafka.kafka_samples import KafkaSamples as KafkaSamples
    from geartrain.workers.samples.late_labels import LateLabels as LateLabels
    from geartrain.workers.samples.trees.compress import compress_samples as compress_samples

__version__ = "0.1.0"


_NAMES = {
    "ams.client.factory": "connect",
    "ams.programs.selection": "FullSoftmax PartialFC",
    "ams.values.admission.rules": "MinCount Probability",
    "ams.values.arrays": "fold_ids",
    "ams.values.config": "ClientConfig",
    "ams.values.expiry.rules": "Rule SmallerThan Unseen expiry_rule",
    "ams.values.optimizers.registry": "FTRL SGD Adagrad Adam AdamW Momentum RMSProp RowWiseAdagrad RowWiseAdam "
    "SparseMomentum",
    "ams.values.scheduler_messages": "RestoreOrder",
    "ams.values.specs": "Constant Normal Uniform",
    "ams.values.strings": "hash_strings",
    "bridge.checkpoint.loading": "load",
    "bridge.checkpoint.saving": "save",
    "bridge.collectives.scheduler_store": "init_process_group",
    "bridge.dense.dense_table": "attach",
    "bridge.embedding.field": "Field",
    "bridge.embedding.group": "Embedding EmbeddingGroup",
    "bridge.embedding.levels": "LevelLinear per_level",
    "bridge.embedding.modes": "SSP",
    "bridge.gear.config": "SlowGearConfig",
    "bridge.gear.slow_gear": "SlowGear",
    "bridge.head.class_head": "ClassHead",
    "bridge.head.loss.config": "HeadConfig",
    "bridge.head.loss.functional": "class_center_sample margin_cross_entropy",
    "bridge.head.loss.margins.adaface": "AdaFace",
    "bridge.head.loss.margins.angular": "ArcFace CombinedMargin CosFace SphereFace",
    "bridge.head.loss.margins.curricularface": "CurricularFace",
    "bridge.head.loss.margins.elasticface": "ElasticArcFace ElasticCosFace",
    "bridge.head.loss.margins.filtered": "FilteredMargin",
    "bridge.head.loss.margins.magface": "MagFace",
    "bridge.head.memory": "memory_report",
    "bridge.head.selection.knn_selection": "KNNSoftmax",
    "bridge.head.weights": "export_class_weights import_class_weights",
    "bridge.optim.fccs": "FCCS",
    "bridge.optim.lamb": "LAMB",
    "bridge.optim.lars": "LARS",
    "bridge.parallel.global_mean": "mean_over_ranks",
    "bridge.parallel.mesh": "mesh",
    "bridge.parallel.overlap.micro_batches": "MicroBatches",
    "bridge.parallel.overlap.trace": "trace_step",
    "bridge.parallel.parallelize": "parallelize",
    "bridge.parallel.plan.auto": "auto_plan",
    "bridge.parallel.plan.hardware": "Hardware",
    "bridge.parallel.scopes": "Replicate Split replicate split",
    "bridge.parallel.topk.hook": "TopKGradients",
    "bridge.pipeline.prefetch": "prefetch",
    "bridge.retrieval.item_tree": "ItemTree",
    "bridge.retrieval.tdm": "TDM",
    "bridge.rows.joint": "joint",
    "bridge.rows.optimizer": "RowOptimizer clip_grad_norm_",
    "bridge.rows.serialization": "state_from_bytes state_to_bytes",
    "launch.hosting": "local",
    "serving.http.app": "serve_app",
    "workers.data.bitmaps": "Preprocessing",
    "workers.live.publisher": "Publisher",
    "workers.models.trained_model": "load_model",
    "workers.samples.files": "CsvSamples ParquetSamples TreeSamples",
    "workers.samples.kafka.kafka_samples": "KafkaSamples",
    "workers.samples.late_labels": "LateLabels",
    "workers.samples.trees.compress": "compress_samples",
}
"""Module below geartrain -> its public names. Type checkers read the list above; a test compares the two."""
_HOMES = {name: f"geartrain.{module}" for module, names in _NAMES.items() for name in names.split()}
_SUBMODULES = {
    "errors": "geartrain.ams.values.errors",
    "models": "geartrain.models",
    "ops": "geartrain.ops",
    "ray": "geartrain.ray",
}
__all__ = sorted([*_HOMES, "errors", "__version__"])


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
    value: object
    if name in _SUBMODULES:
        value = importlib.import_module(_SUBMODULES[name])
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        import difflib

        known = sorted({*__all__, *_SUBMODULES})
        close = difflib.get_close_matches(name, known, 1)
        names = f"did you mean {close[0]!r}?" if close else f"its public names are {', '.join(known)}"
        raise AttributeError(f"module 'geartrain' has no attribute {name!r}; {names}")
    globals()[name] = value  # found once, then an ordinary attribute
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
