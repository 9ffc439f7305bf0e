"""The kit that tests start from: a tiny Llama, its folder and its adapter, a manager, ranks, and whether states agree.

Ranks import this module, so libraries of the extras are imported where they are used. A tokenizer and conversations are
in `tests/chats.py`, a run of the trainer is in `tests/tiny_run.py`, places in a bucket are in `tests/run_folder.py`.
"""

from __future__ import annotations

import copy
import inspect
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tests.run_folder import RunFolder
from titan_ckpt.config import CheckpointConfig, InitialLoadConfig, SaveConfig
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.formats.huggingface.export import export_huggingface
from titan_ckpt.formats.open import open_reader
from titan_ckpt.geometry.chunks import Block, Chunk, as_bytes, blocks_of, local_tensor
from titan_ckpt.geometry.keymap import KeyMap
from titan_ckpt.loading.restore import LoadResult
from titan_ckpt.manager import CheckpointManager
from titan_ckpt.models.llama3 import Llama3, Llama3Config
from titan_ckpt.testing import distributed
from titan_ckpt.types import LoadReport, ModelConverter, StateDict
from titan_ckpt.weights.transforms import StateDictTransforms

TINY = Llama3Config(
    dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, ffn_dim=128, vocab_size=96, max_seq_len=32
)
TOKENS = torch.arange(24).reshape(2, 12)

_SAVE = {field.name for field in fields(SaveConfig)}
_OBJECTS = {*inspect.signature(CheckpointManager).parameters} - {"config", "base_folder"}


class Value:
    """A state of a run that holds one value; an exception in its place is raised when the state is asked for."""

    def __init__(self, value: Any = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        if isinstance(self.value, BaseException):
            raise self.value
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


class Bare(ModelConverter):
    """A converter that owns and changes nothing; tests overwrite what they are about."""

    def __init__(self) -> None: ...

    def convert(self, model: nn.Module) -> None: ...

    def describe(self) -> list[dict[str, Any]]:
        return [{"kind": "bare"}]


def llama(shape: Llama3Config = TINY, seed: int = 0, converters: Any = None) -> Llama3:
    """Return an initialized Llama, converted."""
    torch.manual_seed(seed)
    model = Llama3(shape)
    model.init_weights()
    if converters is not None:
        converters.convert(model)
    return model


def convert(model: nn.Module, *tables: Mapping[str, Any]) -> Any:
    """Convert a model by the tables of a run file, and return the converters."""
    from titan_ckpt.converters import from_tables

    converters = from_tables(list(tables))
    converters.convert(model)
    return converters


def write_llama(folder: Path, shape: Llama3Config = TINY, seed: int = 0, **save: Any) -> Path:
    """Write a Llama of transformers, of the same shape, to a Hugging Face folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config: Any = LlamaConfig.from_dict(shape.to_hf())
    LlamaForCausalLM(config).save_pretrained(folder, **save)
    return folder


def write_adapter(folder: Path, base: Path, *modules: str, seed: int = 1, **settings: Any) -> Path:
    """Write a PEFT adapter to the base, with random values."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    given = {"r": 4, "init_lora_weights": False, **settings}
    get_peft_model(model, LoraConfig(target_modules=list(modules), **given)).save_pretrained(str(folder))
    return folder


def shard(model: nn.Module, mesh: DeviceMesh | None = None) -> Any:
    """Shard every layer of a model, and the model, by FSDP2 over all ranks or the mesh; alone, leave it as it is."""
    if mesh is not None or dist.is_initialized():
        mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
        layers: Any = getattr(model, "layers", model)
        for layer in layers.children():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def adamw(model: nn.Module, lr: float = 0.01, **settings: Any) -> torch.optim.AdamW:
    """Return AdamW over what the model trains.

    On FSDP2's shards it is fused: a new process takes long for the first operation of each kind and shape on DTensors.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in trained}
    fused = {"fused": True} if len(meshes) == 1 and None not in meshes else {}
    return torch.optim.AdamW(trained, lr=lr, **(fused | settings))


def manager(folder: RunFolder | Path, /, *objects: Any, **given: Any) -> CheckpointManager:
    """Return the manager of a run that saves every step; `objects` are its parts, and all others its optimizers.

    `given` are settings of SaveConfig and of CheckpointConfig, and objects that CheckpointManager takes. A path in
    `initial_load` is a source without settings. A model of ours brings its key map. `save=None` saves nothing.
    """
    place = RunFolder(folder) if isinstance(folder, Path) else folder
    parts = [one for one in objects if isinstance(one, nn.Module)]
    save = {"interval": 1, "timeout_seconds": 60.0} | {name: given.pop(name) for name in _SAVE & given.keys()}
    taken: dict[str, Any] = {name: given.pop(name) for name in _OBJECTS & given.keys()}
    sources: Iterable[Any] = given.pop("initial_load", ())
    given["initial_load"] = tuple(s if isinstance(s, InitialLoadConfig) else InitialLoadConfig(str(s)) for s in sources)
    if len(parts) == 1 and hasattr(parts[0], "key_map"):
        model: Any = parts[0]
        taken = {"sd_transforms": StateDictTransforms(model.key_map(), model.hf_config()), **taken}
    return CheckpointManager(
        CheckpointConfig(**{"save": SaveConfig(**save), **place.settings, **given}),
        model_parts=parts,
        optimizers=[one for one in objects if not isinstance(one, nn.Module)],
        base_folder=place.base,
        **taken,
    )


class Run:
    """A model and its AdamW, sharded where there are ranks, that train on what torch's generator draws."""

    def __init__(self, model: Any = None, seed: int = 0, *, is_laid_out: bool = False, **adam: Any) -> None:
        torch.manual_seed(seed)
        self.model: Any = model or nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 1))
        if not is_laid_out:
            shard(self.model)
        self.optimizer = adamw(self.model, **adam)

    def manager(self, folder: RunFolder | Path, **given: Any) -> CheckpointManager:
        return manager(folder, self.model, self.optimizer, **given)

    def step(self, *inputs: Any) -> float:
        """Take a step; without inputs on three rows that are drawn."""
        return step_on(self.model, self.optimizer, *(inputs or (torch.randn(3, 4),)))

    def state(self) -> dict[str, Any]:
        return weights_and_moments(self.model, self.optimizer)


def step_with_ones(*optimizers: Optimizer) -> None:
    """Take a step whose gradients are all one."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.ones_like(p)
        optimizer.step()


def step_on(model: Any, optimizer: Optimizer, *inputs: Any) -> float:
    """Take a step on the mean square of what the model returns, and return that."""
    return learn(optimizer, model(*inputs).float().square().mean())


def learn(optimizer: Optimizer, loss: torch.Tensor) -> float:
    """Take a step that lowers the loss, and return it."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def whole(value: Any) -> Any:
    """Return a copy of a state in which every shard is gathered. Collective where there is a DTensor."""
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(whole, value))
    return copy.deepcopy(value)


def gathered(value: Any) -> list[Any]:
    """Return the value of each rank. Collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def weights_and_moments(model: nn.Module, *optimizers: Optimizer) -> dict[str, Any]:
    """Return every parameter, buffer and optimizer state by name, whole."""
    live: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, parameter in model.named_parameters():
        for optimizer in optimizers:
            live |= {f"{name}.{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
    return {name: whole(value) for name, value in live.items()}


def same(a: Any, b: Any) -> bool:
    """Compare two states bit for bit: tensors, and dicts and lists of them."""
    return not differing(a, b)


def differing(a: Any, b: Any, path: str = "state") -> list[str]:
    """Return the places at which two states differ."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        is_same = (a.dtype, a.shape) == (b.dtype, b.shape) and bits(a) == bits(b)
        return [] if is_same else [path]
    if isinstance(a, dict) and isinstance(b, dict):
        found = [f"{path}.{key}" for key in a.keys() ^ b.keys()]
        return found + [line for key in a.keys() & b.keys() for line in differing(a[key], b[key], f"{path}.{key}")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        found = [] if len(a) == len(b) else [f"{path}: {len(a)} and {len(b)} items"]
        pairs = enumerate(zip(a, b, strict=False))
        return found + [line for i, pair in pairs for line in differing(*pair, f"{path}[{i}]")]
    return [] if bool(a == b) else [path]


def bits(tensor: torch.Tensor) -> bytes:
    """Return a tensor's bytes in row-major order, of a shard those that this rank has."""
    return as_bytes(local_tensor(tensor)).numpy().tobytes()


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Read every tensor of every safetensors file of a folder, with the library of safetensors."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118  # not a mapping
                assert key not in found, f"{key} is in two files"
                found[key] = file.get_tensor(key)
    return found


def assert_same_bytes(one: Path, other: Path) -> None:
    """Fail unless both folders hold the same tensors, bit for bit."""
    assert not (found := differing(tensors(one), tensors(other))), found


def write_hf(
    folder: Path, state: StateDict, table: KeyMap | None = None, *, dtype: Any = None, line: Any = None, **options: Any
) -> None:
    """Write tensors to a new Hugging Face folder, by a table or under their own names; collective where ranks meet.

    `options` are those of export_huggingface. `line` is the coordinator.
    """
    groups = StateDictTransforms(table or KeyMap(identity=True)).to_file(state, None, dtype)
    given = {"config": {"model_type": "x", "architectures": ["X"]}, "assets": None, "max_shard_bytes": 10**9}
    export_huggingface(folder, groups, coordinator=line or Coordinator.current(60.0), **given | options)


def fill(
    state: StateDict, source: Any, table: KeyMap | None = None, *, cast: bool = False, form: Any = None
) -> LoadReport:
    """Fill tensors from a folder of any format, or of this one, of which none is missing there or of another kind."""
    with open_reader(source, form) as reader:
        plan = StateDictTransforms(table or KeyMap(identity=True)).from_file(state, reader.tensors, None, cast=cast)
        assert not (plan.report.missing or plan.report.mismatched), plan.report
        reader.read(plan.requests)
    return plan.report


def part(whole: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    """Return the region of a tensor."""
    return whole[chunk.within(Chunk.whole(whole.shape))]


def misplaced(state: Mapping[str, Any], truth: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the tensors of which this rank holds other bits than those of the whole tensor at their place."""
    held = ((name, block) for name, value in state.items() for block in blocks_of(value))
    return [name for name, block in held if not same(block.data, part(truth[name], block.chunk))]


def read_all(folder: Any) -> dict[str, torch.Tensor]:
    """Read every tensor of a folder of any format through its reader."""
    with open_reader(folder) as reader:
        values = {key: torch.empty(info.shape, dtype=info.dtype) for key, info in reader.tensors.items()}
        reader.read([Block(Chunk.whole(value.shape), value, key) for key, value in values.items()])
    return values


@contextmanager
def heard(logger: str = "titan_ckpt", level: int = logging.WARNING) -> Iterator[list[str]]:
    """Yield the messages that a logger gets from here on; caplog is not there in ranks."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger(logger)
    before = log.level
    log.addHandler(handler)
    log.setLevel(level)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder, sorted; none if there is no such folder."""
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def flip_bit(path: Path, at: int = -3, bit: int = 1) -> None:
    """Flip a bit of a file; where it is from the end if `at` is negative."""
    content = bytearray(path.read_bytes())
    content[at] ^= bit
    path.write_bytes(content)


def on_ranks(nproc: int, act: Callable[..., None], *args: Any, timeout_seconds: float = 120.0, **named: Any) -> None:
    """Run a function of a module on so many ranks, or here if it is one. Raises: RankError."""
    if nproc == 1:
        act(*args, **named)
        return
    distributed(nproc, timeout_seconds=timeout_seconds)(_act.__wrapped__)(act, args, named)  # type: ignore[attr-defined]


@distributed()
def _act(act: Callable[..., None], args: Iterable[Any], named: dict[str, Any]) -> None:
    act(*args, **named)


def load(run: CheckpointManager) -> LoadResult:
    """Load by a manager that does nothing else."""
    with run:
        return run.load()


def load_fails(
    run: CheckpointManager, error: type[Exception] | tuple[type[Exception], ...], match: str | None = None
) -> str:
    """Fail unless the load of a manager is refused so, and return what it says."""
    with run, pytest.raises(error, match=match) as raised:
        run.load()
    return str(raised.value)


def save(run: CheckpointManager, step: int = 1, **due: Any) -> bool:
    """Save a step by a manager that does nothing else."""
    with run:
        return run.save(step, **due)


def assert_resumes(root: Path, make: Callable[[], tuple[Any, Optimizer]], width: int = 4, **given: Any) -> None:
    """Train four steps, and in other objects from what a kill after the second leaves; fail unless both end the same.

    `make` returns a model that takes rows of `width`, and its optimizer. Collective where ranks meet.
    """
    ends: list[Any] = []
    for name in ("whole", "resumed"):
        torch.manual_seed(len(ends))
        model, optimizer = make()
        with manager(root / name, model, optimizer, **given) as run:
            for step in range(run.load().step + 1, 5):
                step_on(model, optimizer, torch.randn(3, width))
                run.save(step)
                if name == "whole" and step == 2:
                    run.wait()
                    if not dist.is_initialized() or dist.get_rank() == 0:
                        shutil.copytree(root / name, root / "resumed")
        if dist.is_initialized():
            dist.barrier()
        ends.append([weights_and_moments(model, optimizer), optimizer.state_dict()["param_groups"]])
    assert not (wrong := differing(ends[0], ends[1])), wrong


def finish(run: CheckpointManager, step: int = 1) -> LoadResult:
    """Load, and save the last step of a run with its exports, without training between."""
    with run:
        result = run.load()
        run.save(step, last_step=True)
    return result
