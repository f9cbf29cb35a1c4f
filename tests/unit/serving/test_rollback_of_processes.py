"""A change of several processes that serve the same models: all of them make it, or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from geartrain.ams.values.errors import ModelDamaged, NotServed
from geartrain.serving.batching import Batcher
from geartrain.serving.catalog import Catalog
from geartrain.serving.service import ModelService
from tests.support.fake_servable import EchoModel


def service_of(load: Callable[[Path], EchoModel]) -> ModelService:
    """Serves version 40; older ones can be loaded."""
    catalog = Catalog(load)
    for version in (10, 20, 30):
        catalog.know("glyphs", version, Path(str(version)))
    catalog.add("glyphs", EchoModel(40))
    return ModelService(catalog, Batcher(threads=0))


def versions(*services: ModelService) -> list[int]:
    return [service.catalog.state("glyphs")["current"] for service in services]


def test_a_rollback_that_one_process_cannot_make_is_made_by_none_and_damage_passed_over_by_all() -> None:
    damaged = {30}

    def load(folder: Path) -> EchoModel:
        if int(folder.name) in damaged:
            raise ModelDamaged(f"{folder} is damaged")
        return EchoModel(int(folder.name))

    whole, other = service_of(lambda folder: EchoModel(int(folder.name))), service_of(load)

    def everywhere(wish: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [whole.apply(wish), other.apply(wish)]

    whole.everywhere = everywhere
    with pytest.raises(NotServed, match="version 30 of 'glyphs' cannot be served"):
        whole.rollback("glyphs", 30)
    assert versions(whole, other) == [40, 40]
    assert not whole.catalog.state("glyphs")["held"]
    assert whole.rollback("glyphs") == 20
    assert versions(whole, other) == [20, 20]
    damaged |= {10, 20}
    with pytest.raises(NotServed, match="version 10 of 'glyphs' cannot be served"):
        whole.rollback("glyphs")
    assert versions(whole, other) == [20, 20]
