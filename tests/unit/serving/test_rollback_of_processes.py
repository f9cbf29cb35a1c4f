"""A change of several processes that serve the same models: all of them make it, or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from geartrain.ams.values.errors import ModelDamaged, NotServed
from geartrain.serving.batching import Batcher
from geartrain.serving.catalog import Catalog
from geartrain.serving.service import ModelService, all_or_none
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


def together(*services: ModelService) -> Callable[[Mapping[str, Any]], list[dict[str, Any]]]:
    """As the process does that the others are told by."""

    def everywhere(wish: Mapping[str, Any]) -> list[dict[str, Any]]:
        before = services[0].apply({"wish": "state"})["said"]
        return all_or_none(lambda step: [service.apply(step) for service in services], wish, before)

    return everywhere


def test_a_rollback_that_one_process_cannot_make_is_made_by_none_and_damage_passed_over_by_all() -> None:
    damaged = {30}

    def load(folder: Path) -> EchoModel:
        if int(folder.name) in damaged:
            raise ModelDamaged(f"{folder} is damaged")
        return EchoModel(int(folder.name))

    whole, other = service_of(lambda folder: EchoModel(int(folder.name))), service_of(load)

    whole.everywhere = together(whole, other)
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


def test_a_rollback_that_fails_undoes_no_version_that_came_meanwhile() -> None:
    services = [service_of(lambda folder: EchoModel(int(folder.name))) for _ in range(2)]
    everywhere = together(*services)

    def later(wish: Mapping[str, Any]) -> list[dict[str, Any]]:
        if wish["wish"] == "rollback":
            for service in services:  # that of a follower
                service.catalog.add("glyphs", EchoModel(50), Path("50"))
        return everywhere(wish)

    services[0].everywhere = later
    with pytest.raises(NotServed, match="no version 7 of 'glyphs'"):
        services[0].rollback("glyphs", 7)
    assert versions(*services) == [50, 50]


def test_a_change_that_is_undone_leaves_nothing_loaded_or_known() -> None:
    made: list[EchoModel] = []

    def load(folder: Path) -> EchoModel:
        made.append(EchoModel(int(folder.name)))
        return made[-1]

    def fails(_: Path) -> EchoModel:
        raise ModelDamaged("it is damaged")

    services = [service_of(load), service_of(fails)]
    services[0].everywhere = together(*services)
    before = [service.catalog.state("glyphs") for service in services]
    for wish in ({"wish": "canary", "version": 30, "share": 0.5}, {"wish": "rollback", "to": 20}):
        said = services[0].everywhere({"model": "glyphs", **wish})
        assert ["error" in answer for answer in said] == [False, True]
        assert [service.catalog.state("glyphs") for service in services] == before
    assert [model.is_closed for model in made] == [True, True]
