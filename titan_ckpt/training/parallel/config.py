"""The [parallel] table. Owns its fields and the rules between them; what a model allows is checked in degrees.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from titan_ckpt.config import PositiveInt, validate
from titan_ckpt.strict_toml import Check

Schedule = Literal["GPipe", "1F1B", "Interleaved1F1B"]
ShardDegree = Annotated[int, Check("a positive number, or -1 for all ranks that are left", lambda x: x > 0 or x == -1)]


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Degrees of parallelism; their product is the number of ranks. Names and meanings are torchtitan's."""

    data_parallel_replicate: PositiveInt = 1
    """Copies of the model, each trained on its own data: above 1 with a shard degree above 1 this is HSDP."""
    data_parallel_shard: ShardDegree = -1
    """Ranks that one copy's parameters, gradients and optimizer state are sharded over by FSDP2."""
    tensor_parallel: PositiveInt = 1
    """Ranks that share every matrix multiplication: heads and hidden rows are dealt out."""
    sequence_parallel: bool = True
    """Where tensor_parallel is above 1, also deal out the tokens between those multiplications."""
    context_parallel: PositiveInt = 1
    """Ranks that share every sequence."""
    expert_parallel: PositiveInt = 1
    """Ranks that share the experts of each layer; taken from data_parallel_shard, which it divides."""
    pipeline_parallel: PositiveInt = 1
    """Ranks that each hold some of the layers."""
    pipeline_schedule: Schedule = "1F1B"
    """The order of forward and backward passes; "Interleaved1F1B" gives a rank several stages."""
    pipeline_stages_per_rank: PositiveInt | None = None
    """Absent: 2 with "Interleaved1F1B", else 1."""
    pipeline_microbatches: PositiveInt | None = None
    """Pieces of training.batch_size that are in the pipeline one after the other. Absent: as many as stages."""
    activation_checkpoint: Literal["none", "full", "selective"] = "none"
    """Recompute in the backward pass: "full" whole layers, "selective" all but their matrix multiplications."""
    compile: bool = False
    """Compile each layer with torch.compile; not with tensor_parallel."""
    compile_backend: Literal["inductor", "aot_eager"] = "inductor"
    """What torch.compile makes of a layer; "aot_eager" traces it and generates no code, to find what goes wrong."""

    def __post_init__(self) -> None:
        validate(self)

    def problems(self) -> Iterator[str]:
        per_rank = self.pipeline_stages_per_rank
        if self.pipeline_schedule == "Interleaved1F1B" and per_rank == 1:
            yield 'pipeline_stages_per_rank: "Interleaved1F1B" needs 2 or more; with 1, choose "1F1B"'
        if self.pipeline_schedule != "Interleaved1F1B" and per_rank is not None and per_rank > 1:
            yield f'pipeline_stages_per_rank: {per_rank} need pipeline_schedule = "Interleaved1F1B"'
        if self.compile and self.tensor_parallel > 1:
            yield "compile: torch.compile cannot differentiate layers under tensor_parallel; choose one of them"

    @property
    def num_stages(self) -> int:
        """Return the stages of the whole pipeline, 1 where there is none."""
        if self.pipeline_parallel == 1:
            return 1
        default = 2 if self.pipeline_schedule == "Interleaved1F1B" else 1
        return self.pipeline_parallel * (self.pipeline_stages_per_rank or default)

    @property
    def num_microbatches(self) -> int:
        """Return the pieces that a batch is cut in for the pipeline."""
        return self.pipeline_microbatches or self.num_stages
