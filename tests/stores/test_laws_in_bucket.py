"""The laws of stores, for buckets of S3 and Azure."""

from __future__ import annotations

import pytest

from tests.stores.conftest import place_in
from tests.stores.servers import Server
from titan_ckpt.stores.store import Place
from titan_ckpt.testing import StoreTests


class TestBucket(StoreTests):
    @pytest.fixture(autouse=True)
    def _server(self, server: Server) -> None:
        self._started = server

    def make_place(self) -> Place:
        return place_in(self._started)
