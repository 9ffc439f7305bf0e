"""The laws of stores and of step stores, for buckets of S3 and Azure."""

from __future__ import annotations

import pytest

from tests.steps_tests import StepsTests
from tests.stores.conftest import place_in
from tests.stores.servers import Server
from titan_ckpt.stores.store import Place
from titan_ckpt.testing import StoreTests


class InBucket:
    @pytest.fixture(autouse=True)
    def _server(self, server: Server) -> None:
        self._started = server

    def make_place(self) -> Place:
        return place_in(self._started)


class TestBucket(InBucket, StoreTests):
    pass


class TestSteps(InBucket, StepsTests):
    pass
