"""Runs that export to a bucket until they are killed, and how the place is judged. Three tiny files each.

`tests/stores/test_soak.py` kills them.
"""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

from tests.faults.small_checkpoints import alone
from tests.stores.soak_runs import joined
from titan_ckpt.config import ExportConfig, StoreConfig
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.exporting.exporter import ExportJob
from titan_ckpt.formats.huggingface.export import HuggingFaceFormat
from titan_ckpt.formats.huggingface.reader import HuggingFaceReader
from titan_ckpt.formats.publish.bucket_record import LOADABLE, BucketExports
from titan_ckpt.formats.publish.record import RECORDS
from titan_ckpt.formats.publish.run import FolderExport
from titan_ckpt.geometry.keymap import KeyMap, KeyRule
from titan_ckpt.stores.objects import BucketPath
from titan_ckpt.stores.store import open_location
from titan_ckpt.weights.transforms import StateDictTransforms

_MODEL = {"model_type": "x", "architectures": ["X"]}
_NAMES = [f"w{number}" for number in range(4)]
_TABLE = KeyMap(tuple(KeyRule.of(name, f"model.{name}.weight") for name in _NAMES))


def export_step(place: BucketPath, coordinator: Coordinator, step: int) -> None:
    """Export tensors that hold the step, in three files, unless it is there; keep the newest export. Collective."""
    config = ExportConfig("hf", interval=1, keep=1, folder=str(place))
    exports = BucketExports(place)
    if coordinator.on_rank_0("there", lambda: exports.is_there(f"step-{step}")):
        return
    tensors = {name: torch.full((4, 8), float(step)) for name in _NAMES}
    groups = StateDictTransforms(_TABLE, _MODEL).to_file(tensors, None, None)
    writer = FolderExport(groups, HuggingFaceFormat(config=_MODEL, assets=None, max_shard_bytes=256))
    ExportJob(config, step, place / f"step-{step}", writer, exports).run(coordinator)


def killed_export(
    url: str, endpoint: str, rank: int, world: int, port: int, timeout: float, steps: Sequence[int], told: Connection
) -> None:
    """Be one rank of a run that exports the steps; rank 0 tells each when it is published."""
    coordinator = joined(rank, world, port, url, timeout)
    place = open_location(url, settings=StoreConfig(endpoint=endpoint, retry_seconds=30.0))
    assert isinstance(place, BucketPath)
    for step in steps:
        export_step(place, coordinator, step)
        if rank == 0:
            told.send(step)
    coordinator.close()


def judge_exports(place: BucketPath, told: Sequence[int], steps: Sequence[int]) -> list[str]:
    """Look at the exports as a reader does; then let the next run make the rest, and look again. Return what is wrong.

    Every folder that opens is whole. The newest export that was told is there, or the next one, after which it expires.
    """
    faults = _not_whole(place)
    left = steps[len(told) :]
    there = _loadable(place)
    if told and not there & {told[-1], *left[:1]}:
        faults.append(f"lost: step {told[-1]}; there are {sorted(there)}")
    for step in (*left, 1000):
        export_step(place, alone(), step)
    faults += _not_whole(place)
    unexpected = _folders(place) - {"step-1000", RECORDS}
    return faults + [f"left behind: {name}" for name in sorted(unexpected)]


def _folders(place: BucketPath) -> set[str]:
    return {*place.bucket.list_names(place.key)}


def _loadable(place: BucketPath) -> set[int]:
    keys = [f.key.removeprefix(f"{place.key}/") for f in place.bucket.list_objects(place.key)]
    parts = [key.partition("/") for key in keys if not key.startswith(RECORDS)]
    return {int(folder.removeprefix("step-")) for folder, _, name in parts if name in LOADABLE}


def _not_whole(place: BucketPath) -> list[str]:
    faults = []
    for step in sorted(_loadable(place)):
        try:
            with HuggingFaceReader((place / f"step-{step}").listed()) as reader:
                values = {key: reader.whole(key) for key in reader.tensors}
            wrong = [key for key, value in values.items() if not torch.equal(value, torch.full((4, 8), float(step)))]
            missing = {f"model.{name}.weight" for name in _NAMES} - values.keys()
            faults += [f"step {step} opens, and is not whole: {wrong}, {missing}"] if wrong or missing else []
        except Exception as error:
            faults.append(f"step {step} opens, and cannot be read: {error}")
    return faults
