"""PEFT adapter folders against PEFT itself: theirs open here, ours open there, and misleading ones are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import world
from tests.interop.folders import disturb
from titan_ckpt.converters.container import ModelConvertersContainer
from titan_ckpt.converters.lora import LoRAConverter
from titan_ckpt.converters.lora.config import LoRAConfig
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import CorruptCheckpointError, ExportError, NotACheckpointError
from titan_ckpt.formats.huggingface.peft import PeftFormat
from titan_ckpt.formats.open import open_reader
from titan_ckpt.formats.publish.run import FolderExport
from titan_ckpt.geometry.chunks import LazyTensor, blocks_of, info_of
from titan_ckpt.models.llama3 import FLAVORS, Llama3
from titan_ckpt.types import StateDict
from titan_ckpt.weights.transforms import FileGroup, StateDictTransforms

CONFIG = replace(
    FLAVORS["debug-0.5m"], vocab_size=160, num_layers=2, max_seq_len=64, tie_embeddings=False,
    num_heads=6, num_kv_heads=3, head_dim=16,
)  # fmt: skip
ALL = ("wq", "wk", "wv", "wo", "w1", "w2", "w3")
KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"

KINDS: Mapping[str, LoRAConfig] = {
    "plain": LoRAConfig(ALL, rank=4, alpha=8.0),
    "queries": LoRAConfig(("wq",), rank=4, alpha=8.0),
    "dora": LoRAConfig(ALL, rank=4, alpha=8.0, use_dora=True),
}


def adapted(config: LoRAConfig, seed: int = 1) -> tuple[Llama3, ModelConvertersContainer]:
    """A model with a trained-looking adapter: everything that is owned has random values."""
    converters = ModelConvertersContainer([LoRAConverter(config)])
    model = world.llama(CONFIG, seed, converters).eval()
    disturb(model, lambda name, _: converters.key_filter(name))
    return model, converters


def owned(model: Llama3, converters: ModelConvertersContainer) -> StateDict:
    return {fqn: value for fqn, value in model.state_dict().items() if converters.key_filter(fqn)}


@contextmanager
def planned(folder: Path, model: Llama3, converters: ModelConvertersContainer) -> Iterator[tuple[Any, Any]]:
    """Give the reader of an adapter's folder, and what it would fill."""
    with open_reader(folder, "peft") as reader:
        tensors = owned(model, converters)
        yield reader, StateDictTransforms(model.key_map()).from_file(tensors, reader.tensors, converters, cast=False)


def adapter_groups(model: Llama3, converters: ModelConvertersContainer) -> list[FileGroup]:
    return StateDictTransforms(model.key_map()).to_file(owned(model, converters), converters, None)


def config_of(model: Llama3, converters: ModelConvertersContainer) -> dict[str, Any]:
    adapter = converters.state_dict_adapter()
    assert adapter is not None
    return adapter.file_config(model.key_map())


def export_adapter(
    model: Llama3,
    converters: ModelConvertersContainer,
    folder: Path,
    groups: list[FileGroup] | None = None,
    **config: Any,
) -> None:
    """Export the adapter, or other groups, with fields of its config changed."""
    made = adapter_groups(model, converters) if groups is None else groups
    FolderExport(made, PeftFormat(config_of(model, converters) | config)).write(folder, Coordinator.current())


def test_a7_the_folder_holds_what_vllm_and_peft_need(tmp_path: Path) -> None:
    """Every field is written, none that PEFT would warn of; what is ours lies in a file of its own, and comes back."""
    model, converters = adapted(KINDS["plain"])
    record = {"digest": "ab" * 16, "path": "base"}
    export_adapter(model, converters, tmp_path / "a", base_model_name_or_path="base", titan_ckpt_base=record)
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert set(config) == {
        "task_type", "peft_type", "r", "lora_alpha", "target_modules", "lora_dropout", "bias", "use_rslora", "use_dora",
        "fan_in_fan_out", "inference_mode", "rank_pattern", "alpha_pattern", "modules_to_save",
        "base_model_name_or_path", "revision",
    }  # fmt: skip
    assert (type(config["r"]), type(config["lora_alpha"])) == (int, int)
    with open_reader(tmp_path / "a") as reader:
        assert reader.metadata() == config | {"titan_ckpt_base": record}
        assert reader.tensors[KEY.format("A")].shape == (4, 96)


# exports that must not happen


def test_f2_an_adapter_that_changes_nothing_is_refused(tmp_path: Path) -> None:
    """A fresh adapter, whose B is zero, is not an export; nothing is left."""
    model, converters = adapted(KINDS["plain"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b.weight"):
                parameter.zero_()
    with pytest.raises(ExportError, match="the adapter changes nothing: of all 14 modules"):
        export_adapter(model, converters, tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_adapter_that_is_not_finite_is_refused(tmp_path: Path, value: float) -> None:
    """One NaN fails the export and is named."""
    model, converters = adapted(KINDS["plain"])
    with torch.no_grad():
        model.get_parameter("layers.0.attention.wq.lora_b.weight")[3, 1] = value
    with pytest.raises(ExportError, match=r"not finite: .*layers\.0\.self_attn\.q_proj\.lora_B"):
        export_adapter(model, converters, tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def renamed(groups: list[FileGroup], change: Callable[[str], str]) -> list[FileGroup]:
    return [replace(g, infos={change(key): info for key, info in g.infos.items()}) for g in groups]


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda g: renamed(g, lambda k: k.removeprefix("base_model.")), "PEFT would ignore it"),
        (lambda g: renamed(g, lambda k: k.replace(".lora_A.weight", ".lora_A.default.weight")), "no LoRA tensor"),
        (lambda g: g[1:], "has no partner"),
    ],
)
def test_names_that_peft_would_ignore_are_refused(
    tmp_path: Path, change: Callable[[list[FileGroup]], list[FileGroup]], cause: str
) -> None:
    """A wrong prefix, an adapter's name in a key, half a pair: an error, not an adapter that does nothing."""
    model, converters = adapted(KINDS["plain"])
    with pytest.raises(ExportError, match=cause):
        export_adapter(model, converters, tmp_path / "a", change(adapter_groups(model, converters)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("config", "cause"),
    [
        ({"r": None}, "r is None"),
        ({"r": 8}, "expected 8 in dim 0"),
        ({"r": True}, "r is True"),
        ({"lora_alpha": "16"}, "lora_alpha is '16'"),
        ({"target_modules": []}, "target_modules is empty"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "says use_dora"),
        ({"rank_pattern": {"q_proj": 2}}, "expected 2 in dim 0"),
        ({"rank_pattern": {"(": 2}}, "no regular expression"),
        ({"rank_pattern": [4]}, "expected a map"),
    ],
)
def test_a_config_that_contradicts_the_tensors_is_refused(tmp_path: Path, config: dict[str, Any], cause: str) -> None:
    """PEFT would load each of these, or fill in a rank of 8, and compute something else."""
    model, converters = adapted(KINDS["plain"])
    with pytest.raises(ExportError, match=cause):
        export_adapter(model, converters, tmp_path / "a", **config)
    assert list(tmp_path.iterdir()) == []


# folders that must not open


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model, converters = adapted(KINDS["plain"])
    export_adapter(model, converters, tmp_path / "adapter")
    return tmp_path / "adapter"


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def reconfigure(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def says(text: str) -> Callable[[Path], object]:
    """Write other content to the file of what is ours."""
    return lambda folder: (folder / "titan_ckpt.json").write_text(text)


def with_tensor(key: str, *shape: int) -> Callable[[Path], object]:
    return lambda folder: rewrite(folder, lambda tensors: tensors.update({key: torch.zeros(shape)}))


Change = tuple[Callable[[Path], object], str]
NONE: list[Change] = [
    (lambda f: (f / "adapter_config.json").unlink(), "no adapter_config.json"),
    (lambda f: (f / "adapter_model.safetensors").unlink(), "no adapter_model.safetensors"),
    (lambda f: (f / "adapter_model.safetensors").rename(f / "adapter_model.bin"), "is a pickle"),
    (lambda f: reconfigure(f, peft_type="PROMPT_TUNING"), "PROMPT_TUNING"),
]
"""What makes a folder that of no adapter of LoRA."""
CORRUPT: list[Change] = [
    (lambda f: (f / "adapter_config.json").write_text("{"), "not JSON"),
    (lambda f: reconfigure(f, r=16), "expected 16 in dim 0"),
    (lambda f: reconfigure(f, rank_pattern={"q_proj": "four"}), "expected a positive number"),
    (lambda f: reconfigure(f, rank_pattern={"q_proj": 0}), "expected a positive number"),
    (says('{"titan_ckpt_base": "x"}'), "base is 'x'"),
    (says('{"titan_ckpt_base": {"dtype": [1]}}'), "titan_ckpt_base is .*, expected what an export writes"),
    (says('{"titan_ckpt_parts": {"digest": "x"}}'), "titan_ckpt_parts is .*, expected what an export writes"),
    (says('{"titan_ckpt_parts": {"q": ["a"]}}'), "expected what an export writes"),
    (lambda f: reconfigure(f, r=0), "r is 0, expected a positive integer"),
    (lambda f: reconfigure(f, lora_alpha="16"), "lora_alpha is '16', expected a number"),
    (lambda f: reconfigure(f, lora_alpha=float("nan")), "NaN|lora_alpha is nan"),
    (lambda f: rewrite(f, lambda t: t.pop(KEY.format("B"))), "has no partner"),
    (with_tensor("model.x.lora_A.weight", 4, 4), "does not start with base_model"),
    (with_tensor("base_model.model.lm_head.weight", 4), "modules_to_save"),
    (with_tensor("base_model.model.lm_head.base_layer.weight", 4, 4), "nor a table of the base"),
    (with_tensor("base_model.model.lm_head.lora_B.bias", 4), "does not say lora_bias"),
    (with_tensor("base_model.model.lm_head.token_adapter.trainable_tokens_delta", 1, 4), "does not say which"),
    (with_tensor(KEY.format("A"), 4), "expected 4 in dim 0"),
]


@pytest.mark.parametrize(
    ("kind", "change"), [*((NotACheckpointError, c) for c in NONE), *((CorruptCheckpointError, c) for c in CORRUPT)]
)
def test_a_folder_that_would_mislead_does_not_open(folder: Path, kind: type[Exception], change: Change) -> None:
    """Each is refused by name before a tensor is read."""
    act, cause = change
    act(folder)
    with pytest.raises(kind, match=cause):
        open_reader(folder, "peft")


def test_a_nan_in_a_file_is_not_loaded_unnoticed(folder: Path) -> None:
    """An adapter that would poison the model is an error of the file."""
    rewrite(folder, lambda t: t[KEY.format("B")].fill_(float("nan")))
    model, converters = adapted(KINDS["plain"])
    with (
        planned(folder, model, converters) as (reader, plan),
        pytest.raises(CorruptCheckpointError, match=r"not finite: .*q_proj\.lora_B"),
    ):
        reader.read(plan.requests)


def test_keys_that_match_nothing_are_told_what_they_resemble(folder: Path) -> None:
    """An adapter for differently named modules: every key is unexpected, with the nearest name the model has."""
    rewrite(folder, lambda t: [t.update({k.replace("self_attn", "attn"): t.pop(k)}) for k in list(t)])
    model, converters = adapted(KINDS["queries"])
    with planned(folder, model, converters) as (_, plan):
        pass
    wrong = KEY.format("A").replace("self_attn", "attn")
    assert wrong in plan.report.unexpected
    assert plan.near(wrong)[0] == KEY.format("A")
    assert len(plan.report.missing) == len(owned(model, converters))


def test_lazy_values_of_an_adapter_are_exported(tmp_path: Path) -> None:
    """An adapter whose tensors are computed when they are written is proved like any other."""
    model, converters = adapted(KINDS["queries"])

    def lazy(value: Any) -> LazyTensor:
        return LazyTensor(info_of(value), lambda: blocks_of(value), like=value)

    live = adapter_groups(model, converters)
    groups = [replace(group, values=tuple(lazy(value) for value in group.values)) for group in live]
    export_adapter(model, converters, tmp_path / "lazy", groups)
    export_adapter(model, converters, tmp_path / "live")
    names = [tmp_path / folder / "adapter_model.safetensors" for folder in ("lazy", "live")]
    assert names[0].read_bytes() == names[1].read_bytes()
