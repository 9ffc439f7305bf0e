"""The first lines of a run's log: what is trained, on what, where, and from which step on; the last: what is left."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields

from torch import nn

from titan_ckpt.errors import counted
from titan_ckpt.models.language_model import LanguageModel
from titan_ckpt.training.callbacks.base import Trainer
from titan_ckpt.training.data.sequences import DummyDataset, IndexedDataset


def count_parameters(parameters: Iterable[nn.Parameter]) -> tuple[int, int]:
    """Return how many elements the parameters of a whole model have, and how many of them are trained."""
    each = {id(p): p for p in parameters}.values()
    return sum(p.numel() for p in each), sum(p.numel() for p in each if p.requires_grad)


def header(trainer: Trainer) -> Iterator[str]:
    """Yield a line for model, data and device each, when everything is built."""
    config, ranks = trainer.config, trainer.ranks
    whole, trained = trainer.num_parameters
    name = config.model.name if config.model.flavor is None else f"{config.model.name} {config.model.flavor}"
    share = "all trained" if trained == whole else f"{short(trained)} of them trained"
    kinds = [str(c["kind"]) for c in trainer.converters.describe()] if trainer.converters is not None else []
    source = "" if config.model.folder is None else f" of {config.model.folder}"
    built = f"built on {trainer.built_on}"
    yield f"model   {', '.join([f'{name}{source}', f'{short(whole)} parameters', share, built, *kinds])}"
    yield f"data    {_data(trainer)}"
    degrees = [f"{f.name} {d}" for f in fields(ranks.degrees) if (d := getattr(ranks.degrees, f.name)) > 1]
    many = "1 rank" if ranks.size == 1 else f"{ranks.size} ranks ({', '.join(degrees)})"
    yield f"steps   of {_optimizer(trainer)}"
    yield f"device  {trainer.state.numerics['device']}, {many}, {config.training.compute_dtype}"


def position(trainer: Trainer) -> str:
    """Return the line that says where the run begins, after the load."""
    step, epochs = trainer.state.step, trainer.config.training.epochs
    if not trainer.num_steps:
        return f"run     {trainer.config.output_folder}, saves the initial model as step 0"
    begins = f"goes on after step {step}" if step else "starts at step 1"
    passes = "" if epochs is None else f", at most {counted(epochs, 'epoch')}"
    return f"run     {trainer.config.output_folder}, {begins} of {trainer.num_steps}{passes}"


def ending(trainer: Trainer) -> Iterator[str]:
    """Yield the lines that say where the newest step and the newest exports of a run are that has ended."""
    manager, saved = trainer.manager, trainer.manager.completed.saved
    yield f"ended   after step {trainer.state.step} of {trainer.num_steps}"
    yield "saved   nothing" if saved is None else f"saved   {manager.folder / f'step-{saved}'}"
    for export, folder in manager.exported.items():
        kind = {"hf": "for transformers", "peft": "the adapter, for PEFT", "dcp": "for DCP"}[export.container]
        yield f"export  {folder}, {kind}"


def short(number: int) -> str:
    """Return a large number in three digits."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def _optimizer(trainer: Trainer) -> str:
    norm = trainer.config.training.max_grad_norm
    clipped = "gradients are not clipped (training.max_grad_norm)" if norm is None else f"gradients clipped to {norm:g}"
    return f"{type(trainer.optimizer).__name__}, {clipped}"


def _data(trainer: Trainer) -> str:
    data, per_step = trainer.config.data, trainer.global_batch_size
    known = isinstance(trainer.dataset, IndexedDataset) and not isinstance(trainer.dataset, DummyDataset)
    count = f"{trainer.dataset.num_sequences:,} " if known else ""  # type: ignore[union-attr]
    kind = "sequences of" if data.messages is None else "conversations of up to"
    what = f"{kind} {data.sequence_length} tokens" if isinstance(trainer.model, LanguageModel) else "samples"
    return f"{data.dataset or data.corpus}, {count}{what}, {per_step} a step"
