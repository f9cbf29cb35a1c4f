"""What a user may import from ``geartrain``, and what importing it must not drag in."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import geartrain as gt

REPOSITORY = Path(__file__).resolve().parents[2]

MODULES = {"models", "ops", "ray"}
"""That are loaded with their names."""
PUBLIC_NAMES = {
    "connect",
    "local",
    "ClientConfig",
    "SGD",
    "Momentum",
    "SparseMomentum",
    "Adam",
    "AdamW",
    "Adagrad",
    "RowWiseAdagrad",
    "RowWiseAdam",
    "RMSProp",
    "FCCS",
    "FTRL",
    "LAMB",
    "LARS",
    "fold_ids",
    "hash_strings",
    "init_process_group",
    "Embedding",
    "EmbeddingGroup",
    "prefetch",
    "Field",
    "SSP",
    "Constant",
    "RestoreOrder",
    "Uniform",
    "Normal",
    "attach",
    "ClassHead",
    "HeadConfig",
    "RowOptimizer",
    "SlowGear",
    "SlowGearConfig",
    "FullSoftmax",
    "PartialFC",
    "MicroBatches",
    "mean_over_ranks",
    "MinCount",
    "Rule",
    "SmallerThan",
    "Unseen",
    "expiry_rule",
    "Probability",
    "KNNSoftmax",
    "ArcFace",
    "CosFace",
    "SphereFace",
    "CombinedMargin",
    "AdaFace",
    "CurricularFace",
    "ElasticArcFace",
    "ElasticCosFace",
    "FilteredMargin",
    "MagFace",
    "CsvSamples",
    "TreeSamples",
    "compress_samples",
    "KafkaSamples",
    "LateLabels",
    "LevelLinear",
    "per_level",
    "ParquetSamples",
    "class_center_sample",
    "clip_grad_norm_",
    "margin_cross_entropy",
    "memory_report",
    "ItemTree",
    "TDM",
    "import_class_weights",
    "joint",
    "mesh",
    "TopKGradients",
    "Replicate",
    "Split",
    "replicate",
    "split",
    "parallelize",
    "Hardware",
    "auto_plan",
    "export_class_weights",
    "save",
    "load",
    "load_model",
    "serve_app",
    "Publisher",
    "Preprocessing",
    "state_to_bytes",
    "trace_step",
    "state_from_bytes",
    "errors",
    "__version__",
}


def modules_after(code: str) -> set[str]:
    """Run ``code`` in a fresh interpreter and return the top-level modules it loaded."""
    report = "\nimport sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


def test_a_misspelt_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'ClasHead'; did you mean 'ClassHead'\?"):
        gt.ClasHead  # noqa: B018
    with pytest.raises(AttributeError, match="its public names are"):
        gt.xyzzy  # noqa: B018


def test_the_public_names_are_exactly_these() -> None:
    assert set(gt.__all__) == PUBLIC_NAMES


@pytest.mark.parametrize("name", sorted(PUBLIC_NAMES))
def test_every_public_name_exists_and_is_documented(name: str) -> None:
    value = getattr(gt, name)
    assert value.__doc__


def test_type_checkers_and_the_interpreter_see_the_same_names() -> None:
    tree = ast.parse((REPOSITORY / "geartrain" / "__init__.py").read_text(encoding="utf-8"))
    block = next(n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    for node in imports:
        assert node.module is not None
        for alias in node.names:
            expected = (
                importlib.import_module(f"{node.module}.{alias.name}")
                if alias.name in ("errors", *MODULES)
                else getattr(importlib.import_module(node.module), alias.name)
            )
            assert getattr(gt, alias.name) is expected
    assert {alias.name for node in imports for alias in node.names} == PUBLIC_NAMES - {"__version__"} | MODULES


def test_an_unknown_name_is_an_attribute_error_that_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"'ClassHed'.*ClassHead"):
        gt.ClassHed  # type: ignore[attr-defined]  # noqa: B018


def test_dir_offers_every_public_name() -> None:
    assert set(dir(gt)) >= PUBLIC_NAMES


def test_the_version_is_the_installed_one() -> None:
    assert gt.__version__ == importlib.metadata.version("geartrain")


def test_a_source_folder_that_is_not_installed_says_what_to_do(tmp_path: Path) -> None:
    """As in a checkout after ``pip install .``: the current folder comes before installed packages."""
    (tmp_path / "geartrain").mkdir()
    (tmp_path / "geartrain" / "__init__.py").write_bytes((REPOSITORY / "geartrain" / "__init__.py").read_bytes())
    without_installed = [sys.executable, "-S", "-c", "import geartrain"]
    done = subprocess.run(without_installed, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.splitlines()[-1].startswith(
        f"ImportError: {tmp_path / 'geartrain'} is Geartrain's source folder"
    )
    assert f"pip install -e {tmp_path}" in done.stderr


def test_importing_geartrain_loads_no_heavy_library() -> None:
    assert not modules_after("import geartrain") & {"torch", "grpc", "numpy", "pydantic", "google"}


def test_specs_and_errors_need_neither_torch_nor_grpc() -> None:
    code = "import geartrain as gt; gt.SGD(0.1); gt.errors.InvalidIds; gt.Normal()"
    assert not modules_after(code) & {"torch", "grpc"}


def test_roles_never_import_torch() -> None:
    code = """
import geartrain.ams.server.role, geartrain.ams.scheduler.service, geartrain.ams.client.factory
import geartrain.ams.values.config
import geartrain.cli.main, geartrain.cli.cluster.roles, geartrain.launch.up
"""
    assert "torch" not in modules_after(code)


def test_an_embedded_cluster_needs_no_torch() -> None:
    assert "torch" not in modules_after("import geartrain as gt\nwith gt.local(): pass")
