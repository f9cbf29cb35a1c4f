"""A follower: what is served is of one moment, and stays when what comes next cannot be had."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.ams.observe import failpoints
from geartrain.ams.storage.snapshot.folder import list_snapshots, open_snapshot
from geartrain.ams.values.errors import SnapshotFailed
from geartrain.serving.answers import Question
from geartrain.serving.folder import load_folder
from geartrain.serving.live import versions
from geartrain.serving.live.follow import Follower
from geartrain.serving.live.training import training_of
from geartrain.serving.live.versions import LiveVersions
from geartrain.serving.metrics import following_metrics
from geartrain.workers.data.bitmaps import Preprocessing
from geartrain.workers.live.publisher import Publisher

LOOK = Preprocessing(kind="photo", size=16, channels=1)
D = 8


def nearest(model: Any, features: Any, k: int) -> Any:
    """The answer of the operation of this name."""
    return model.operations["nearest"].run(Question(arrays={"features": features}, parameters=(("k", k),)))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, D)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.layer(images.float().div(255).flatten(1))
        return features


class Trained:
    """A head and a backbone that are published, and who follows them."""

    def __init__(self, cluster: Any, folder: Path, *, rows: str = "pull", sub_centers: int = 1) -> None:
        torch.manual_seed(0)
        self.backbone = Network()
        self.head = gt.ClassHead(
            cluster,
            "people",
            num_classes=30,
            num_live_classes=10,
            dim=D,
            margin=gt.ArcFace(),
            sub_centers=sub_centers,
            rows=rows,
        )
        self.folder = folder / "live"
        self.begin()
        self.optimizer = gt.joint(torch.optim.SGD(self.backbone.parameters(), lr=0.1), self.head)
        self.now = 0.0
        self.held_at: int | None = None
        self.served: list[Any] = []
        (folder / "out").mkdir()
        self.versions = LiveVersions(folder / "out", keep=2)
        self.follower = Follower(
            training_of(str(folder / "live")),
            self.versions,
            lambda version: self.served.append(load_folder(version.folder)),
            held_at=lambda: self.held_at,
            clock=lambda: self.now,
        )

    def begin(self) -> None:
        """Publish from here on as a process does that has begun again."""
        self.publisher = Publisher(
            self.backbone, self.head, self.folder, preprocessing=LOOK, class_names={0: "null"}, increments=2, keep=2
        )

    def step(self, number: int) -> None:
        images = torch.randint(0, 256, (8, 1, 16, 16), dtype=torch.uint8)
        labels = torch.tensor([1, 2, 4, 5, 6, 7, 8, 9])
        self.head(self.backbone(images), labels).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.publisher.publish(number, wait=True)

    def require_same_answers(self) -> None:
        images = torch.randint(0, 256, (6, 1, 16, 16), dtype=torch.uint8)
        self.backbone.eval()
        with torch.no_grad():
            scores, ids = self.head.predict(self.backbone(images), 5)
        self.backbone.train()
        model = self.served[-1]
        found = nearest(model, model.features({"images": images.numpy()}), 5)
        np.testing.assert_array_equal(found["ids"], ids.numpy())
        np.testing.assert_allclose(found["scores"], scores.numpy(), rtol=1e-4, atol=1e-6)


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[Trained]:
    pytest.importorskip("onnxruntime", reason="needs pip install 'geartrain[serve]'")
    with gt.local(num_shards=2) as cluster:
        yield Trained(cluster, tmp_path)


def test_a_publisher_whose_last_version_was_not_written_says_so_at_its_end(trained: Trained) -> None:
    trained.publisher.publish(1, wait=True)
    with failpoints.armed("manifest.write.before=error(ENOSPC)@1"):
        trained.publisher.publish(2)
        with pytest.raises(SnapshotFailed, match=r"No snapshot of step 2.*No space left"):
            trained.publisher.close()
    trained.publisher.publish(3)
    trained.publisher.close()


def test_each_snapshot_becomes_the_version_that_answers_as_the_training_does(trained: Trained) -> None:
    assert not trained.follower.poll()
    assert trained.follower.facts["state"] == "waiting"
    for step in (3, 7, 8, 12):  # whole, and two that add to it; then whole again
        trained.step(step)
        assert trained.follower.poll()
        assert not trained.follower.poll()
        assert trained.served[-1].version == step
        trained.require_same_answers()
    assert trained.versions.prune() == [3, 7]
    assert [version.step for version in trained.versions.written()] == [12, 8]
    assert trained.follower.facts["versions"] == 4


@pytest.mark.parametrize(("rows", "sub_centers"), [("ranks", 1), ("pull", 2)])
def test_rows_on_ranks_and_several_centers_a_class_are_followed(tmp_path: Path, rows: str, sub_centers: int) -> None:
    pytest.importorskip("onnxruntime", reason="needs pip install 'geartrain[serve]'")
    with gt.local() as cluster:
        trained = Trained(cluster if rows == "pull" else None, tmp_path, rows=rows, sub_centers=sub_centers)
        for step in (1, 2):
            trained.step(step)
            assert trained.follower.poll()
            trained.require_same_answers()


def test_rows_on_ranks_that_begin_again_at_an_earlier_step_are_served_and_kept(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs pip install 'geartrain[serve]'")
    trained = Trained(None, tmp_path, rows="ranks")
    for step in (80, 90, 100):
        trained.step(step)
    assert trained.follower.poll()
    trained.begin()
    for number, step in ((101, 50), (102, 100), (103, 60)):  # there is a snapshot of step 100 already
        trained.step(step)
        assert trained.follower.poll()
        assert (trained.served[-1].version, trained.follower.facts["step"]) == (number, step)
        trained.require_same_answers()
    assert [listed.name for listed in list_snapshots(trained.folder)] == ["step-000000060", "step-000000100-2"]


def test_newcomers_can_be_asked_for_and_the_retired_are_never_answered(trained: Trained) -> None:
    trained.step(1)
    trained.follower.poll()
    assert 3 in nearest(trained.served[-1], np.eye(D, dtype=np.float32), 10)["ids"]
    (newcomer,) = trained.head.add_classes(1, rows=torch.eye(D)[:1]).tolist()
    trained.head.retire_classes(torch.tensor([3]))
    trained.publisher.class_names = {newcomer: "newcomer"}
    trained.publisher.publish(2, wait=True)
    trained.follower.poll()
    found = nearest(trained.served[-1], np.eye(D, dtype=np.float32), 10)
    assert newcomer == 10
    assert found["ids"][0, 0] == newcomer
    assert found["classes"][0, 0] == "newcomer"
    assert found["scores"][0, 0] == pytest.approx(1, abs=1e-6)
    assert not (found["ids"] == 3).any()
    assert trained.served[-1].num_classes == 10
    trained.step(3)
    trained.follower.poll()
    trained.require_same_answers()


def test_a_damaged_snapshot_is_passed_over_until_the_next_whole_one(trained: Trained, tmp_path: Path) -> None:
    trained.step(1)
    trained.follower.poll()
    trained.step(2)
    newest = tmp_path / "live" / "step-000000002"
    block = next(path for path in newest.iterdir() if path.name.startswith("rows-"))
    content = block.read_bytes()
    block.write_bytes(content[:-1])
    assert not trained.follower.poll()
    trained.now += 4
    facts = trained.follower.facts
    assert (facts["state"], facts["step"], facts["steps_behind"], facts["seconds_behind"]) == ("failing", 1, 1, 4.0)
    assert block.name in facts["error"]
    assert [model.version for model in trained.served] == [1]
    block.write_bytes(content)
    assert trained.follower.poll()
    assert trained.follower.facts["seconds_behind"] == 0
    (newest / "manifest.json").write_bytes(b"{}")
    trained.step(3)
    assert trained.follower.poll()
    trained.require_same_answers()


def test_a_full_disk_leaves_what_is_served(trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained.step(1)
    trained.follower.poll()
    trained.step(2)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(versions, "write_arrays", full)
        assert not trained.follower.poll()
    assert "No space left on device; free room, or name another" in trained.follower.facts["error"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["000000001"]
    assert trained.follower.poll()
    trained.require_same_answers()


def test_after_a_rollback_nothing_newer_is_served_and_it_says_how_far_behind_it_is(trained: Trained) -> None:
    for step in (1, 2):
        trained.step(step)
        trained.follower.poll()
    trained.held_at = 1
    trained.follower.poll()
    trained.now += 3
    trained.step(5)
    assert not trained.follower.poll()
    facts = trained.follower.facts
    assert (facts["state"], facts["step"], facts["seconds_behind"], facts["steps_behind"]) == ("held", 1, 3.0, 4)
    trained.held_at = None
    assert trained.follower.poll()
    assert trained.served[-1].version == 5
    assert trained.follower.facts["seconds_behind"] == 0


def test_a_snapshot_that_comes_while_a_version_is_written_waits_since_then(trained: Trained) -> None:
    trained.step(1)
    trained.follower.poll()
    trained.step(2)
    write = trained.versions.write

    def slowly(*arguments: Any) -> Any:
        version = write(*arguments)
        trained.now += 20
        trained.versions.write = write  # type: ignore[method-assign]
        trained.step(3)
        return version

    trained.versions.write = slowly  # type: ignore[method-assign]
    assert trained.follower.poll()
    trained.held_at = 2  # nobody takes it yet
    trained.follower.poll()
    assert trained.follower.facts["seconds_behind"] == 20


def test_a_training_that_went_back_is_served_under_higher_numbers(trained: Trained, tmp_path: Path) -> None:
    versions_of = LiveVersions(tmp_path / "out")
    trained.step(9)
    first = versions_of.write(open_snapshot(tmp_path / "live" / "step-000000009"))
    trained.publisher.publish(4, wait=True)
    second = versions_of.write(open_snapshot(tmp_path / "live" / "step-000000004"))
    assert [(found.version, found.step) for found in (first, second)] == [(9, 9), (10, 4)]


def test_what_holds_no_classifier_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "out").mkdir()
    with gt.local() as cluster:
        cluster.create_table("t", dim=2, optimizer=gt.SGD(0.1))
        cluster.snapshot(tmp_path / "live", step=1).result()
    follower = Follower(training_of(str(tmp_path / "live")), LiveVersions(tmp_path / "out"), print)
    assert not follower.poll()
    assert "holds no classifier" in follower.facts["error"]
    assert "no version is served yet" in caplog.text


def test_counters_are_those_of_the_facts(trained: Trained) -> None:
    trained.step(1)
    trained.follower.poll()
    told = following_metrics({"people": trained.follower.facts, "faces": {}})
    found = {metric.name: metric.samples for metric in told}
    assert found["serve_follow_versions_total"] == [(("people",), 1.0)]
    assert found["serve_follow_seconds_behind"] == [(("people",), 0.0)]
    page = (Path(__file__).resolve().parents[4] / "docs/explanation/metrics.md").read_text(encoding="utf-8")
    assert not [name for name in found if f"`geartrain_{name}`" not in page]  # which alerts are written from
