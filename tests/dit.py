"""A small diffusion transformer and its pictures: what a trainer of other than token models is tried on."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from titan_ckpt import KeyMap
from titan_ckpt.models.language_model import Model


class Block(nn.Module):
    """Attention and an MLP that the condition scales, shifts and gates (adaLN-Zero, arXiv 2212.09748)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv, self.proj, self.condition = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), nn.Linear(dim, 6 * dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        scale, shift, gate, *of_mlp = self.condition(F.silu(condition)).unsqueeze(1).chunk(6, dim=-1)
        parts = self.qkv(F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift).unflatten(-1, (3, 4, -1))
        attended = F.scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4)).transpose(1, 2).flatten(2)
        x = x + gate * self.proj(attended)
        return x + of_mlp[2] * self.mlp(F.layer_norm(x, x.shape[-1:]) * (1 + of_mlp[0]) + of_mlp[1])


class DiT(Model):
    """Predicts the way from noise to pictures of 8 x 8, from their 16 patches, a time and a class."""

    def __init__(self, dim: int = 32, depth: int = 2) -> None:
        super().__init__()
        self.embed, self.time, self.kind = nn.Linear(4, dim), nn.Linear(16, dim), nn.Embedding(4, dim)
        self.place = nn.Parameter(torch.empty(16, dim))
        self.layers = nn.ModuleList(Block(dim) for _ in range(depth))
        self.output = nn.Linear(dim, 4)

    def forward(self, noisy: torch.Tensor, time: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        angles = time.unsqueeze(1) * torch.logspace(0, 3, 8, device=time.device)
        condition = self.time(torch.cat([angles.sin(), angles.cos()], dim=1)) + self.kind(kind)
        x = self.embed(F.pixel_unshuffle(noisy, 2).flatten(2).transpose(1, 2)) + self.place
        for layer in self.layers:
            x = layer(x, condition)
        return F.pixel_shuffle(self.output(x).transpose(1, 2).unflatten(2, (4, 4)), 2)

    def summed_loss(self, batch: Any) -> torch.Tensor:
        pictures, kind = batch
        noise, time = torch.randn_like(pictures), torch.rand(len(pictures), device=pictures.device)
        noisy = torch.lerp(pictures, noise, time[:, None, None, None])
        error: torch.Tensor = self(noisy, time, kind) - (noise - pictures)
        return error.square().flatten(1).mean(dim=1).sum()

    def init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                module.reset_parameters()
        for zero in (self.output, *(layer.get_submodule("condition") for layer in self.layers)):
            for parameter in zero.parameters():
                nn.init.zeros_(parameter)
        nn.init.normal_(self.place, std=0.02)

    def reset_buffers(self) -> None: ...

    def key_map(self) -> KeyMap:
        return KeyMap(identity=True)

    def hf_config(self) -> dict[str, Any]:
        return {"model_type": "dit", "architectures": ["DiT"]}


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """Waves in four directions; picture number i is the same on every rank and in every epoch."""

    def __init__(self, num: int = 22, drop_last: bool = False) -> None:
        self.num, self.drop_last = num, drop_last

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        kind, at = number % 4, torch.arange(8.0)
        turned = at[:, None] * math.cos(kind) + at * math.sin(kind)
        return torch.sin(turned + number)[None], kind
