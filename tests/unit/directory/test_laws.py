"""The laws of step stores, on a disk and in memory; tests/stores has them for buckets."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

import tests.memory_store  # noqa: F401 - it names the scheme
from tests.steps_tests import StepsTests
from titan_ckpt.stores.bucket import open_location
from titan_ckpt.stores.store import Place


class TestFolder(StepsTests):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self._root = tmp_path

    def make_place(self) -> Path:
        return self._root / uuid.uuid4().hex


class TestMemory(StepsTests):
    def make_place(self) -> Place:
        return open_location(f"ram://box/{uuid.uuid4().hex}")
