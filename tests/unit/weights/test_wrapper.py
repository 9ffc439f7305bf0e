"""ModelWrapper: names, ties, modes, and what aliases what."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests import world
from titan_ckpt.errors import ConverterError, StateEncodingError
from titan_ckpt.weights.wrapper import ModelWrapper


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("cache", torch.ones(2), persistent=False)


def test_a2_values_alias_the_live_parameters() -> None:
    """A load fills the model by filling these tensors, in every mode; nothing is kept between two calls."""
    model = nn.Linear(2, 2)
    wrapper = ModelWrapper([model])
    wrapper.state_dict()["weight"].fill_(7)
    assert (model.weight == 7).all()
    for new in (nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(4, 2))):
        model.weight = new
        for mode in ("full", "base", "export"):
            assert wrapper.state_dict(mode)["weight"].data_ptr() == new.data_ptr()
    model.register_buffer("late", torch.zeros(1))
    assert "late" in wrapper.state_dict()


def test_a_tied_weight_appears_once_under_its_first_name() -> None:
    """The alias is known and not saved; non-persistent buffers are not either."""
    wrapper = ModelWrapper([Tied()])
    assert sorted(wrapper.state_dict()) == ["embed.weight", "kept"]
    assert wrapper.tied == {"head.weight": "embed.weight"}


@pytest.mark.parametrize("wrap", ["compile", "checkpoint", "both"])
def test_wrappers_leave_no_trace_in_names(wrap: str) -> None:
    """torch.compile and activation checkpointing do not reach a checkpoint."""
    layer: nn.Module = nn.Linear(2, 2)
    if wrap != "compile":
        layer = checkpoint_wrapper(layer)
    model: Any = nn.Sequential(layer)
    if wrap != "checkpoint":
        model = torch.compile(model, backend="eager")
    wrapper = ModelWrapper([model])
    assert list(wrapper.state_dict()) == ["0.weight", "0.bias"]
    assert sorted(wrapper.parameter_names().values()) == ["0.bias", "0.weight"]


class OwnsAdapters(world.Bare):
    """Owns names that end in lora, and leaves them out of exports."""

    def key_filter(self, fqn: str) -> bool:
        return fqn.endswith("lora")

    def state_dict_transform(self, state_dict: dict[str, Any], last_step: bool) -> dict[str, Any]:
        return {k: v for k, v in state_dict.items() if not (last_step and self.key_filter(k))}


def test_a2_modes_split_what_converters_own() -> None:
    """full = base + owned, disjoint; export is what the transform leaves."""
    model = nn.Linear(2, 2)
    model.register_parameter("lora", nn.Parameter(torch.zeros(2)))
    wrapper = ModelWrapper([model], OwnsAdapters())
    full, base, owned = wrapper.state_dict("full"), wrapper.state_dict("base"), wrapper.owned_state_dict()
    assert list(full) == ["weight", "bias", "lora"]
    assert list(base) == ["weight", "bias"]
    assert list(owned) == ["lora"]
    assert list(wrapper.state_dict("export")) == ["weight", "bias"]


def test_parts_that_share_a_name_are_refused() -> None:
    """Two pipeline stages with the same parameter name would overwrite each other."""
    with pytest.raises(ConverterError, match=r"'weight'"):
        ModelWrapper([nn.Linear(2, 2), nn.Linear(2, 2)]).state_dict()


UNFIT: dict[str, Callable[[], torch.Tensor]] = {
    "torch.sparse_coo": lambda: torch.eye(3).to_sparse(),
    "torch.sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    r"expanded to \[3, 4\]": lambda: torch.arange(4.0).expand(3, 4),
    "torch.qint8": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fault", list(UNFIT))
def test_tensors_that_no_checkpoint_can_hold_are_listed_before_training(fault: str, tmp_path: Path) -> None:
    """Sparse, nested, quantized and expanded tensors are named when the manager is made; temporary ones are not."""
    model = nn.Linear(2, 2)
    model.register_buffer("temporary", UNFIT[fault](), persistent=False)
    world.manager(tmp_path, model).close()
    model.register_buffer("odd", UNFIT[fault]())
    model.register_buffer("odd_too", UNFIT[fault]())
    with pytest.raises(StateEncodingError, match=rf"2 tensors .*: odd \({fault}\); odd_too \({fault}\)\. Keep them"):
        world.manager(tmp_path, model)


def test_a_tensor_whose_only_row_is_expanded_is_plain(tmp_path: Path) -> None:
    """A dim of one element has any stride, so positions of shape (1, n) are saved and loaded."""
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    model.register_buffer("positions", torch.arange(5).expand(1, -1))
    other.register_buffer("positions", torch.zeros(5, dtype=torch.int64).expand(1, -1))
    world.save(world.manager(tmp_path, model, async_mode="disabled"))
    world.load(world.manager(tmp_path, other))
    assert torch.equal(other.get_buffer("positions"), torch.arange(5)[None])
