"""Llama 3 without any other library: what test_own_models.py has not for every model."""

from __future__ import annotations

import pytest
import torch

from titan_ckpt.models.llama3 import FLAVORS, Llama3


def test_debug_flavors_span_half_a_million_to_twenty_million_parameters() -> None:
    """Small models exist in the sizes that fit a laptop's test run."""
    sizes = {}
    for name, config in FLAVORS.items():
        if name.startswith("debug"):
            sizes[name] = sum(p.numel() for p in Llama3(config).parameters())
    assert list(sizes.values()) == sorted(sizes.values())
    assert 0.4e6 < min(sizes.values()) < 0.6e6
    assert 15e6 < max(sizes.values()) < 21e6


def test_a_sequence_longer_than_the_table_is_refused() -> None:
    """The message names both lengths."""
    model = Llama3(FLAVORS["debug-0.5m"])
    with pytest.raises(ValueError, match=r"1025 tokens are longer than max_seq_len 1024"):
        model(torch.zeros(1, 1025, dtype=torch.long))


def test_removed_layers_leave_the_names_of_the_others() -> None:
    """Two stages cut from one model hold disjoint names that together are the whole model's, and compute the same."""
    config = FLAVORS["debug-2m"]
    whole = Llama3(config)
    whole.init_weights()
    first, second = Llama3(config), Llama3(config)
    for stage in (first, second):
        stage.load_state_dict(whole.state_dict())
    for i in range(4):
        del (second if i < 2 else first).layers[str(i)]
    first.norm = first.output = None
    second.tok_embeddings = None
    assert set(first.state_dict()).isdisjoint(second.state_dict())
    assert set(first.state_dict()) | set(second.state_dict()) == set(whole.state_dict())
    tokens = torch.randint(0, 2048, (1, 9))
    assert torch.equal(second(first(tokens)), whole(tokens))
