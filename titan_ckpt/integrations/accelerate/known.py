"""Settings of an Accelerator that cannot be checkpointed exactly, each with its reason and the next step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate.utils import KwargsHandler

WORKS = frozenset({"FSDP", "MULTI_CPU", "MULTI_GPU", "NO"})
"""Values of accelerate's DistributedType that were proved to continue exactly; FSDP is that of version 2."""
_FP8 = "no step is known to hold the scales of its weights and activations: use bf16"
_EXACT = (
    "AutocastKwargs", "DistributedDataParallelKwargs", "GradScalerKwargs", "GradientAccumulationPlugin",
    "InitProcessGroupKwargs", "ProfileKwargs", "TorchDynamoPlugin",
)  # fmt: skip
_RECIPES = ("AORecipeKwargs", "FP8RecipeKwargs", "MSAMPRecipeKwargs", "TERecipeKwargs")
HANDLERS = dict.fromkeys(_EXACT, "") | dict.fromkeys(_RECIPES, _FP8)
"""Class of accelerate.utils that adjusts an Accelerator -> why it is refused; "" if it continues exactly."""


def accelerator_faults(accelerator: Any) -> Iterator[str]:
    """Yield one line for each setting of an Accelerator that does not work with titan_ckpt."""
    state = accelerator.state
    kind = state.distributed_type.value
    if kind == "DEEPSPEED":
        yield (
            "DeepSpeed: its engine keeps weights and optimizer state in partitions of its own: use FSDP2 "
            "(fsdp_version=2), or DeepSpeed's own checkpoints"
        )
    elif kind == "FSDP" and state.fsdp_plugin.fsdp_version == 1:
        yield (
            "FSDP1: it flattens parameters, so none of them has a shard with a name: use FSDP2, "
            'FullyShardedDataParallelPlugin(fsdp_version=2), in a Trainer fsdp_config={"version": 2}, or '
            "fsdp_version: 2 in the file of accelerate"
        )
    elif kind not in WORKS:
        yield f"{kind}: only DDP, FSDP2 and a single process are supported"
    parallel = accelerator.parallelism_config
    if parallel is not None and (parallel.cp_enabled or parallel.sp_enabled):
        yield "parallelism_config: context and sequence parallelism were not proved to resume exactly: use TP and FSDP2"
    handlers = [value for value in vars(accelerator).values() if isinstance(value, KwargsHandler)]
    for name in (type(handler).__name__ for handler in handlers):
        if reason := HANDLERS.get(name, "it was not proved to continue exactly after a resume: leave it out"):
            yield f"{name}: {reason}"
    has_recipe = any(type(handler).__name__ in _RECIPES for handler in handlers)
    if getattr(state, "mixed_precision", "no") == "fp8" and not has_recipe:
        yield f"mixed_precision fp8: {_FP8}"
    hook = getattr(accelerator.ddp_handler, "comm_hook", None)
    if hook is not None and "power_sgd" in hook.value:
        yield (
            f"DistributedDataParallelKwargs: comm_hook {hook.value}: it keeps the errors of its compression, which no "
            "step holds: use DDPCommunicationHookType.BF16, or leave it out"
        )
