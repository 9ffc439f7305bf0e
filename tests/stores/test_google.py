"""Checkpoints at gs://, as far as they can be tried without Google: moto behind a translator of Google's conditions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stores.conftest import place_in
from tests.stores.export_runs import CONFIG
from tests.stores.servers import GoogleProxy, Server
from tests.stores.test_exports_in_bucket import export, names
from tests.stores.test_manager_in_bucket import manager
from tests.test_manager import Run
from tests.world import load, same
from titan_ckpt.config import KeepConfig
from titan_ckpt.directory.bucket_steps import BucketSteps, probe
from titan_ckpt.errors import CommitConflictError
from titan_ckpt.models.llama3 import Llama3
from titan_ckpt.stores.objects import BucketPath


@pytest.fixture
def place(s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketPath]:
    with GoogleProxy(s3) as proxy:
        (tmp_path / "account.json").write_text(proxy.account)
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "account.json"))
        yield place_in(Server("gs://box", proxy.endpoint))


def test_objects_are_created_once_replaced_by_generation_and_uploaded_in_parts(place: BucketPath) -> None:
    """The probe accepts it; nothing of the probe stays."""
    probe(place)
    bucket, key = place.bucket, (place / "a").key
    bucket.create(key, b"first")
    with pytest.raises(FileExistsError):
        bucket.create(key, b"second")
    _, version = bucket.read(key)
    assert "version" in version
    bucket.replace(key, b"third", version)
    with pytest.raises(FileExistsError):
        bucket.replace(key, b"fourth", version)
    data = bytes(range(256)) * (6 << 12)
    bucket.upload((place / "b").key, iter([memoryview(data)[: 5 << 20], memoryview(data)[5 << 20 :]]), 5 << 20)
    assert bucket.read_range((place / "b").key, 100, len(data)) == data[100:]
    assert [(f.key, f.num_bytes) for f in bucket.list_objects(place.key)] == [(key, 5), (f"{place.key}/b", len(data))]
    bucket.delete([key, f"{place.key}/b"])
    assert bucket.list_objects(place.key) == []


def test_a_run_saves_expires_resumes_and_exports(place: BucketPath, tmp_path: Path) -> None:
    """Bit for bit; a commit is read once; a second writer is told."""
    run = Run()
    with manager(run, place / "run", tmp_path, interval=1, keep=KeepConfig(latest=2)) as saves:
        run.train(saves, 3)
        saves.wait()
        with pytest.raises(CommitConflictError, match="already writes here"):
            BucketSteps(place / "run").open()
    again = Run(seed=1)
    assert load(manager(again, place / "run", tmp_path, interval=1)).step == 3
    assert same(again.state(), run.state())
    assert [step.step for step in BucketSteps(place / "run").survey().steps] == [2, 3]
    made = export(Llama3(CONFIG), place / "exports", tmp_path)
    assert "config.json" in names(made)
