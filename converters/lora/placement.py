"""Where PEFT puts an adapter: PEFT's own rules of names, applied to the model that transformers builds, on meta.

PEFT matches modules by the ends of names, renames keys as transformers renames weights, rewrites the targets of
mixtures of experts, and says little about tensors that fit nowhere. So an export is tried in advance, without values.
Owns the trial. Needs peft and transformers; without them peft.py goes by names alone.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from titan_ckpt.errors import ConfigError, listed
from titan_ckpt.formats.huggingface.peft import PREFIX, ModuleNumbers
from titan_ckpt.models import hf
from titan_ckpt.process import generators_kept

_NAME = "default"


def misplaced(
    shapes: Mapping[str, Sequence[int]], config: Mapping[str, Any], hf_config: Mapping[str, Any]
) -> list[str]:
    """Return one line for each reason why PEFT would not put every tensor of the adapter on exactly one module.

    `shapes`: those of the tensors in adapter_model.safetensors. `config`: adapter_config.json. `hf_config`: config.json
    of the base.
    Raises: ImportError without peft or transformers; ConfigError if transformers has no model for the base.
    """
    from peft import PeftConfig, get_peft_model, set_peft_model_state_dict

    try:
        with generators_kept(), torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the lines that are returned say more
            base = hf.build_named(hf_config)
            peft_config: Any = PeftConfig.from_peft_type(**config)  # type: ignore[no-untyped-call]
            model: Any = get_peft_model(base, peft_config, low_cpu_mem_usage=True)
            empty = {key: torch.empty(list(shape)) for key, shape in shapes.items()}
            result = set_peft_model_state_dict(model, empty, low_cpu_mem_usage=True)
        return [*_unplaced(result), *_misscaled(model, peft_config, shapes, config)]
    except ConfigError:
        raise
    except Exception as error:
        return [f"PEFT cannot open it: {type(error).__name__}: {' '.join(str(error).split())[:300]}"]


def _unplaced(result: Any) -> Iterator[str]:
    """Yield a line for tensors that PEFT has no module for, and for adapters of PEFT's that get no tensor."""
    if result.unexpected_keys:
        yield f"PEFT has no module for {_names(result.unexpected_keys)} and would ignore them"
    added = [key for key in result.missing_keys if ".lora_" in key or ".modules_to_save." in key]
    if added:
        yield f"PEFT would add {_names(added)}, which this adapter does not have"


def _misscaled(
    model: Any, peft_config: Any, shapes: Mapping[str, Sequence[int]], config: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a line for each tensor that lands on no module or on several, and for each module with another scale."""
    from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers

    keys = [key for key in shapes if ".lora_" in key]
    tagged = {}
    for number, key in enumerate(keys, start=1):
        rank_dim = 0 if key.endswith(("_A", "_A.weight")) else 1
        small = [size if dim == rank_dim else 1 for dim, size in enumerate(shapes[key])]
        tagged[key] = torch.full(small, number, dtype=torch.float64)
    placed = convert_peft_adapter_state_dict_for_transformers(model, peft_config, tagged, _NAME)
    modules, numbers = dict(model.named_modules()), ModuleNumbers(config)
    landed: dict[int, list[str]] = {}
    for key, values in placed.items():
        module = key.rpartition(".lora_")[0]
        for number in (n for n in map(int, values.unique().tolist()) if n):
            landed.setdefault(number, []).append(module)
            source = keys[number - 1].rpartition(".lora_")[0].removeprefix(PREFIX)
            wrapper = modules.get(module)
            scaling = getattr(wrapper, "scaling", {}).get(_NAME)
            parameter = getattr(wrapper, "parameter_name", "weight")
            of_stack = parameter != "weight"  # then patterns name the parameter
            expected = numbers.scaling(f"{source.replace('.base_layer', '')}.{parameter}" if of_stack else source)
            if scaling is not None and not math.isclose(scaling, expected):
                yield f"PEFT would scale {source} by {scaling:g}, and it was trained with {expected:g}"
    if wrong := [key for number, key in enumerate(keys, start=1) if len({*landed.get(number, ())}) != 1]:
        yield f"PEFT would not put {_names(wrong)} on exactly one module"


def _names(keys: list[str]) -> str:
    short = sorted(key.removeprefix(PREFIX).replace(f".{_NAME}", "") for key in keys)
    return listed(short, ", ", " ", most=4)
