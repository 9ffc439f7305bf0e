"""The training state of a run by torchtitan's flat names, as its own checkpointer stores it in a DCP folder.

Owns the names that loading/dcp_state.py reads. Source: torchtitan 0.3, components/checkpointer/dcp.py and
components/optimizer/utils.py.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash

from titan_ckpt.components import optimizer_content
from titan_ckpt.components.run_state import RunState
from titan_ckpt.distributed.replicas import digest_of
from titan_ckpt.encoding import typed_json
from titan_ckpt.errors import ExportError, listed
from titan_ckpt.geometry.requests import StoredValue
from titan_ckpt.types import StateDict
from titan_ckpt.weights.inner_tensors import is_made_of_others

_Leaves = Iterator[tuple[tuple[str, ...], Any]]
_IN_GROUP = frozenset({"params", "param_names"})


def flat_tensors(run: RunState) -> StateDict:
    """Return the tensors of the training state: live memory of the optimizers, and those of other states."""
    return {".".join(path): value for path, value in _leaves(run) if isinstance(value, torch.Tensor)}


def state_digests(run: RunState) -> dict[str, str]:
    """Return a digest of each tensor in user states that is not sharded: ranks must have them alike."""
    leaves = [leaf for name, state in run.states.items() for leaf in _nested((name,), state.state_dict())]
    plain = {path: v for path, v in leaves if type(v) is torch.Tensor and v.layout is torch.strided}
    return {".".join(path): digest_of(value.detach()) for path, value in plain.items()}


def flat_values(run: RunState, model_values: Mapping[str, Any]) -> dict[str, StoredValue]:
    """Return everything else, as it is written. `model_values`: what the model's own state_dict() returns of it.

    Raises: ExportError listing values that are no plain data, because torchtitan would have to run code to read them.
    """
    made: dict[str, StoredValue] = {}
    faults: list[str] = []
    known: dict[bytes, bytes] = {}
    values = {(name,): value for name, value in (run.model.extra_state() | dict(model_values)).items()}
    for path, value in [*values.items(), *_leaves(run)]:
        name = ".".join(path)
        if isinstance(value, torch.Tensor) and path not in values:
            continue
        try:
            text = typed_json.dumps(value)
            if text not in known:  # thousands of parameters have equal hyperparameters
                known[text] = _pickled(value)
        except Exception as error:
            faults.append(f"{name} ({str(error) or type(error).__name__:.120})")
            continue
        digest = None if path[0] == "dataloader" else xxhash.xxh3_64_hexdigest(text)
        made[name] = StoredValue(path, known[text], digest)
    if faults:
        raise ExportError(f"not plain data: {listed(faults, ', ', ' ')}. Leave training_state out of the export")
    return made


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    torch.load(buffer, weights_only=True)  # so that a reader who executes nothing reads it too
    return buffer.getvalue()


def _leaves(run: RunState) -> _Leaves:
    """Yield (path, value) of the training state; a RunState has forgotten the objects that are left out."""
    yield from _optimizers(run)
    if run.lr_schedulers:
        states = [scheduler.state_dict() for scheduler in run.lr_schedulers]
        if len({typed_json.dumps(state) for state in states}) > 1:
            raise ExportError(f"its {len(states)} schedulers differ, and torchtitan's checkpoints hold one")
        yield from _nested(("lr_scheduler",), states[0])
    for name, state in run.states.items():
        yield from _nested((name,), state.state_dict())
    if run.dataloader is not None:
        yield from _position(run)


def _optimizers(run: RunState) -> _Leaves:
    names = run.model.parameter_names()
    for wrapper in run.optimizers:
        optimizer = optimizer_content.innermost(wrapper)
        content = optimizer_content.read(optimizer)
        if content.beside or optimizer_content.kept_by(wrapper):
            kind = type(optimizer).__name__
            raise ExportError(f"{kind} keeps state beside its parameters, which torchtitan's names have no place for")
        for live, group in zip(optimizer.param_groups, content.groups, strict=True):
            for parameter in live["params"]:
                fqn = names[parameter]
                state = _nested(("optimizer", f"state.{fqn}"), content.state.get(parameter, {}))
                for (head, *rest), value in state:
                    if is_made_of_others(value):
                        raise ExportError(f"the optimizer state of {fqn} is quantised; DCP folders hold plain tensors")
                    yield (head, ".".join(rest)), value
                for key, value in group.items():
                    if key not in _IN_GROUP:
                        yield ("optimizer", f"param_groups.{fqn}.{key}"), value


def _position(run: RunState) -> _Leaves:
    """Yield the data position. Raises: ExportError for one that is not stored by data-parallel rank."""
    assert run.dataloader is not None
    state, own = run.dataloader.state_dict(), run.data_rank
    known = {f"dp_rank_{own.rank}", "world_size"}
    if own.size > 1 and state.keys() != known:
        raise ExportError(
            f"the data position has {listed(sorted(map(str, state)), ', ', ' ')}, expected {', '.join(sorted(known))}: "
            "a DCP folder stores each name once, so each data-parallel rank needs its own"
        )
    yield from _nested(("dataloader",), state)


def _nested(path: tuple[str, ...], value: Any) -> _Leaves:
    if isinstance(value, Mapping) and (value or len(path) == 1):
        for key, inner in value.items():
            yield from _nested((*path, str(key)), inner)
    else:
        yield path, value
