"""The degrees of parallelism of a run, a rank's place on each axis, and the check that everything fits. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from titan_ckpt.errors import ConfigError, collected, refuse
from titan_ckpt.models.config import DecoderConfig
from titan_ckpt.models.qwen3_moe import Qwen3MoeConfig
from titan_ckpt.training.config import RunConfig, TrainingConfig
from titan_ckpt.training.tables import ParallelConfig

AXES = ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")
"""The axes from outermost to innermost: neighbouring ranks, which communicate fastest, share matrices. `dp_shard` times
`ep` is data_parallel_shard."""
FLAT = {"fsdp": ("dp_shard", "ep", "cp"), "fsdp_of_experts": ("dp_shard", "cp")}
"""Axes that FSDP2 uses as one: "fsdp" shards all parameters except experts, "fsdp_of_experts" shards experts."""


@dataclass(frozen=True, slots=True)
class Degrees:
    """The number of ranks on each axis; also used for the place of a rank, its index on each axis."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1

    def of(self, axis: str) -> int:
        """Return the number of ranks of an axis of AXES or FLAT."""
        return prod(getattr(self, name) for name in FLAT.get(axis, (axis,)))

    @property
    def data_size(self) -> int:
        """Return how many ranks see different sequences."""
        return self.dp_replicate * self.dp_shard * self.ep

    def place(self, rank: int) -> Degrees:
        """Return the index of a rank on each axis."""
        place = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, self.of(axis))
        return Degrees(**place)

    def data_rank(self, rank: int) -> int:
        """Return a rank's number among the ranks that see different sequences."""
        place = self.place(rank)
        return (place.dp_replicate * self.dp_shard + place.dp_shard) * self.ep + place.ep


def micro_batches(training: TrainingConfig, data_size: int) -> int:
    """Return the number of micro-batches per optimizer step on each of `data_size` ranks with different data.

    Raises: ConfigError if they do not make up the global batch.
    """
    if (whole := training.global_batch_size) is None:
        return training.accumulation
    at_once = training.batch_size * data_size
    if whole % at_once:
        ranks = f"each of {data_size} ranks with different data" if data_size > 1 else "one rank"
        near = [n for n in (whole // at_once * at_once, -(-whole // at_once) * at_once) if n]
        misfit = f"{whole} sequences are no batches of training.batch_size {training.batch_size} on {ranks}"
        expected = f"expected a multiple of {at_once}, such as {' or '.join(map(str, near))}"
        raise ConfigError([f"training.global_batch_size: {misfit}; {expected}"])
    return whole // at_once


def find_degrees(config: RunConfig, world_size: int, model: Any, *, parallelizes_itself: bool = False) -> Degrees:
    """Return the degrees of a run on `world_size` ranks.

    `model`: the shape from registry.py; only a DecoderConfig allows more than data parallelism. `parallelizes_itself`:
    a function of the model's own distributes it, and knows what fits; a pipeline is not among that.
    Raises: ConfigError listing everything that does not fit.
    """
    parallel, training = config.parallel, config.training
    degrees, problems = _of_world(parallel, world_size)
    of_training: list[str] = []
    accumulation = training.accumulation
    if not problems:
        with collected(of_training):
            accumulation = micro_batches(training, degrees.data_size)
    problems += _of_batch(parallel, training.batch_size, accumulation, config.data.sequence_length)
    if isinstance(model, DecoderConfig) and not parallelizes_itself:
        problems += _of_model(parallel, model)
    else:
        others = () if parallelizes_itself else ("tensor_parallel", "context_parallel", "expert_parallel")
        unsupported = (*others, "pipeline_parallel")
        problems += [
            f"{name}: a model of transformers, or of your own, is sharded by FSDP2 alone; use data_parallel_shard and "
            'data_parallel_replicate, or a native architecture such as "llama3"'
            for name in unsupported
            if getattr(parallel, name) > 1
        ]
    refuse(*(f"parallel.{problem}" for problem in problems), *of_training)
    return degrees


def _of_world(parallel: ParallelConfig, world_size: int) -> tuple[Degrees, list[str]]:
    problems = []
    names = ("pipeline_parallel", "data_parallel_replicate", "context_parallel", "tensor_parallel")
    fixed: dict[str, int] = {name: getattr(parallel, name) for name in names}
    rest = prod(fixed.values())
    shard = parallel.data_parallel_shard
    named = " x ".join(f"{name} {degree}" for name, degree in fixed.items() if degree > 1)
    if shard == -1:
        shard = max(1, world_size // rest)
        if world_size % rest or world_size < rest:
            product = named if " x " not in named else f"{named} = {rest}"
            count = max(1, round(world_size / rest)) * rest
            problems.append(
                f"data_parallel_shard: {product} needs a multiple of {rest} ranks, and this run has {world_size}: "
                f"start it with torchrun --nproc-per-node {count}, or choose smaller degrees"
            )
    elif shard * rest != world_size:
        named = " x ".join(filter(None, [named, f"data_parallel_shard {shard}"]))
        problems.append(
            f"data_parallel_shard: {named} = {shard * rest} ranks, and this run has {world_size}: start "
            f"it with torchrun --nproc-per-node {shard * rest}, or set data_parallel_shard = -1"
        )
    ep = parallel.expert_parallel
    if shard % ep and not problems:
        problems.append(
            f"expert_parallel: {ep} does not divide data_parallel_shard {shard}, which it is taken from; choose "
            f"a divisor of {shard}"
        )
    degrees = Degrees(
        parallel.pipeline_parallel, parallel.data_parallel_replicate, max(1, shard // ep), ep,
        parallel.context_parallel, parallel.tensor_parallel,
    )  # fmt: skip
    return degrees, problems


def _of_batch(parallel: ParallelConfig, batch_size: int, accumulation: int, sequence_length: int) -> Iterator[str]:
    cp, tp = parallel.context_parallel, parallel.tensor_parallel
    pieces = cp * (tp if parallel.sequence_parallel else 1)
    if cp > 1 and sequence_length % (2 * cp):
        yield (
            f"context_parallel: twice {cp} does not divide data.sequence_length {sequence_length}; choose a length "
            f"that is a multiple of {2 * cp}"
        )
    elif sequence_length % pieces:
        yield (
            f"sequence_parallel: {pieces} pieces do not divide data.sequence_length {sequence_length}; choose another "
            "length, or sequence_parallel = false"
        )
    if parallel.pipeline_parallel == 1:
        return
    count = parallel.num_microbatches
    if batch_size % count:
        yield (
            f"pipeline_microbatches: {count} do not divide training.batch_size {batch_size}; set pipeline_microbatches "
            "to a divisor of it"
        )
    elif parallel.pipeline_schedule == "1F1B" and count * accumulation < parallel.num_stages:
        yield (
            f"pipeline_microbatches: 1F1B needs one for each of {parallel.num_stages} stages, found {count}; raise "
            "pipeline_microbatches or training.accumulation"
        )
    elif parallel.pipeline_schedule == "Interleaved1F1B" and count * accumulation % parallel.pipeline_parallel:
        yield (
            f"pipeline_microbatches: Interleaved1F1B needs a multiple of pipeline_parallel "
            f"{parallel.pipeline_parallel}, found {count * accumulation} in a step; raise pipeline_microbatches or "
            "training.accumulation to one"
        )


def _of_model(parallel: ParallelConfig, model: DecoderConfig) -> Iterator[str]:
    tp, ep, stages = parallel.tensor_parallel, parallel.expert_parallel, parallel.num_stages
    sizes = {"heads": model.num_heads, "key-value heads": model.num_kv_heads, "hidden rows": model.ffn_dim}
    experts = model.num_experts if isinstance(model, Qwen3MoeConfig) else 0
    if isinstance(model, Qwen3MoeConfig):
        sizes["hidden rows of an expert"] = model.expert_dim
    fits = f"; choose a degree that divides all of {', '.join(map(str, sizes.values()))}"
    yield from (f"tensor_parallel: {tp} does not divide the {n} {name}{fits}" for name, n in sizes.items() if n % tp)
    if model.vocab_size < tp:
        yield f"tensor_parallel: {tp} ranks are more than the vocabulary's {model.vocab_size} tokens; choose fewer"
    if ep > 1 and not experts:
        yield "expert_parallel: the model has no experts; leave it out"
    elif experts % ep:
        yield f"expert_parallel: {ep} does not divide the {experts} experts; choose a degree that does"
    if stages > model.num_layers:
        yield f"pipeline_parallel: {stages} stages are more than the {model.num_layers} layers; choose fewer"
    if stages > 1 and model.tie_embeddings:
        yield (
            "pipeline_parallel: the model's output is its embedding matrix (tie_word_embeddings), which the first and "
            "the last stage would both need; set pipeline_parallel = 1"
        )
