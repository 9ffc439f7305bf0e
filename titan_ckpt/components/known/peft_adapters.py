"""PEFT's adapters in a model: which kinds continue exactly after a resume, and what they keep beside the weights.

Owns the table of kinds. "" stands for what tests/zoo/test_peft_kinds.py has killed and resumed bit for bit; anything
else is the reason why it is refused and the next step. A kind that is not here is refused by name. Imports no PEFT.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from titan_ckpt.components import unsaved_state
from titan_ckpt.components.classes import class_name
from titan_ckpt.components.known.switches import Switches, is_of_peft, modules_of_peft, switches_of
from titan_ckpt.errors import LoadMismatchError, SaveError, listed
from titan_ckpt.types import Stateful
from titan_ckpt.weights.names import hidden_buffers

_CONFIGS = (
    "lora.LoraConfig adalora.AdaLoraConfig adaption_prompt.AdaptionPromptConfig beft.BeftConfig boft.BOFTConfig "
    "c3a.C3AConfig cartridge.CartridgeConfig cpt.CPTConfig deft.DeftConfig delora.DeloraConfig "
    "fourierft.FourierFTConfig frod.FrodConfig glora.GloraConfig gralora.GraloraConfig hira.HiraConfig hra.HRAConfig "
    "ia3.IA3Config lily.LilyConfig ln_tuning.LNTuningConfig loha.LoHaConfig lokr.LoKrConfig miss.MissConfig "
    "multitask_prompt_tuning.MultitaskPromptTuningConfig oft.OFTConfig osf.OSFConfig p_tuning.PromptEncoderConfig "
    "peanut.PeanutConfig poly.PolyConfig prefix_tuning.PrefixTuningConfig prompt_tuning.PromptTuningConfig "
    "psoft.PsoftConfig pvera.PveraConfig randlora.RandLoraConfig road.RoadConfig shadow.ShadowConfig shira.ShiraConfig "
    "supertuning.SupertuningConfig tinylora.TinyLoraConfig trainable_tokens.TrainableTokensConfig "
    "unilora.UniLoraConfig vblora.VBLoRAConfig vera.VeraConfig waveft.WaveFTConfig"
)
_VARIANTS = "DoraLinear DoraEmbedding ALoraLinear BdLoraLinear MiCALinear MiCAEmbedding KasaLinear"
_UNPROVED = "it was not proved to continue exactly after a resume: train with another kind of adapter"
KNOWN: Mapping[str, str] = {
    **{f"peft.tuners.{home}.config.{kind}": "" for home, kind in (name.split(".") for name in _CONFIGS.split())},
    "peft.tuners.adamss.config.AdamssConfig": _UNPROVED,
    "peft.tuners.xlora.config.XLoraConfig": _UNPROVED,
    **{f"peft.tuners.lora.variants.{name}Variant": "" for name in _VARIANTS.split()},
    **{
        f"peft.tuners.lora.variants.{name}Variant": _UNPROVED
        for name in ("ArrowLinear", "DoraConv1d", "DoraConv2d", "DoraConv3d", "QALoraLinear")
    },
    "peft.tuners.lora.variants.MontecloraLinearVariant": "it keeps random samples and their number in no step: leave "
    "monteclora_config out",
    "peft.tuners.lora.variants.VeloraLinearVariant": "no step says whether its projection was computed: leave "
    "velora_config out",
    "peft.optimizers.lorafa.LoraFAOptimizer": "",
    "peft.optimizers.riemannian.create_riemannian_optimizer.<locals>.RiemannianPreconditionedOptimizer": "",
}
"""Full name of the class of an adapter's config, of a variant of LoRA or of an optimizer -> "" or the reason."""

_STATE = "adapters of PEFT"
_SCORES = ("ipt", "exp_avg_ipt", "exp_avg_unc")
"""What AdaLoRA's RankAllocator computes from each step's gradients, by the names of parameters."""


def faults(models: Sequence[nn.Module], optimizers: Sequence[Any], allow: Collection[str]) -> Iterator[str]:
    """Yield one line for each adapter and optimizer of PEFT that a resumed run would not continue exactly."""
    held: dict[tuple[str, str], Any] = {}
    for _, module in modules_of_peft(models):
        for attribute, role in (("peft_config", "adapter"), ("lora_variant", "variant of LoRA")):
            for name, value in (getattr(module, attribute, None) or {}).items():
                held[f"{role} {name!r}", class_name(value)] = value
    own = {("optimizer", class_name(value)): value for value in optimizers if is_of_peft(value)}
    yield from unsaved_state.faults([(role, value) for (role, _), value in (held | own).items()], KNOWN, allow)


def changes_weights(module: nn.Module) -> bool:
    """Return whether a module of PEFT can put its adapter into the weight, by `.data`; some do in each forward pass."""
    return is_of_peft(module) and callable(getattr(module, "merge", None))


def adapter_states(models: Sequence[nn.Module]) -> dict[str, Stateful]:
    """Return the state, by its name in a step, of what adapters keep beside parameters and persistent buffers."""
    return {_STATE: AdapterState(models)} if modules_of_peft(models) else {}


class AdapterState:
    """Tensors in buffers that are not persistent and in attributes, AdaLoRA's ranks, and what training has switched."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._modules = modules_of_peft(models)
        self._allocators = [(m, m.rankallocator) for _, m in self._modules if "rankallocator" in vars(m)]
        self._names = frozenset(self._tensors())
        self._switches = Switches(switch for model in models for switch in switches_of(model))

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors that were there before the first step, the state of each RankAllocator, and switches.

        Raises: SaveError for merged adapters that keep more than the weight to be taken out again, as DoRA does.
        """
        if merged := [path for path, m in self._modules if vars(m).get("merged_adapters") and vars(m).get("_caches")]:
            raise SaveError(
                f"adapters are merged, and no step holds what unmerge_adapter() needs: {listed(merged)}. Call it "
                "before the step ends"
            )
        tensors = self._tensors()
        ranks = [
            {"pattern": a.peft_config.rank_pattern, **{name: dict(getattr(a, name)) for name in _SCORES}}
            for _, a in self._allocators
        ]
        kept = {name: tensors[name] for name in self._names}
        return {"tensors": kept, "ranks": ranks, "switched": self._switches.changed()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Fill the tensors, and set the ranks. Raises: LoadMismatchError for other tensors."""
        stored, live = state_dict["tensors"], self._tensors()
        before, now = ({name: value.shape for name, value in tensors.items()} for tensors in (stored, live))
        if differing := sorted(name for name in before.keys() | self._names if before.get(name) != now.get(name)):
            raise LoadMismatchError(
                f"the adapters of the model are not those of the checkpoint: {listed(differing)} differ in shape or "
                "are in one of them: adapt the model with the settings of the run that saved"
            )
        for name, value in stored.items():
            live[name].copy_(value)
        self._switches.restore(state_dict["switched"])
        for (model, allocator), own in zip(self._allocators, state_dict["ranks"], strict=True):
            parameters = dict(model.model.named_parameters())
            allocator.peft_config.rank_pattern = own["pattern"]
            for kind in _SCORES:
                on_device = {name: value.to(parameters[name].device) for name, value in own[kind].items()}
                setattr(allocator, kind, on_device)

    def _tensors(self) -> dict[str, torch.Tensor]:
        found: dict[str, Any] = {}
        for path, module in self._modules:
            own: dict[str, Any] = hidden_buffers(module)
            for name, value in vars(module).items():
                if name not in ("_parameters", "_buffers", "_modules"):
                    items = {f"{name}.{key}": item for key, item in value.items()} if type(value) is dict else {}
                    own |= items | {name: value}
            found |= {f"{path}.{name}": value for name, value in own.items()}
        return {
            name: value
            for name, value in found.items()
            if isinstance(value, torch.Tensor) and not value.requires_grad and not value.is_meta
        }
