"""torchtitan's adapter of gpt_oss, with the experts that torchtitan 0.3's own one loses.

Owns the names and the arrangement of the experts alone. torchtitan 0.3 renamed their parameters and not the adapter, so
its to_hf() drops them, and its own load leaves them at their initial values. Its keys are those of MXFP4 codes; a
folder that transformers writes, and a reader of codes, have each expert's matrix transposed and under a shorter key.
Source: torchtitan 0.3, models/gpt_oss/state_dict_adapter.py; transformers, models/gpt_oss/modeling_gpt_oss.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CODES = "_blocks"
_RENAMED = {
    "mlp1_weight_EGD": "mlp1_weight", "mlp1_bias_EG": "mlp1_bias", "mlp2_weight_EDF": "mlp2_weight",
    "mlp2_bias_ED": "mlp2_bias",
}  # fmt: skip
"""Last part of a parameter's name -> as the adapter has it."""


def with_experts(adapter: Any) -> Any:
    """Return an adapter that has all of gpt_oss; any other adapter as it is."""
    keys = getattr(adapter, "from_hf_map", {})
    return _GptOss(adapter) if any(key.endswith(f"experts.gate_up_proj{_CODES}") for key in keys) else adapter


class _GptOss:
    """The adapter behind the names of the parameters and of the folders."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        known = {name.rpartition(".")[2] for name in inner.from_hf_map.values()}
        self._old = {new: old for new, old in _RENAMED.items() if old in known}
        self._new = {old: new for new, old in self._old.items()}

    def to_hf(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tensors as folders hold them."""
        made: dict[str, Any] = self.inner.to_hf({_renamed(name, self._old): v for name, v in values.items()})
        return {k.removesuffix(_CODES): v.transpose(-1, -2) if k.endswith(_CODES) else v for k, v in made.items()}

    def from_hf(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tensors as the model holds them."""
        coded = {key.rpartition(".")[2].removesuffix(_CODES) for key in self.inner.from_hf_map if key.endswith(_CODES)}
        turned = {k: k.rpartition(".")[2] in coded for k in values}
        taken = {k + _CODES if turned[k] else k: v.transpose(-1, -2) if turned[k] else v for k, v in values.items()}
        made: dict[str, Any] = self.inner.from_hf(taken)
        return {_renamed(name, self._new): v for name, v in made.items()}


def _renamed(name: str, names: Mapping[str, str]) -> str:
    before, _, last = name.rpartition(".")
    return f"{before}.{names[last]}" if last in names else name
