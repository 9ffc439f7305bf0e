"""Folders of torch_checkpointing, to which torchtitan moves: their weights load, through the allow-list."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.torchtitan.runs import distributed, same_tensors
from titan_ckpt.config import CheckpointConfig, InitialLoadConfig
from titan_ckpt.errors import CorruptCheckpointError, NotACheckpointError
from titan_ckpt.formats.open import open_reader
from titan_ckpt.manager import CheckpointManager


def _model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.BatchNorm1d(3))


def _load(model: nn.Module, folder: Path, **settings: Any) -> None:
    source = InitialLoadConfig(str(folder), **settings)
    config = CheckpointConfig(initial_load=(source,))
    with CheckpointManager(config, model_parts=[model], base_folder=folder.parent / "run") as manager:
        manager.load()


@distributed(2)
def _saved(folder: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch_checkpointing import CheckpointManager as TheirManager
    from torch_checkpointing import ItemSpec
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.metadata_manager import DefaultMetadataManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    def gathered(self: Any, data: Any, process_group: Any = None) -> dict[int, Any]:
        of_ranks: list[Any] = [None, None]
        dist.all_gather_object(of_ranks, data)
        return dict(enumerate(of_ranks))

    DefaultMetadataManager._all_gather_pickled_data = gathered  # theirs wants a GPU
    model = _model(1)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters())
    resharded = ItemSpec(resharder=DefaultResharder(), required=False)
    manager = TheirManager.Config(
        items={"model": resharded, "optimizer": resharded},
        save=SyncCheckpointSaverConfig(),
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
    ).build()
    manager.save(str(folder), {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3})
    manager.close()
    dist.barrier()

    other = _model(2)
    fully_shard(other, mesh=init_device_mesh("cpu", (2,)), shard_placement_fn=lambda _: None)
    _load(other, folder)
    whole = {name: getattr(v, "full_tensor", lambda v=v: v)() for name, v in other.state_dict().items()}
    same_tensors(whole, dict(_model(1).state_dict()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that two ranks under FSDP2 have saved."""
    path = tmp_path_factory.mktemp("theirs") / "step-3"
    _saved(path)
    return path


def test_the_weights_of_two_ranks_load_on_one(folder: Path) -> None:
    """Sharded and whole tensors have their bits; the optimizer's state beside them is left."""
    model = _model(2)
    _load(model, folder)
    same_tensors(dict(model.state_dict()), dict(_model(1).state_dict()))


def test_its_training_state_is_refused_by_name(folder: Path) -> None:
    """Only torchtitan's DCP folders and our own steps give a run more than weights."""
    with pytest.raises(
        NotACheckpointError, match=r'holds no training state: only .* leave load = "training_state" out'
    ):
        _load(_model(2), folder, load="training_state")


class _Evil:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (self.marker,)


def _edited(change: Callable[[Any], object]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        metadata = pickle.loads((path / "metadata.pkl").read_bytes())
        change(metadata)
        (path / "metadata.pkl").write_bytes(pickle.dumps(metadata))

    return edit


def _about(metadata: Any) -> Any:
    return metadata["metadata"]["model"]["nested_path_to_metadata"]['["0.weight"]'][0]["sharding_metadata"]["data"]


def _at_two_offsets(metadata: Any) -> None:
    """Describe a vector by chunks, as users' own classes are, and the place of its chunk by two numbers."""
    about = metadata["metadata"]["model"]["nested_path_to_metadata"]['["2.running_mean"]'][0]["sharding_metadata"]
    about["type"] = "default_tensor_v1"
    about["data"].update(global_offsets=[(0, 0)], local_offsets=[(0,)], local_sizes=[(3,)])


_JSON = {"file_path": "x", "serialization_format": {"type": "JsonSerialization"}}


@pytest.mark.parametrize(
    ("damage", "error", "complaint"),
    [
        (lambda p: (p / "model_1.pt").unlink(), CorruptCheckpointError, r"model_1\.pt, needed for .* is missing"),
        (
            lambda p: (p / "model_0.pt").write_bytes((p / "model_0.pt").read_bytes()[:300]),
            CorruptCheckpointError,
            r"model_0\.pt, needed for .* cannot be read as plain data",
        ),
        (
            lambda p: torch.save({"0.weight": _Evil(str(p / "marker"))}, p / "model_0.pt"),
            CorruptCheckpointError,
            "cannot be read as plain data",
        ),
        (
            lambda p: torch.save({"0.weight": torch.zeros(2, 5)}, p / "model_0.pt"),
            CorruptCheckpointError,
            "model_0.pt, needed for",
        ),
        (
            lambda p: (p / "metadata.pkl").write_bytes(pickle.dumps(_Evil(str(p / "marker")))),
            CorruptCheckpointError,
            "may be hostile.*Nothing was executed",
        ),
        (_edited(lambda m: m.update(version="9.0")), CorruptCheckpointError, "its version is '9.0', expected '2.0'"),
        (
            _edited(lambda m: _about(m).update(placements=[{"type": "Replicate"}])),
            CorruptCheckpointError,
            "holds float",
        ),
        (_edited(lambda m: _about(m)["mesh_spec"].update(mesh_shape=(1 << 60,))), CorruptCheckpointError, "a mesh is"),
        (_edited(lambda m: _about(m).update(placements=[{"type": "Shard", "dim": 7}])), CorruptCheckpointError, "dim"),
        (_edited(_at_two_offsets), CorruptCheckpointError, "a chunk is not inside its tensor"),
        (
            _edited(lambda m: m["metadata"]["model"].update(rank_to_layout_info={})),
            CorruptCheckpointError,
            "no file of",
        ),
        (
            _edited(lambda m: m["metadata"]["model"].update(rank_to_layout_info={0: _JSON, 1: _JSON})),
            NotACheckpointError,
            "is stored as 'JsonSerialization'",
        ),
        (
            _edited(
                lambda m: m["metadata"]["model"].update(
                    rank_to_layout_info={
                        rank: {"file_path": f"../{rank}", "serialization_format": {"type": "TorchSerialization"}}
                        for rank in (0, 1)
                    }
                )
            ),
            CorruptCheckpointError,
            "points outside the folder",
        ),
    ],
)
def test_a_damaged_or_hostile_folder_is_one_typed_error(
    folder: Path, tmp_path: Path, damage: Callable[[Path], None], error: type[Exception], complaint: str
) -> None:
    """Nothing is executed, and nothing is allocated because a file asks for it."""
    shutil.copytree(folder, tmp_path / "step-3")
    damage(tmp_path / "step-3")
    with pytest.raises(error, match=complaint):
        _load(_model(2), tmp_path / "step-3")
    assert not (tmp_path / "step-3/marker").exists()


def test_its_tensors_are_listed_by_item_and_path(folder: Path) -> None:
    """The names are those that a DCP folder of the same nested state would have."""
    with open_reader(folder) as reader:
        names = {name for name in reader.tensors if name.startswith("model.")}
    assert names == {f"model.{name}" for name in _model(1).state_dict()}
