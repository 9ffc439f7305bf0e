"""Progress of long loads and exports: seen on a console, by one rank, and nowhere else."""

from __future__ import annotations

import io
import threading
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.world import write_hf
from titan_ckpt import progress
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.formats.dcp.dcp import DcpReader
from titan_ckpt.formats.dcp.writer import DcpExport
from titan_ckpt.formats.huggingface.reader import HuggingFaceReader
from titan_ckpt.geometry.chunks import Block, Chunk


def export_and_load(folder: Path) -> None:
    """Move 24 MB out and in."""
    write_hf(folder, {"w": torch.randn(2000, 3000)})
    with HuggingFaceReader(folder) as reader:
        reader.read([Block(Chunk.whole((2000, 3000)), torch.empty(2000, 3000), "w")])


def watch(monkeypatch: pytest.MonkeyPatch, *, terminal: bool, delay: float) -> io.StringIO:
    out = io.StringIO()
    monkeypatch.setattr(progress, "CONSOLE", Console(file=out, force_terminal=terminal, width=100))
    monkeypatch.setattr(progress, "DELAY_SECONDS", delay)
    return out


def test_f11_a_load_from_a_dcp_folder_has_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a load from any other format."""
    DcpExport({"w": torch.randn(2000, 3000)}).write(tmp_path / "out", Coordinator.current())
    out = watch(monkeypatch, terminal=True, delay=0.0)
    with DcpReader(tmp_path / "out") as reader:
        reader.whole("w")
    assert "loading out" in out.getvalue() and "24.0/24.0 MB" in out.getvalue()


def test_f11_a_console_shows_what_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export and a load each have a bar with their bytes, which is gone at the end."""
    out = watch(monkeypatch, terminal=True, delay=0.0)
    export_and_load(tmp_path / "out")
    assert "exporting out" in out.getvalue()
    assert "48.0 MB" in out.getvalue(), "written and read back"
    assert "loading out" in out.getvalue()
    assert out.getvalue().endswith("\x1b[2K"), "the last bar's line is cleared"


@pytest.mark.parametrize(("terminal", "delay"), [(False, 0.0), (True, 60.0)])
def test_f11_files_pipes_and_short_work_have_no_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool, delay: float
) -> None:
    """Not a byte is written."""
    out = watch(monkeypatch, terminal=terminal, delay=delay)
    export_and_load(tmp_path / "out")
    assert out.getvalue() == ""


def test_background_work_has_no_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The console is the training's own."""
    out = watch(monkeypatch, terminal=True, delay=0.0)
    thread = threading.Thread(target=export_and_load, args=(tmp_path / "out",))
    thread.start()
    thread.join()
    assert (tmp_path / "out").exists()
    assert out.getvalue() == ""
