"""Servers of buckets: each is started once, when the first test asks for it."""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.stores import servers
from tests.stores.servers import Server
from titan_ckpt.stores.bucket import Bucket
from titan_ckpt.stores.objects import BucketPath
from titan_ckpt.stores.store import StoreConfig, open_location

SECONDS = 5.0
"""How long a request is retried in tests."""


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in servers.CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    servers.require_installed()
    with servers.moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="session")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    servers.require_installed()
    with servers.azurite(tmp_path_factory.mktemp("azurite")) as server:
        yield server


@pytest.fixture(params=["s3", "azure"])
def server(request: pytest.FixtureRequest) -> Server:
    """Both stores that are as they should be."""
    value = request.getfixturevalue(request.param)
    assert isinstance(value, Server)
    return value


def place_in(server: Server, **settings: object) -> BucketPath:
    """Return a new, empty place in a server's bucket."""
    location = open_location(f"{server.url}/runs/{uuid.uuid4().hex[:8]}")
    assert isinstance(location, BucketPath)
    return _tuned(location, endpoint=server.endpoint, **{"retry_seconds": SECONDS, **settings})


def _tuned(place: BucketPath, **settings: object) -> BucketPath:
    """Return the same place, reached by these settings; concurrency and part_mib are the client's own."""
    own: dict[str, Any] = {name: settings.pop(name) for name in ("concurrency", "part_mib") if name in settings}
    config = StoreConfig(**settings)  # type: ignore[arg-type]
    bucket = Bucket(place.bucket.scheme, place.bucket.name, config)
    vars(bucket).update(own)
    return BucketPath(bucket, place.key)


@pytest.fixture
def place(server: Server) -> BucketPath:
    return place_in(server)


def through(place: BucketPath, proxy: servers.Proxy, **settings: object) -> BucketPath:
    """Return the same place, asked through the proxy."""
    return _tuned(place, endpoint=proxy.endpoint, **{"retry_seconds": 3.0, **settings})


@contextlib.contextmanager
def behind(server: Server, fault: servers.Fault, method: str, suffix: str, times: int = 1) -> Iterator[servers.Proxy]:
    """Break the first requests of a method to an object; `suffix`: a pattern of the end of its name."""
    left = times

    def decide(asked: str, path: str) -> servers.Fault:
        nonlocal left
        if asked == method and re.search(suffix + "$", path.partition("?")[0]) and left > 0:
            left -= 1
            return fault
        return None

    with servers.Proxy(server.endpoint, decide) as proxy:
        yield proxy


def flip_last_bit(place: BucketPath, key: str) -> None:
    """Put an object that differs in one bit in the place of another."""
    data = bytearray(place.bucket.read(key)[0])
    data[-1] ^= 1
    place.bucket.upload(key, iter([memoryview(data)]), 5 << 20)


def put_folder(place: BucketPath, folder: Path) -> None:
    """Upload every file below a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            key = (place / str(path.relative_to(folder))).key
            place.bucket.upload(key, iter([memoryview(path.read_bytes())]), 5 << 20)


def get_folder(place: BucketPath, folder: Path) -> Path:
    """Download every object below a place."""
    for facts in place.bucket.list_objects(place.key):
        path = folder / facts.key.removeprefix(f"{place.key}/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(place.bucket.read(facts.key)[0])
    return folder
