"""Are these the same weights? Logical digests answer alike for every format and sharding of one checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.distributed.layouts import LAYOUTS, zeroed
from tests.distributed.test_hf_parallel import columns, export, fsdp, model, single
from tests.distributed.test_native_resharding import save
from tests.world import fill
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.geometry.chunks import blocks_of, local_tensor
from titan_ckpt.geometry.keymap import KeyMap
from titan_ckpt.testing import distributed
from titan_ckpt.types import StateDict
from titan_ckpt.weights.digest import logical_digests


def digests_in(folder: Path, state: StateDict, names: KeyMap | None = None) -> dict[str, str]:
    """Read all of a checkpoint into these tensors, whatever they held, and digest them on all ranks together."""
    for value in state.values():
        local_tensor(value).detach().zero_()
    form = "native" if folder.name.endswith("native") else None  # whose rank files lie there without a manifest
    report = fill(state, folder, names, form=form)
    assert not report.unexpected and set(report.loaded) == set(state)
    return logical_digests(state, Coordinator.current(60.0))


def one_model_in_every_format(root: Path) -> None:
    layouts: list[Callable[[], StateDict]] = [fsdp, columns, single]
    expected = logical_digests(single(), Coordinator(0, 1, None, "", 60.0))
    for saved, loaded in zip(layouts, [*layouts[1:], layouts[0]], strict=True):
        state = saved()
        assert logical_digests(state, Coordinator.current(60.0)) == expected, saved.__name__
        native, torchs, hf = (root / f"{saved.__name__}-{kind}" for kind in ("native", "dcp", "hf"))
        save(native, state)
        dcp.save(dict(state), checkpoint_id=torchs)
        export(state, hf, Coordinator.current(60.0))
        assert digests_in(native, loaded()) == expected, (native, loaded.__name__)
        assert digests_in(torchs, loaded()) == expected, (torchs, loaded.__name__)
        assert digests_in(hf, loaded(), model().key_map()) == expected, (hf, loaded.__name__)

    state = fsdp()  # one element of one tensor on one rank: that tensor's digest changes, in every format
    changed = next(fqn for fqn in state if "wq" in fqn)
    block = next(iter(blocks_of(state[changed])))
    if dist.get_rank() == 1:
        block.data[-1, -1] += 1
    save(root / "changed-native", state)
    dcp.save(dict(state), checkpoint_id=root / "changed-dcp")
    export(state, root / "changed-hf", Coordinator.current(60.0))
    found = [
        digests_in(root / "changed-native", columns()),
        digests_in(root / "changed-dcp", columns()),
        digests_in(root / "changed-hf", columns(), model().key_map()),
    ]
    assert found[0] == found[1] == found[2]
    assert [fqn for fqn in expected if found[0][fqn] != expected[fqn]] == [changed]


def every_dtype_in_native_and_dcp(root: Path) -> None:
    names = [*LAYOUTS]
    first: dict[str, str] | None = None
    for saved, loaded in zip(names, [*names[1:], names[0]], strict=True):
        state = LAYOUTS[saved]()
        save(root / f"kinds-{saved}-native", state)
        dcp.save(dict(state), checkpoint_id=root / f"kinds-{saved}-dcp")
        native = digests_in(root / f"kinds-{saved}-native", zeroed(LAYOUTS[loaded]()))
        torchs = digests_in(root / f"kinds-{saved}-dcp", zeroed(LAYOUTS[loaded]()))
        first = first or native
        assert native == torchs == first, (saved, loaded)


@distributed(nproc=2)
def test_f3_native_dcp_and_hugging_face_forms_have_the_same_digests(tmp_path: Path) -> None:
    """A model in rows, columns and whole, read back in another layout; 8- and 16-bit, bool, complex, 0-d and empty."""
    one_model_in_every_format(tmp_path)
    every_dtype_in_native_and_dcp(tmp_path)
