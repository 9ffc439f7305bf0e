"""The runs that wrote the golden folders beside this file, and what of them is to come back bit for bit.

Imported by its path: generate.py trains these runs, tests/test_golden_native.py resumes them. Whatever later versions
call their parts, these runs stay what they are.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import pathlib
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from titan_ckpt import (
    CheckpointConfig,
    CheckpointManager,
    InitialLoadConfig,
    ModelWrapper,
    SaveConfig,
    StateDictTransforms,
    converters,
)
from titan_ckpt.models.llama3 import Llama3, Llama3Config


class Numbers:
    """A loader that deals an endless count to data-parallel ranks in turn."""

    def __init__(self, dp_rank: int, dp_world_size: int) -> None:
        self.dp_rank, self.dp_world_size = dp_rank, dp_world_size
        self.next = dp_rank

    def take(self) -> int:
        self.next += self.dp_world_size
        return self.next - self.dp_world_size

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.next = state_dict["next"]

    def load_state_dicts(self, state_dicts: Sequence[dict[str, Any]]) -> None:
        self.next = min(state["next"] for state in state_dicts) + self.dp_rank


class Held:
    """A user state that holds whatever it is given."""

    def __init__(self, value: dict[str, Any]) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return self.value

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict


class Run:
    """A run puts AdamW, a schedule, data and counters around a model; each step draws from every generator.

    `first`: the run that writes. Another one starts from other values, so that what it has afterwards was loaded.
    """

    components: tuple[Any, ...] | None = None
    transforms: StateDictTransforms | None = None
    hooks: Any = None
    handler: Any = None
    sources: tuple[Path, ...] = ()

    def __init__(self, model: nn.Module, first: bool, **states: Any) -> None:
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.model: Any = model
        trained = [p for p in model.parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0, "betas": (0.8, 0.95)},
        ]
        self.optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=0.02 if first else 9.0)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.data = Numbers(self.rank, self.ranks)
        self.states = {"counters": Held({"tokens": 0} if first else {})}
        self.states |= {name: Held(value) for name, value in states.items()}
        seed = self.rank + (1 if first else 1000)
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)  # noqa: NPY002

    def loss(self, number: int, noise: float) -> torch.Tensor:
        raise NotImplementedError

    def step(self) -> float:
        noise = random.random() + float(np.random.rand()) + torch.rand(()).item() - 1.5  # noqa: NPY002
        loss = self.loss(self.data.take(), noise)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.states["counters"].value["tokens"] += 7
        return loss.item()

    def train(self, manager: CheckpointManager, last: int, *, ends: bool = False) -> None:
        for step in range(manager.load().step + 1, last + 1):
            loss = self.step()
            manager.save(step, last_step=ends and step == last, metrics={"loss": loss})

    def settle(self, step: int) -> None:
        """Become what a resume of the step makes of this run, right after it was saved."""

    def manager(self, folder: Path, **settings: Any) -> CheckpointManager:
        settings.setdefault("save", SaveConfig(interval=2, timeout_seconds=30))
        sources = tuple(InitialLoadConfig(str(path)) for path in self.sources)
        return CheckpointManager(
            CheckpointConfig(components=self.components, initial_load=sources, **settings),
            model_parts=[self.model],
            optimizers=[self.optimizer],
            lr_schedulers=[self.schedule],
            dataloader=self.data,
            states=self.states,
            sd_transforms=self.transforms,
            model_converters=self.hooks,
            external_weights=self.handler,
            base_folder=folder,
        )

    def facts(self) -> dict[str, Any]:
        """Return what must come back exactly, of all ranks together: every tensor by its name in files, and values."""
        live = {f"model.{name}": value for name, value in ModelWrapper([self.model], self.hooks).state_dict().items()}
        for name, parameter in self.model.named_parameters():
            live |= tensors_in(self.optimizer.state.get(parameter, {}), f"optimizer.{name}")
        for name, state in self.states.items():
            live |= tensors_in(state.value, f"states.{name}")
        chosen = ("lr", "initial_lr", "betas", "eps", "weight_decay", "amsgrad")
        modules = self.model.named_modules()
        values = {
            "groups": [{name: group[name] for name in chosen} for group in self.optimizer.param_groups],
            "schedule": [self.schedule.last_epoch, *self.schedule.get_last_lr(), *self.schedule.base_lrs],
            "counters": self.states["counters"].value,
            "seen": {name: module.seen for name, module in modules if hasattr(module, "seen")},
        }
        numpy_state: Any = np.random.get_state()  # noqa: NPY002
        generators = {
            "python": sha256(repr(random.getstate()).encode()),
            "numpy": sha256(numpy_state[1].tobytes() + repr([*map(float, numpy_state[2:])]).encode()),
            "torch": sha256(torch.get_rng_state().numpy().tobytes()),
        }
        own = {"data": self.data.state_dict(), "generators": generators}
        own |= {"own": self.states["own"].value} if "own" in self.states else {}
        found = {"tensors": {n: described(v) for n, v in live.items()}, "values": values, "ranks": of_all_ranks(own)}
        return as_json(found)

    def go_on(self) -> dict[str, Any]:
        """Take two steps more, and return what other processors may round otherwise."""
        losses = [self.step(), self.step()]
        norms = {name: whole(p).double().norm().item() for name, p in self.model.named_parameters()}
        return as_json({"losses": of_all_ranks(losses), "norms": norms})


DTYPES = (
    "float64 float16 bfloat16 float8_e4m3fn float8_e5m2 uint8 int8 int16 int32 uint16 uint32 uint64 bool",
    "complex64 complex128 float4_e2m1fn_x2",
)


class Net(nn.Module):
    """A model that has tied weights, buffers of many dtypes, and parameters that are trained late or never."""

    count: torch.Tensor
    mean: torch.Tensor

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.hidden = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6)
        self.head.weight = self.embed.weight
        self.late = nn.Parameter(torch.zeros(4))
        self.unused = nn.Parameter(torch.full((2,), float(first)))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("empty", torch.zeros(0, 3))
        for name in " ".join(DTYPES).split():
            dtype = getattr(torch, name)
            raw = torch.arange(6 * dtype.itemsize, dtype=torch.uint8) * first % (2 if name == "bool" else 251)
            self.register_buffer(f"as_{name}", raw.view(dtype).reshape(3, 2))
        self.seen = 0

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": self.seen, "kinds": ("extra", {1, 2})}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert state["kinds"] == ("extra", {1, 2})
        self.seen = state["seen"]

    def forward(self, ids: torch.Tensor, noise: float) -> torch.Tensor:
        self.seen += 1
        self.count += 1
        h = torch.tanh(self.hidden(self.embed(ids)) + noise)
        if self.seen > 2:
            h = h + self.late
        self.mean.lerp_(h.detach().mean(0), 0.25)
        logits: torch.Tensor = self.head(h)
        return logits


def typed() -> dict[str, Any]:
    """Return a state with a value of every type that typed JSON has a tag for."""
    zone = datetime.timezone(datetime.timedelta(hours=-3, minutes=-30))
    return {
        "plain": [None, True, -1, 2.5, -0.0, 5e-324, "\u00e4 \n \U0001f600", {"": []}],
        "int": [2**80, -(2**63) - 1, 2**63 - 1],
        "float": [float("nan"), float("inf"), float("-inf")],
        "complex": complex(-0.0, float("inf")),
        "str": "\ud800 alone",
        "bytes": [b"\x00\xff", bytearray(b"ab")],
        "tuple": ((), (1, ("two",))),
        "set": [{1, "a", (2,)}, frozenset({b"x"})],
        "dict": {1: "a", (2, 3): None, "$odd": 4},
        "$key": {"$key": 0},
        "OrderedDict": OrderedDict([("b", 1), ("a", 2)]),
        "Counter": Counter({"a": 3, "b": -1}),
        "defaultdict": defaultdict(list, {"a": [1]}),
        "deque": [deque([1, 2], maxlen=3), deque()],
        "range": range(10, 0, -3),
        "datetime": [
            datetime.datetime(2024, 10, 27, 2, 30, 0, 123456, tzinfo=zone, fold=1),
            datetime.date(1999, 12, 31),
            datetime.time(23, 59, 59, tzinfo=datetime.UTC),
            datetime.timedelta(days=-1, microseconds=1),
        ],
        "path": [pathlib.Path("data/part-0"), pathlib.PurePosixPath("a/b")],
        "torch": [torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 0])],
        "numpy": [np.arange(6, dtype=">i2").reshape(2, 3), np.array(["2024-01-01"], "M8[D]"), np.array(["a\u00e4"])],
        "numpy scalar": [np.float32(0.1), np.int64(-7), np.bool_(True), np.str_("text"), np.bytes_(b"raw")],
        "scalars": [torch.tensor(0.5, dtype=torch.bfloat16), torch.tensor(3)],
        "tensors": {
            "gr\u00f6\u00dfe": torch.arange(3.0),
            "list": [torch.ones(2, 2, dtype=torch.int8), (torch.ones(1),)],
        },
    }


TAGS = (
    "$int $float $complex $str $bytes $bytearray $tuple $set $frozenset $dict $OrderedDict $Counter $defaultdict",
    "$deque $range $datetime $time $date $timedelta $path $posixpath $tensor $torch.dtype $torch.device $torch.Size",
    "$numpy $numpy.scalar $numpy.str $numpy.bytes",
)
"""These are all the tags of schema version 1."""


class OneProcess(Run):
    """A run that has a bit of everything; on several ranks FSDP2 shards it."""

    def __init__(self, first: bool = False) -> None:
        torch.manual_seed(0 if first else 5)
        net = Net(first)
        if dist.is_initialized():
            fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        super().__init__(net, first, typed=typed() if first else {})

    def loss(self, number: int, noise: float) -> torch.Tensor:
        ids = (torch.arange(5) * 3 + number) % 6
        return nn.functional.cross_entropy(self.model(ids, noise), (ids + 1) % 6)

    def step(self) -> float:
        loss = super().step()
        state = self.optimizer.state[self.model.hidden.weight]
        state["trace"] = {"taken": self.data.next, "sums": [torch.tensor([1.0, self.data.next])]}
        return loss


class TwoRanks(Run):
    """A run that FSDP2 shards by uneven rows, down to none, and by columns; each rank has a state of its own."""

    def __init__(self, first: bool = False) -> None:
        torch.manual_seed(0 if first else 5)
        layers = {
            "rows": nn.Linear(4, 7),
            "between": nn.Linear(7, 4),
            "columns": nn.Linear(4, 3),
            "single": nn.Linear(3, 1),
        }
        model = nn.Sequential(OrderedDict(layers))
        model.register_buffer("count", torch.tensor(3 * first))
        average = {name: torch.arange(12.0).reshape(6, 2) * first for name in ("rows", "strided", "strided#1")}
        own = {}
        if dist.is_initialized():
            mesh = init_device_mesh("cpu", (2,))
            fully_shard(layers["columns"], mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p.dim() > 1 else None)
            for name in ("rows", "between", "single"):
                fully_shard(layers[name], mesh=mesh)
            fully_shard(model, mesh=mesh)
            average["rows"] = distribute_tensor(average["rows"], mesh, [Shard(0)])
            average["strided"] = strided(average["strided"], mesh)
            own = {"own": {"rank": dist.get_rank(), "kind": ("one of", mesh.size())} if first else {}}
        super().__init__(model, first, average=average, **own)

    def loss(self, number: int, noise: float) -> torch.Tensor:
        x = (torch.arange(8.0).reshape(2, 4) + number) / 8 + noise
        result: torch.Tensor = self.model(x).square().mean()
        return result


def strided(value: torch.Tensor, mesh: Any) -> DTensor:
    """Return a tensor of which each rank has every second piece of rows, as FSDP2 over tensor parallelism leaves it."""
    pieces = value.chunk(3)
    own = torch.cat([piece.chunk(2)[mesh.get_local_rank()] for piece in pieces])
    return DTensor.from_local(
        own, mesh, [_StridedShard(0, split_factor=3)], shape=value.shape, stride=value.stride(), run_check=False
    )


def unstrided(value: DTensor) -> torch.Tensor:
    """Return what `strided` was given; torch 2.11 cannot gather this placement on a mesh of one dim. Collective."""
    parts = [torch.empty_like(value.to_local()) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, value.to_local().detach().contiguous())
    return torch.stack(parts, dim=1).reshape(value.shape)


class External(Run):
    """A run whose weights come from outside, and differ from step to step."""

    components: Any = ("optimizer", "lr_scheduler", "dataloader", "rng", "states")

    def __init__(self, first: bool = False) -> None:
        torch.manual_seed(0 if first else 5)
        super().__init__(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), first)
        self.handler = lambda event: event.fill(self.outside(event.step))

    def outside(self, step: int) -> dict[str, torch.Tensor]:
        live = self.model.state_dict()
        return {n: (torch.arange(v.numel()).reshape(v.shape) + step) / 16 - 0.5 for n, v in live.items()}

    def settle(self, step: int) -> None:
        self.model.load_state_dict(self.outside(step))

    def loss(self, number: int, noise: float) -> torch.Tensor:
        x = torch.arange(8.0).reshape(2, 4) / (1 + number) + noise
        result: torch.Tensor = self.model(x).square().mean()
        return result


def ordered() -> dict[str, Any]:
    """Return arrays and tensors whose memory is not row-major; of a size of 1 and without elements, too."""
    array, tensor = np.arange(24, dtype=">i4").reshape(2, 3, 4), torch.arange(24.0).reshape(2, 3, 4)
    return {
        "arrays": [array.T, array.transpose(1, 2, 0), array[:1].T, array[:0].T, np.array([["a", "b"], ["c", "d"]]).T],
        "tensors": [tensor.permute(2, 0, 1), tensor[:1].permute(1, 2, 0).bfloat16(), tensor[:, :0].permute(2, 0, 1)],
    }


class Keeping(Numbers):
    """A loader that keeps tensors beside its count."""

    kept: dict[str, Any] = {}  # noqa: RUF012 - it is replaced

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | self.kept

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.kept = {"tensors": state_dict["tensors"]}


class Ordered(External):
    """A run whose own state and whose loader hold arrays and tensors in other orders of memory."""

    components: Any = None
    data: Any

    def __init__(self, first: bool = False) -> None:
        super().__init__(first)
        self.handler, self.data = None, Keeping(self.rank, self.ranks)
        self.states["ordered"] = Held({"arrays": ordered()["arrays"]} if first else {})
        if first:
            self.data.kept = {"tensors": ordered()["tensors"]}

    def settle(self, step: int) -> None:
        """Stay as it is."""

    def facts(self) -> dict[str, Any]:
        kept, self.data.kept = self.data.kept, {}
        try:
            return super().facts()
        finally:
            self.data.kept = kept


LORA = {"kind": "lora", "rank": 2, "alpha": 4.0, "target_modules": ["wq", "w2"]}


class Llama(Run):
    """A run that trains a Llama of 2,480 weights, or adapters over the weights of `sources`."""

    def __init__(self, first: bool = False, *, lora: bool = False, sources: tuple[Path, ...] = ()) -> None:
        torch.manual_seed(0 if first else 5)
        model = Llama3(Llama3Config(16, 1, 2, 1, 8, 24, 32, 16, tie_embeddings=True))
        model.init_weights()
        if lora:
            self.hooks = converters.from_tables([LORA])
            self.hooks.convert(model)
        self.transforms = StateDictTransforms(key_map=model.key_map(), hf_config=model.hf_config())
        self.sources = sources
        super().__init__(model, first)

    def loss(self, number: int, noise: float) -> torch.Tensor:
        ids = (torch.randint(0, 32, (2, 8)) + number + int(noise * 8)) % 32
        logits = self.model(ids)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def another(case: str, folder: Path) -> Run:
    """Return a run like the one that wrote the case, with other values."""
    match case:
        case "two-ranks" | "dcp-export":
            return TwoRanks()
        case "external":
            return External()
        case "memory-order":
            return Ordered()
        case "lora-adapter":
            return Llama(lora=True, sources=(folder / "base" / "step-0",))
        case "hf-export":
            return Llama()
        case "peft-export":
            return Llama(lora=True)
        case _:
            return OneProcess()


# The comparison with expected.json


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def whole(value: torch.Tensor) -> torch.Tensor:
    if isinstance(value, DTensor):
        value = unstrided(value) if isinstance(value.placements[0], _StridedShard) else value.full_tensor()
    return value.detach()


def raw(value: torch.Tensor) -> bytes:
    """Return a tensor's bytes in row-major order."""
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def described(value: torch.Tensor) -> str:
    """Return dtype, shape and the digest of the bytes of a whole tensor."""
    value = whole(value)
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} {sha256(raw(value))}"


def tensors_in(value: Any, name: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a nested state, by the names that files give them."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    return {n: tensor for key, item in items for n, tensor in tensors_in(item, f"{name}.{key}").items()}


def of_all_ranks(value: Any) -> list[Any]:
    if not dist.is_initialized():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def as_json(value: Any) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(value))
    return made
