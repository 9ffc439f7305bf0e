"""The [parallel] table. Owns its fields and the rules between them; degrees.py checks what a model allows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from titan_ckpt.config import NonEmpty, PositiveInt
from titan_ckpt.encoding.toml import Check, Checked

Schedule = Literal["GPipe", "1F1B", "Interleaved1F1B"]
_DEGREES = (
    "data_parallel_replicate",
    "data_parallel_shard",
    "tensor_parallel",
    "context_parallel",
    "expert_parallel",
    "pipeline_parallel",
)
ShardDegree = Annotated[int, Check("a positive number, or -1 for all ranks that are left", lambda x: x > 0 or x == -1)]


@dataclass(frozen=True, slots=True)
class ParallelConfig(Checked):
    """Degrees of parallelism; their product without expert_parallel is the number of ranks. Names are torchtitan's."""

    FOREIGN_KEYS: ClassVar[Mapping[str, str]] = {
        **{f"{name}_degree": f"torchtitan's key; here: parallel.{name}" for name in _DEGREES},
        "pipeline_parallel_schedule": "torchtitan's key; here: parallel.pipeline_schedule",
        "pipeline_parallel_microbatch_size": "torchtitan's key; here: parallel.pipeline_microbatches, their number",
        "fsdp_reshard_after_forward": "torchtitan's key; here: parallel.reshard_after_forward",
        "enable_async_tensor_parallel": "torchtitan's key; here: nothing",
    }

    data_parallel_replicate: PositiveInt = 1
    """Copies of the model, each trained on different data. HSDP if this and the shard degree are above 1."""
    data_parallel_shard: ShardDegree = -1
    """Ranks over which FSDP2 shards the parameters, gradients and optimizer state of one copy."""
    reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Whether FSDP2 frees the parameters that it has gathered for a layer until the backward pass gathers them again;
    "default": for all layers, and not for what is around them. With "never" and accumulation it frees them after the
    last backward pass of a step, as a pipeline always does."""
    tensor_parallel: PositiveInt = 1
    """Ranks that share every matrix multiplication: each has some of the heads and hidden rows."""
    sequence_parallel: bool = True
    """With tensor_parallel above 1, also distribute the tokens between those multiplications."""
    context_parallel: PositiveInt = 1
    """Ranks that share every sequence."""
    expert_parallel: PositiveInt = 1
    """Ranks that share the experts of each layer. They are part of data_parallel_shard, which this must divide."""
    pipeline_parallel: PositiveInt = 1
    """Ranks that each hold some of the layers."""
    pipeline_schedule: Schedule = "1F1B"
    """Order of forward and backward passes; "Interleaved1F1B" gives each rank two stages."""
    pipeline_microbatches: PositiveInt | None = None
    """Pieces of training.batch_size that pass through the pipeline one after the other. Absent: number of stages."""
    activation_checkpoint: Literal["none", "full", "selective"] = "none"
    """Recompute in the backward pass: "full" whole layers, "selective" everything except matrix multiplications,
    attention and communication."""
    compile: bool = False
    """Compile each layer with torch.compile; not possible with tensor_parallel."""
    backend: NonEmpty | None = None
    """Backend of torch.distributed for tensors on the run's device: "gloo", "nccl", "mpi", "ucc" or one that is
    installed. On CUDA, tensors in host memory always go by gloo. Absent: nccl on CUDA, else gloo."""

    def problems(self) -> Iterator[str]:
        if self.compile and self.tensor_parallel > 1:
            yield "compile: torch.compile cannot differentiate layers under tensor_parallel; choose one of them"

    @property
    def num_stages(self) -> int:
        """Return the number of stages of the whole pipeline; 1 without a pipeline."""
        if self.pipeline_parallel == 1:
            return 1
        return self.pipeline_parallel * (2 if self.pipeline_schedule == "Interleaved1F1B" else 1)

    @property
    def num_microbatches(self) -> int:
        """Return the number of pieces into which a batch is cut for the pipeline."""
        return self.pipeline_microbatches or self.num_stages
