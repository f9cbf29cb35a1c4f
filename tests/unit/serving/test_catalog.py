"""Swap, rollback, canary: which version answers, and when one is closed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geartrain.ams.values.errors import Busy, ConfigError, InvalidArgument, ModelDamaged, NotServed
from geartrain.serving.catalog import Catalog, Lease
from tests.support.fake_servable import EchoModel


def catalog_of(*versions: int) -> tuple[Catalog, dict[int, EchoModel]]:
    models = {version: EchoModel(version) for version in versions}
    catalog = Catalog()
    for model in models.values():
        catalog.add("glyphs", model)
    return catalog, models


def current(catalog: Catalog) -> int:
    with catalog.lease("glyphs") as lease:
        return lease.servable.version


def test_a_newer_version_answers_from_the_next_question_on_and_the_one_before_stays_for_a_rollback() -> None:
    catalog, models = catalog_of(10)
    before = catalog.lease("glyphs")
    assert catalog.add("glyphs", new := EchoModel(20))
    assert (before.servable.version, current(catalog)) == (10, 20)
    assert catalog.rollback("glyphs") == 10
    assert current(catalog) == 10
    assert not models[10].is_closed
    assert not new.is_closed


def test_a_version_is_closed_once_the_last_who_asks_it_is_answered() -> None:
    catalog, models = catalog_of(10)
    with catalog.lease("glyphs") as lease:
        longer = lease.again()
        for version in (20, 30):
            catalog.add("glyphs", EchoModel(version))
        assert not models[10].is_closed
    assert not models[10].is_closed
    longer.release()
    longer.release()  # is once
    assert models[10].is_closed


def test_after_a_rollback_newer_versions_wait_until_it_is_taken_back(tmp_path: Path) -> None:
    loaded: list[EchoModel] = []

    def load(folder: Path) -> EchoModel:
        loaded.append(EchoModel(int(folder.name)))
        return loaded[-1]

    catalog = Catalog(load)
    for version in (10, 20):
        catalog.add("glyphs", EchoModel(version), tmp_path / str(version))
    assert catalog.rollback("glyphs") == 10
    waits = EchoModel(30)
    assert not catalog.add("glyphs", waits, tmp_path / "30")
    assert (current(catalog), waits.is_closed, catalog.state("glyphs")["versions"]) == (10, True, [10, 20, 30])
    assert catalog.rollback("glyphs", 30) == 30
    assert [model.version for model in loaded] == [30]
    assert catalog.add("glyphs", EchoModel(40), tmp_path / "40")
    assert current(catalog) == 40


def test_a_rollback_that_fails_changes_nothing(tmp_path: Path) -> None:
    def load(_: Path) -> EchoModel:
        raise ConfigError("it is damaged")

    catalog = Catalog(load)
    catalog.add("glyphs", EchoModel(20))
    with pytest.raises(NotServed, match="no version of 'glyphs' before 20"):
        catalog.rollback("glyphs")
    catalog.know("glyphs", 10, tmp_path / "10")
    with pytest.raises(NotServed, match=r"version 10 of 'glyphs' cannot be served: .* is gone; bring it back"):
        catalog.rollback("glyphs")
    (tmp_path / "10").mkdir()
    with pytest.raises(NotServed, match="version 10 of 'glyphs' cannot be served: it is damaged"):
        catalog.rollback("glyphs")
    assert (current(catalog), catalog.state("glyphs")["held"]) == (20, False)
    with pytest.raises(NotServed, match="no version 15 of 'glyphs'; there is 10, 20"):
        catalog.rollback("glyphs", 15)
    other = Catalog(lambda _: EchoModel(11))
    other.add("glyphs", EchoModel(20))
    other.know("glyphs", 10, tmp_path)
    with pytest.raises(NotServed, match=r"version 10 of 'glyphs' cannot be served: .* holds 11 now"):
        other.rollback("glyphs")


def test_a_rollback_to_no_named_version_steps_over_those_that_are_damaged(tmp_path: Path) -> None:
    def load(folder: Path) -> EchoModel:
        if folder.name != "10":
            raise ModelDamaged(f"{folder} is damaged")
        return EchoModel(10)

    catalog = Catalog(load)
    catalog.add("glyphs", EchoModel(40))
    for version in (10, 20, 30):
        catalog.know("glyphs", version, tmp_path / str(version))
    assert catalog.rollback("glyphs") == current(catalog) == 10
    with pytest.raises(NotServed, match="no version of 'glyphs' before 10"):
        catalog.rollback("glyphs")


def test_before_the_first_version_a_change_is_told_to_wait() -> None:
    catalog = Catalog()
    catalog.expect("glyphs")
    for change in (lambda: catalog.rollback("glyphs"), lambda: catalog.set_canary("glyphs", None, 0.1)):
        with pytest.raises(Busy, match="'glyphs' has no version yet"):
            change()


def test_a_version_of_another_kind_is_refused(tmp_path: Path) -> None:
    other = EchoModel(30)
    other.kind = "tree"
    catalog = Catalog(lambda _: other)
    catalog.add("glyphs", EchoModel(20))
    with pytest.raises(InvalidArgument, match="of kind tree, and the current one is of kind echo"):
        catalog.add("glyphs", other, share=0.1)
    catalog.know("glyphs", 30, tmp_path)
    with pytest.raises(InvalidArgument, match="serve it as a model of its own"):
        catalog.rollback("glyphs", 30)
    assert (current(catalog), catalog.state("glyphs")["canary"], other.is_closed) == (20, None, True)


@given(share=st.floats(0, 1), asked=st.integers(1, 300))
def test_a_canary_gets_its_share(share: float, asked: int) -> None:
    catalog, _ = catalog_of(10)
    catalog.add("glyphs", EchoModel(20), share=share)
    got = 0
    for _ in range(asked):
        with catalog.lease("glyphs") as lease:
            assert lease.is_canary == (lease.servable.version == 20)
            got += lease.is_canary
    assert abs(got - share * asked) < 1 + 1e-6


def test_a_canary_becomes_current_by_a_rollback_to_it_or_goes() -> None:
    catalog, _ = catalog_of(10)
    canary = EchoModel(20)
    catalog.add("glyphs", canary, share=0.5)
    with pytest.raises(InvalidArgument, match="name another as the canary"):
        catalog.set_canary("glyphs", 10, 0.5)
    with pytest.raises(InvalidArgument, match="share is 2; it must be a part"):
        catalog.set_canary("glyphs", 20, 2)
    with pytest.raises(InvalidArgument, match="share is 'x'"):
        catalog.set_canary("glyphs", 20, "x")  # type: ignore[arg-type]
    catalog.rollback("glyphs", 20)
    assert (current(catalog), catalog.state("glyphs")["canary"]) == (20, None)
    catalog.set_canary("glyphs", 10, 1)
    assert current(catalog) == 10
    catalog.set_canary("glyphs", None, 0)
    assert current(catalog) == 20


def test_a_canary_of_a_lower_number_becomes_current_and_what_is_said_of_numbers_is_true(
    caplog: pytest.LogCaptureFixture,
) -> None:
    catalog, _ = catalog_of(400)
    catalog.add("glyphs", EchoModel(180), share=0.5)  # of another run
    with caplog.at_level("INFO"):
        assert catalog.rollback("glyphs", 180) == 180
    assert "version 180 is current; higher numbers wait" in caplog.text
    with pytest.raises(NotServed, match=r"before 180: .* lower numbers, .* name another of 180, 400"):
        catalog.rollback("glyphs")
    assert catalog.rollback("glyphs", 400) == 400


def test_unknown_names_are_answered_with_those_there_are() -> None:
    catalog, _ = catalog_of(10)
    with pytest.raises(InvalidArgument, match="version 10 of 'glyphs' is served already"):
        catalog.add("glyphs", EchoModel(10))
    assert catalog.lease().model == "glyphs"
    catalog.add("faces", EchoModel(1))
    with pytest.raises(NotServed, match="name a model: glyphs, faces"):
        catalog.lease()
    with pytest.raises(NotServed, match="no model 'clicks'; there is glyphs, faces"):
        catalog.lease("clicks")
    with pytest.raises(NotServed, match="version 11 of 'glyphs' is not served; served are 10"):
        catalog.lease("glyphs", 11)
    with (
        catalog.lease("glyphs", 10) as lease,
        pytest.raises(NotServed, match="no operation 'embed'; it has echo, show"),
    ):
        lease.operation("embed")
    assert catalog.unready_reason() == ""
    catalog.know("clicks", 3, Path("there"))
    assert "no version of clicks yet" in catalog.unready_reason()
    catalog, _ = catalog_of(10)
    catalog.expect("glyphs")  # other processes have no version
    assert "no version of glyphs yet" in catalog.unready_reason()
    catalog.open("glyphs")
    assert catalog.unready_reason() == ""


def test_a_close_waits_for_those_who_ask() -> None:
    catalog, models = catalog_of(10, 20)
    lease = catalog.lease("glyphs")
    catalog.close()
    assert (models[10].is_closed, models[20].is_closed) == (True, False)
    lease.release()
    assert models[20].is_closed
    with pytest.raises(Busy, match="has no version yet"):
        catalog.lease("glyphs")


@given(
    st.lists(st.tuples(st.sampled_from(["add", "lease", "again", "release", "rollback", "canary"]), st.integers(0, 9)))
)
def test_whatever_happens_no_version_is_closed_under_who_asks_it_or_forgotten(steps: list[tuple[str, int]]) -> None:
    catalog, made = Catalog(), [EchoModel(100)]
    catalog.add("glyphs", made[0])
    leases: list[Lease] = []
    for step, number in steps:
        try:
            if step == "add":
                made.append(EchoModel(100 + len(made)))
                catalog.add("glyphs", made[-1], share=0.5 if number == 0 else None)
            elif step == "lease":
                leases.append(catalog.lease("glyphs", None if number % 2 else 100 + number))
            elif step == "again" and leases:
                leases.append(leases[number % len(leases)].again())
            elif step == "release" and leases:
                leases.pop(number % len(leases)).release()
            elif step == "rollback":
                catalog.rollback("glyphs", None if number % 2 else 100 + number)
            elif step == "canary":
                catalog.set_canary("glyphs", 100 + number, number / 9)
        except (NotServed, InvalidArgument):
            pass
        assert not any(lease.servable.is_closed for lease in leases)  # type: ignore[attr-defined]
        loaded = {entry["version"] for entry in catalog.state("glyphs")["loaded"]}
        held = {lease.servable.version for lease in leases}
        assert {model.version for model in made if not model.is_closed} == loaded | held
        assert len(loaded) <= 3
    for lease in leases:
        lease.release()
    catalog.close()
    assert all(model.is_closed for model in made)
