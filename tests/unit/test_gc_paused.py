"""The cyclic collector works while training does, and what is kept from it is known."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests import world
from tests.forked import answer
from titan_ckpt import ExportConfig
from titan_ckpt.disk.files import FileReader
from titan_ckpt.process import has_frozen


def test_the_collector_works_while_a_background_export_is_proved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export that is made while training waits may pause it; it is on again after that."""
    seen: dict[bool, set[bool]] = {}
    read_blocks = FileReader.read_blocks

    def look(file: FileReader, *args: Any) -> None:
        seen.setdefault(waits, set()).add(gc.isenabled())
        read_blocks(file, *args)

    monkeypatch.setattr(FileReader, "read_blocks", look)
    with world.manager(tmp_path, nn.Linear(2, 2), export=(ExportConfig("dcp", interval=1),)) as manager:
        waits = False
        manager.save(1)
        manager.wait()
        waits = True
        manager.save(2, last_step=True)
    assert seen[False] == {True}
    assert gc.isenabled()


def test_a_process_tells_what_it_freezes_itself_from_what_it_began_with() -> None:
    """A load gives the collector all imports back, to find wrappers among them, only if something was frozen since."""

    def found() -> list[bool]:
        before = has_frozen()
        gc.freeze()
        return [before, has_frozen()]

    assert answer(found) == ([False, True], 0)
