"""Modules whose state dict is not their live memory, in the ways that real libraries have: hooks, overrides, both."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel

DIM = 8


def add_hooks(module: Any, on_save: Callable[..., object] | None, on_load: Callable[..., object] | None) -> None:
    """Register public state-dict hooks; `module` is Any because torch has no types for them."""
    if on_save is not None:
        module.register_state_dict_post_hook(on_save)
    if on_load is not None:
        module.register_load_state_dict_pre_hook(on_load)


class FusedHeads(nn.Module):
    """q, k and v as one weight per group of heads, stored apart as torchtitan does it: with collectives if sharded."""

    heads_per_group, head_dim = 2, 2

    def __init__(self) -> None:
        super().__init__()
        rows = 2 * (self.heads_per_group + 2) * self.head_dim
        self.wqkv = nn.Linear(DIM, rows)
        self.wo = nn.Linear(rows, DIM)
        add_hooks(self, self._split, self._join)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wo(self.wqkv(x))  # type: ignore[no-any-return]

    @staticmethod
    def _split(module: FusedHeads, state: dict[str, Any], prefix: str, _: Any) -> None:
        for kind in ("weight", "bias"):
            fused = _gathered(state.pop(f"{prefix}wqkv.{kind}"))
            grouped = fused.reshape(-1, module.heads_per_group + 2, module.head_dim, *fused.shape[1:])
            parts = grouped[:, :-2], grouped[:, -2], grouped[:, -1]
            for name, part in zip(("wq", "wk", "wv"), parts, strict=True):
                state[f"{prefix}{name}.{kind}"] = part.reshape(-1, *fused.shape[1:]).contiguous()

    @staticmethod
    def _join(module: FusedHeads, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for kind in ("weight", "bias"):
            parts = [_gathered(state.pop(f"{prefix}{name}.{kind}")) for name in ("wq", "wk", "wv")]
            groups = parts[1].shape[0] // module.head_dim
            grouped = [part.reshape(groups, -1, module.head_dim, *part.shape[1:]) for part in parts]
            state[f"{prefix}wqkv.{kind}"] = torch.cat(grouped, dim=1).reshape(-1, *parts[0].shape[1:])


class FusedGate(nn.Module):
    """Two matrices in one parameter, whose slices stay sharded, as torchtitan's fused SwiGLU has them."""

    def __init__(self) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.randn(DIM, 2, DIM) / DIM)
        add_hooks(self, self._split, self._join)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = torch.einsum("...d,hgd->...hg", x, self.w13).unbind(-1)
        return gate.sigmoid() * up

    @staticmethod
    def _split(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        fused = state.pop(f"{prefix}w13")
        state[f"{prefix}w1.weight"], state[f"{prefix}w3.weight"] = fused[:, 0].contiguous(), fused[:, 1].contiguous()

    @staticmethod
    def _join(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}w13"] = torch.stack([state.pop(f"{prefix}{name}.weight") for name in ("w1", "w3")], dim=1)


class StoredFused(nn.Module):
    """Two layers that are stored as one tensor, by overrides instead of hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) + self.right(x)  # type: ignore[no-any-return]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state, prefix = super().state_dict(*args, **kwargs), kwargs.get("prefix", "")
        state[f"{prefix}both"] = torch.cat([state.pop(f"{prefix}{name}.weight") for name in ("left", "right")], dim=1)
        return state

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        halves = state.pop(f"{prefix}both").chunk(2, dim=1)
        state |= {f"{prefix}{name}.weight": half for name, half in zip(("left", "right"), halves, strict=True)}
        super()._load_from_state_dict(state, prefix, *args)


class Renamed(nn.Linear):
    """A weight with another name in its state dict."""

    def __init__(self) -> None:
        super().__init__(DIM, DIM)
        add_hooks(self, self._rename, self._name_back)

    @staticmethod
    def _rename(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}kernel"] = state.pop(f"{prefix}weight")

    @staticmethod
    def _name_back(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")


class Scaled(nn.Linear):
    """A fresh tensor under the parameter's own name, and a number, a text and a computed tensor beside it."""

    seen = 0

    def __init__(self) -> None:
        super().__init__(DIM, DIM)
        add_hooks(self, self._store, self._restore)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += self.training
        return super().forward(x)

    @staticmethod
    def _store(module: Scaled, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2
        state[f"{prefix}largest"] = torch.stack([_gathered(p.detach()).abs().max() for p in module.parameters()])
        state[f"{prefix}seen"], state[f"{prefix}unit"] = module.seen, "double"

    @staticmethod
    def _restore(module: Scaled, state: dict[str, Any], prefix: str, *_: Any) -> None:
        del state[f"{prefix}largest"], state[f"{prefix}unit"]
        module.seen = state.pop(f"{prefix}seen")
        state[f"{prefix}weight"] = state[f"{prefix}weight"] / 2


class OneRow(nn.Module):
    """A fresh tensor under the name of a parameter of one row, of which only the first rank has a part."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.randn(1, DIM))
        add_hooks(self, self._double, self._halve)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.row

    @staticmethod
    def _double(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}row"] = state[f"{prefix}row"] * 2

    @staticmethod
    def _halve(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}row"] = state[f"{prefix}row"] / 2


class Extra(nn.Linear):
    """Extra state: a tensor, a dict and bytes."""

    def __init__(self) -> None:
        super().__init__(DIM, DIM)
        self.total, self.counts, self.note = torch.zeros(3), {"calls": 0}, b""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.total = self.total + x.detach().mean()
            self.counts["calls"] += 1
            self.note += b"\x00\xff"
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return {"total": self.total, "counts": self.counts, "note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.total, self.counts, self.note = state["total"], state["counts"], state["note"]


class Recurrent(nn.LSTM):
    """An LSTM, whose flat weights alias its parameters."""

    def __init__(self) -> None:
        super().__init__(DIM, DIM, num_layers=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)[0].clone()  # FSDP2 warns of views


def _old(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates it, and models still have it
        return wrap(nn.Linear(DIM, DIM))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "split with collectives": FusedHeads,
    "split in shards": FusedGate,
    "fused": StoredFused,
    "renamed": Renamed,
    "fresh under its own name": Scaled,
    "fresh with an empty shard": OneRow,
    "extra state": Extra,
    "lstm": Recurrent,
    "weight norm by hooks": lambda: _old(nn.utils.weight_norm),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(DIM, DIM)),
    "spectral norm by hooks": lambda: _old(nn.utils.spectral_norm),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(DIM, DIM)),
    "nested": lambda: nn.Sequential(nn.Sequential(StoredFused(), FusedGate()), FusedHeads()),
}


class Net(nn.Module):
    """A module of one kind between plain ones, and the moving average of its own parameters beside it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.before, self.middle, self.after = nn.Linear(DIM, DIM), KINDS[kind](), nn.Linear(DIM, 1)
        self.norm = nn.BatchNorm1d(DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.norm(self.middle(self.before(x).tanh())))  # type: ignore[no-any-return]


def averaged(net: nn.Module) -> AveragedModel:
    return AveragedModel(net, use_buffers=True)


def _gathered(value: torch.Tensor) -> torch.Tensor:
    if isinstance(value, DTensor):
        return value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)
    return value
