"""The shim that lets torchtitan's Trainer run on a CPU with gloo. Import it before torchtitan.

torchtitan asks torch for an accelerator, its memory statistics, a compiled attention kernel and pipelines of a nightly
torch. Nothing here touches parameters, optimizers, data or checkpoints.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

torch._utils._get_available_device_type = lambda: "cpu"
_ANSWERS: dict[str, Any] = {
    "get_device_name": "A100",  # a name whose peak FLOPS torchtitan knows; they appear in a log line only
    "get_device_properties": SimpleNamespace(total_memory=1 << 34),
    "memory_stats": {},
    "reset_peak_memory_stats": None,
    "empty_cache": None,
    "current_device": 0,  # torch answers "cpu", and dist.barrier wants an index
}
for _name, _answer in _ANSWERS.items():
    setattr(torch.cpu, _name, lambda *_, answer=_answer: answer)
dist.__dict__["set_timeout"] = lambda *_: None

from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts


def _sdpa(
    self: Any,
    q_BLNH: torch.Tensor,
    k_BLNH: torch.Tensor,
    v_BLNH: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """Attend causally; flex attention needs a compiler here, and packed documents do not matter to a checkpoint."""
    q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
    if (finish := options.get("out_transform")) is not None:  # gpt_oss rescales by the sum of the weights
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(-1, -2) * options["scale"]).masked_fill(later, float("-inf"))
        made: torch.Tensor = finish((scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1).transpose(1, 2))
        return made
    options = {name: options[name] for name in ("scale", "enable_gqa") if name in options}
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, **options).transpose(1, 2)


FlexAttention.forward = _sdpa
Decoder.get_attention_masks = lambda *_, **__: None

_experts = GptOssGroupedExperts.forward


def _in_the_input_dtype(self: GptOssGroupedExperts, x_RD: torch.Tensor, *counts: torch.Tensor) -> torch.Tensor:
    """Return the experts' sum, computed in bfloat16, in the dtype of the run, as other models' experts do."""
    made: torch.Tensor = _experts(self, x_RD, *counts)
    return made.to(x_RD.dtype)


GptOssGroupedExperts.forward = _in_the_input_dtype

_set_divide_factor = FSDPModule.set_gradient_divide_factor


def _sum(self: FSDPModule, factor: float) -> None:
    """Add gradients up as NCCL's PREMUL_SUM does, which gloo has not."""
    self.set_force_sum_reduction_for_comms(True)
    _set_divide_factor(self, factor)


FSDPModule.set_gradient_divide_factor = _sum  # type: ignore[method-assign]


def _step(
    self: PipelineScheduleMulti,
    *,
    arg_mbs: list[Any] | None,
    kwarg_mbs: list[Any],
    target_mbs: list[Any] | None,
    losses: list[torch.Tensor] | None,
    loss_kwargs: dict[str, Any],
    return_outputs: bool,
) -> None:
    """Run the microbatches that torchtitan hands over; the released torch would split a batch of its own."""
    for stage in self._stages:
        stage.has_backward = self._has_backward
        stage.clear_runtime_states()
    self._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs=loss_kwargs)


PipelineScheduleMulti.step = _step  # type: ignore[assignment, method-assign]
