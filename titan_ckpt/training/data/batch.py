"""Batches: what a model is trained on, how sequences become one, and the check of the first one.

A batch is a dict with `tokens` and `labels`, both (batch, sequence) int64. `labels[:, i]` is the token that the model
learns to predict after `tokens[:, i]`, or IGNORED: labels are shifted already. Other entries, nested ones too, go to
the device as they are, and are left to your own `compute_loss`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from titan_ckpt.errors import DataError

IGNORED = -100
"""Label of a token without a loss."""
Batch = dict[str, Any]
"""`tokens` and `labels`, and whatever your own data adds."""


def collate(samples: Sequence[Batch], length: int | None = None) -> Batch:
    """Return sequences as one batch, each padded at its end to the longest or to `length`.

    Padding is token 0 with label IGNORED. Causal attention lets no token see what comes after it, so padding changes no
    logit of a sequence.
    """
    longest = length or max(len(sample["tokens"]) for sample in samples)
    batch = {name: _joined([sample[name] for sample in samples]) for name in samples[0] if name not in _PADDING}
    for name, padding in _PADDING.items():
        rows = [F.pad(sample[name], (0, longest - len(sample[name])), value=padding) for sample in samples]
        batch[name] = torch.stack(rows)
    return batch


_PADDING = {"tokens": 0, "labels": IGNORED}


def _joined(values: list[Any]) -> Any:
    """Return one entry of all samples: a dict of its parts, a tensor of equal tensors, or the list."""
    if isinstance(values[0], Mapping):
        return {name: _joined([value[name] for value in values]) for name in values[0]}
    if isinstance(values[0], torch.Tensor) and len({value.shape for value in values}) == 1:
        return torch.stack(values)
    return values


def without_labels(sample: Batch) -> Batch:
    """Return a sequence that fills a batch and has no loss."""
    return sample | {"labels": torch.full_like(sample["labels"], IGNORED)}


def filled(batches: Sequence[Batch], num_rows: int) -> Batch:
    """Return batches of one length as one of `num_rows` sequences, filled with those that have no loss."""
    joined = {name: torch.cat([batch[name] for batch in batches]) for name in _PADDING}
    missing = max(num_rows - len(joined["tokens"]), 0)
    return {name: F.pad(value, (0, 0, 0, missing), value=_PADDING[name]) for name, value in joined.items()}


def to_device(value: Any, device: torch.device) -> Any:
    """Return a batch, or a part of one, with all its tensors on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {name: to_device(part, device) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [to_device(part, device) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)  # a named tuple takes each
    return value


def checked(batches: Iterator[Batch], vocab_size: int) -> Iterator[Batch]:
    """Yield the batches; the first one is checked. Raises: DataError listing all that a batch must be and is not."""
    for number, batch in enumerate(batches, 1):
        if number == 1 and (problems := [*batch_problems(batch, vocab_size)]):
            raise DataError([f"data: the first batch: {problem}" for problem in problems])
        yield batch


def batch_problems(batch: Any, vocab_size: int) -> Iterator[str]:
    """Yield what is wrong with a batch."""
    if not isinstance(batch, Mapping):
        yield f'expected a dict with "tokens" and "labels", found a {type(batch).__name__}'
        return
    missing = [name for name in _PADDING if name not in batch]
    if missing:
        yield f"{' and '.join(missing)} missing; it has {', '.join(map(str, batch)) or 'nothing'}"
        return
    tokens, labels = batch["tokens"], batch["labels"]
    wrong = False
    for name, value in (("tokens", tokens), ("labels", labels)):
        found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        if not isinstance(value, torch.Tensor) or value.dtype != torch.int64 or value.dim() != 2:
            yield f"{name}: expected an int64 tensor (batch, sequence), found {found}"
            wrong = True
    if wrong:
        return
    if tokens.shape != labels.shape:
        yield f"labels: expected the shape of tokens, {tuple(tokens.shape)}, found {tuple(labels.shape)}"
        return
    learned = labels[labels != IGNORED]
    for name, value in (("tokens", tokens), ("labels", learned)):
        if value.numel() and not 0 <= int(value.min()) <= int(value.max()) < vocab_size:
            also = f", or {IGNORED} for no loss" if name == "labels" else ""
            yield (
                f"{name}: expected ids from 0 to {vocab_size - 1}, the model's vocabulary{also}; found "
                f"{int(value.min())} to {int(value.max())}"
            )
    same = tokens[labels != IGNORED]
    if len(same) > 1 and torch.equal(same, learned) and len(same.unique()) > 1:
        yield (
            "labels: they are the tokens themselves; expected labels[:, i] to be the token after tokens[:, i]: give "
            "sequence[:-1] as tokens and sequence[1:] as labels"
        )
