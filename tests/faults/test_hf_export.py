"""An export killed, or failed, at every change it makes to the file system: no folder, or a proved one."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.faults.scenarios import kill_at, quick_folder
from tests.faults.shim import FailAt, Moment, count_operations, intercepted
from tests.world import contents, llama, names_in, write_hf
from titan_ckpt.disk.unpublished_folder import StagedFolder
from titan_ckpt.errors import ExportError
from titan_ckpt.models.llama3 import FLAVORS

CONFIG = replace(FLAVORS["debug-0.5m"], vocab_size=64, num_layers=1, dim=32, num_heads=2, num_kv_heads=1, head_dim=16,
                 ffn_dim=32, max_seq_len=16)  # fmt: skip


MOMENTS: tuple[Moment, ...] = ("before", "half", "after")


def export(root: Path) -> None:
    """Export one small model, in two files, with a tokenizer, to root/exports/step-1."""
    assets = root / "assets"
    assets.mkdir(exist_ok=True)
    (assets / "tokenizer.json").write_text("{}")
    model = llama(CONFIG)
    about = {"config": model.hf_config(), "assets": assets, "max_shard_bytes": 16_000}
    write_hf(root / "exports" / "step-1", model.state_dict(), model.key_map(), **about)


@pytest.fixture(scope="module")
def complete() -> dict[str, bytes]:
    """Return the content of an export that nothing disturbed."""
    with quick_folder() as root:
        export(root)
        return contents(root / "exports" / "step-1")


def test_a_kill_leaves_no_folder_or_a_proved_one(complete: dict[str, bytes]) -> None:
    """Killed before, in the middle of, and after every operation; and the next export cleans up and succeeds."""
    with quick_folder() as root:
        names = count_operations(lambda: export(root))
    assert names.count("rename_noreplace") == 1
    assert names.count("open_exclusive") == 1 + len(complete)
    published = set()
    for ordinal, name in enumerate(names):
        for moment in MOMENTS if name == "pwrite_all" else MOMENTS[::2]:
            with quick_folder() as root:
                kill_at(ordinal, partial(export, root), moment)
                target = root / "exports" / "step-1"
                published.add(target.exists())
                if target.exists():
                    assert contents(target) == complete, (ordinal, name, moment)
                    target.rename(root / "exports" / "done")
                export(root)
                assert contents(target) == complete
                assert set(names_in(root / "exports")) <= {"done", "step-1"}, (ordinal, name, moment)
    assert published == {False, True}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failed_operation_is_one_error_and_leaves_nothing(complete: dict[str, bytes], code: int) -> None:
    """A full disk or a failing one at any operation: an ExportError with the cause, or a whole export; no rests."""
    with quick_folder() as root:
        names = count_operations(lambda: export(root))
    failed = 0
    for ordinal, name in enumerate(names):
        with quick_folder() as root:
            fault = FailAt(ordinal=ordinal, errno=code)
            raised: ExportError | None = None
            try:
                with intercepted(fault):
                    export(root)
            except ExportError as error:
                raised = error
            if raised is not None:
                failed += 1
                assert os.strerror(code) in str(raised), (ordinal, name)
                assert not (root / "exports" / "step-1").exists(), (ordinal, name)
                assert names_in(root / "exports") == [], (ordinal, name)
            else:
                assert contents(root / "exports" / "step-1") == complete, (ordinal, name)
            assert fault.hits == 1, (ordinal, name)
    assert failed >= len(names) - 3, "only letting go of the lock may fail unnoticed"


def test_a_kill_while_an_expired_export_is_removed_leaves_it_whole_or_gone(complete: dict[str, bytes]) -> None:
    """At every operation: the folder has all its files or no name, and the next export removes what is left of it."""
    with quick_folder() as root:
        export(root)
        target = root / "exports" / "step-1"
        names = count_operations(lambda: StagedFolder.discard(target))
        assert names_in(root / "exports") == []
    assert names.count("unlink") == 1 + len(complete)
    for ordinal, name in enumerate(names):
        for moment in MOMENTS[::2]:
            with quick_folder() as root:
                export(root)
                target = root / "exports" / "step-1"
                kill_at(ordinal, partial(StagedFolder.discard, target), moment)
                if target.exists():
                    assert contents(target) == complete, (ordinal, name, moment)
                    target.rename(root / "exports" / "kept")
                export(root)
                assert set(names_in(root / "exports")) <= {"kept", "step-1"}, (ordinal, name, moment)
