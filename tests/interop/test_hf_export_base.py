"""Exports of weights that came from a Hugging Face folder: they agree with it, and can look exactly like it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests import world
from tests.interop.folders import open_strictly
from tests.zoo.tiny_models import species, tiny_config
from titan_ckpt import CheckpointManager, ExportConfig, InitialLoadConfig, StateDictTransforms
from titan_ckpt.errors import ConfigError, ExportError, LoadMismatchError
from titan_ckpt.models import hf
from titan_ckpt.models.llama3 import FLAVORS, Llama3, Llama3Config

CONFIG = replace(FLAVORS["debug-0.5m"], vocab_size=160, num_layers=2, max_seq_len=64, tie_embeddings=False)


def write_mixed(folder: Path, config: Llama3Config, wide: str, **save: Any) -> None:
    """Write a model of transformers in bfloat16, some of whose weights are in float32."""
    model: Any = LlamaForCausalLM(LlamaConfig.from_dict(config.to_hf())).bfloat16()
    for name, parameter in model.named_parameters():
        if wide in name:
            parameter.data = parameter.data.float() + torch.rand(parameter.shape) / 3
    model.save_pretrained(folder, **save)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder of transformers in several files: bfloat16, but for norms in float32; with a tokenizer's file."""
    write_mixed(tmp_path / "base", CONFIG, "norm", max_shard_size="100KB")
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    return tmp_path / "base"


def run(base: Path, folder: Path, export: ExportConfig, shape: Llama3Config = CONFIG) -> Path:
    """Load a base into a float32 model, and export it after a last step that changed nothing."""
    model = Llama3(shape)
    world.finish(world.manager(folder, model, initial_load=[InitialLoadConfig(str(base), cast=True)], export=(export,)))
    return folder / "exports" / "step-1"


def test_an_export_can_look_exactly_like_its_base(tmp_path: Path, base: Path) -> None:
    """With the base's dtypes and files, every safetensors file and the index are the base's, byte for byte."""
    out = run(base, tmp_path, ExportConfig("hf", dtype="original", max_shard_bytes="base"))
    files = sorted(p.name for p in base.glob("*.safetensors*"))
    assert len(files) > 3
    assert sorted(p.name for p in out.glob("*.safetensors*")) == files
    for name in files:
        if name.endswith(".safetensors"):
            assert (out / name).read_bytes() == (base / name).read_bytes(), name
    there, here = (json.loads((f / "model.safetensors.index.json").read_text()) for f in (base, out))
    assert here == there
    assert (out / "tokenizer.json").read_text() == "{}", "what goes along comes from the base, too"


def test_original_dtypes_are_one_option_and_files_by_size_another(tmp_path: Path, base: Path) -> None:
    """The base's dtypes in one file; and without them each tensor keeps the model's."""
    original = load_file(run(base, tmp_path / "a", ExportConfig("hf", dtype="original")) / "model.safetensors")
    assert {v.dtype for k, v in original.items() if "norm" in k} == {torch.float32}
    assert {v.dtype for k, v in original.items() if "norm" not in k} == {torch.bfloat16}
    own = run(base, tmp_path / "b", ExportConfig("hf", max_shard_bytes="base"))
    assert {v.dtype for file in own.glob("*.safetensors") for v in load_file(file).values()} == {torch.float32}


@pytest.mark.parametrize("wide", ["norm", "embed_tokens"])
def test_an_export_with_the_bases_dtypes_opens_as_the_base_does(tmp_path: Path, wide: str) -> None:
    """Weights in bfloat16 and some in float32, be they most bytes: the same dtype in config.json, the same logits."""
    config = replace(CONFIG, vocab_size=3000)
    write_mixed(tmp_path / "base", config, wide)
    path = tmp_path / "base" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "bfloat16"}))
    out = run(tmp_path / "base", tmp_path, ExportConfig("hf", dtype="original"), config)
    there, here = load_file(tmp_path / "base" / "model.safetensors"), load_file(out / "model.safetensors")
    assert {key: value.dtype for key, value in here.items()} == {key: value.dtype for key, value in there.items()}
    assert len({value.dtype for value in here.values()}) == 2
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    tokens = torch.arange(40).view(2, 20) * 3
    with torch.no_grad():
        base, exported = (open_strictly(AutoModelForCausalLM, path)(tokens).logits for path in (tmp_path / "base", out))
    assert torch.equal(base, exported)


def test_f2_keys_and_shapes_must_be_the_bases(tmp_path: Path, base: Path) -> None:
    """A base that changed under the run's feet has other tensors than the export: nothing is published."""
    first = min(base.glob("model-*.safetensors"))
    model = Llama3(CONFIG)
    with world.manager(
        tmp_path, model, initial_load=[InitialLoadConfig(str(base), cast=True)], export=(ExportConfig("hf"),)
    ) as manager:
        manager.load()
        tensors = load_file(first)
        key = min(tensors)
        save_file({**tensors, key: tensors[key][:-1].contiguous()}, first, {"format": "pt"})
        with pytest.raises(ExportError, match=rf"{key}: base .*export .*table of names"):
            manager.save(1, last_step=True)
    assert not (tmp_path / "exports" / "step-1").exists()


def test_what_only_a_base_can_say_needs_one(tmp_path: Path) -> None:
    """Before training: original dtypes without a base's folder, and for formats that cannot look like it."""
    model = Llama3(CONFIG)
    for export in (ExportConfig("hf", dtype="original"), ExportConfig("hf", max_shard_bytes="base")):
        with pytest.raises(ExportError, match="name its Hugging Face folder"):
            world.manager(tmp_path, model, export=(export,))
    with pytest.raises(ConfigError, match="only hf exports"):
        ExportConfig("dcp", dtype="original")


@pytest.mark.parametrize("dtype", ["original", None])
def test_what_only_a_base_can_say_is_not_forgotten_when_it_goes(
    tmp_path: Path, base: Path, caplog: pytest.LogCaptureFixture, dtype: Literal["original"] | None
) -> None:
    """An export was in the dtypes of training when the base's folder was gone, or silently had no tokenizer."""
    exports = (ExportConfig("hf", dtype=dtype, interval=1),)
    sources = [InitialLoadConfig(str(base), cast=True)]
    with world.manager(tmp_path, Llama3(CONFIG), initial_load=sources, export=exports, async_mode="disabled") as m:
        m.load()
        assert "tokenizer" not in caplog.text
        base.rename(tmp_path / "elsewhere")
        if dtype is None:
            m.save(1)
            assert f"{base}: not there, so the export gets no tokenizer from it" in caplog.text
            return
        with pytest.raises(ExportError, match=r"base: no Hugging Face folder is there any more"):
            m.save(1)
        (tmp_path / "elsewhere").rename(base)
        m.save(2)
    assert world.names_in(tmp_path / "exports") == ["step-2"]


@pytest.mark.parametrize(
    "settings", [{"num_attention_heads": 2}, {"num_key_value_heads": 4}, {"num_hidden_layers": 9}, {"head_dim": 1}]
)
def test_a_config_of_another_model_is_refused(tmp_path: Path, base: Path, settings: dict[str, int]) -> None:
    """Weights of the right shapes whose config.json has other heads or layers: both are said, and nothing changes."""
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | settings))
    ((key, value),) = settings.items()
    with pytest.raises(LoadMismatchError, match=rf"another model.*nothing was loaded\s+{key}: {value} there, .* here"):
        run(base, tmp_path, ExportConfig("hf"))


LLAMA_31 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("rotary", "said"),
    [
        ({"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}, ["rope_theta: 7.0 there, "]),
        (
            {"rope_parameters": {"rope_theta": 10_000.0, "rope_type": "llama3", **LLAMA_31}},
            ["rope_type: llama3 there, default here"],
        ),
        (
            {"rope_parameters": None, "rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
            ["rope_theta: 7.0 there, ", "rope_type: linear there, default here"],
        ),
        ({"rope_parameters": None, "rope_theta": 10_000.0, "rope_scaling": None}, []),
    ],
    ids=["base", "scaling of Llama 3.1", "as transformers 4 spells it", "the same"],
)
def test_a_config_with_other_values_is_logged(
    tmp_path: Path, base: Path, caplog: pytest.LogCaptureFixture, rotary: dict[str, Any], said: list[str]
) -> None:
    """Another rotary base or scaling is what a run may want: it loads, with a warning that names both."""
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | rotary))
    with caplog.at_level("WARNING", "titan_ckpt.loading.adapters"):
        run(base, tmp_path, ExportConfig("hf"))
    assert [what in caplog.text for what in said] == [True] * len(said)
    assert bool(caplog.text) == bool(said)


class OddHead(nn.Module):
    """A model whose output matrix has a name of its own, and whose table has more rows than the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(64, 8)
        self.output_head = nn.Linear(8, 64, bias=False)


ODD = {"model_type": "x", "architectures": ["XForCausalLM"], "vocab_size": 60, "hidden_size": 8}
ODD["tie_word_embeddings"] = False


def odd_manager(folder: Path, base: Path | None) -> CheckpointManager:
    """Return the manager of a run of OddHead that exports at its end."""
    sources = () if base is None else (InitialLoadConfig(str(base)),)
    return world.manager(
        folder,
        OddHead(),
        initial_load=sources,
        export=(ExportConfig("hf"),),
        sd_transforms=StateDictTransforms(hf_config=ODD),
    )


def test_what_an_export_would_refuse_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """Without a base nothing says that weights and config.json belong together: load() refuses, not the last save."""
    world.load_fails(odd_manager(tmp_path, None), ExportError, r"no lm_head\.weight, nor two")


def test_a_base_with_the_same_keys_and_shapes_is_trusted(tmp_path: Path) -> None:
    """A head of another name and a table larger than the vocabulary are right if the base has them like that."""
    base = tmp_path / "base"
    base.mkdir()
    save_file(dict(OddHead().state_dict()), base / "model.safetensors", metadata={"format": "pt"})
    (base / "config.json").write_text(json.dumps(ODD))
    world.finish(odd_manager(tmp_path / "run", base))
    exported = load_file(tmp_path / "run/exports/step-1/model.safetensors")
    assert exported.keys() == OddHead().state_dict().keys()
    (base / "config.json").write_text(json.dumps(ODD | {"vocab_size": 64}))
    world.load_fails(odd_manager(tmp_path / "other", base), ExportError, r"no lm_head\.weight")


@pytest.mark.parametrize("name", ["biogpt", "electra", "roberta", "rwkv", "xlnet"])
def test_an_output_matrix_with_a_name_of_its_own_needs_no_base(name: str, tmp_path: Path) -> None:
    """The model of transformers in a loop of one's own: its export opens with the same weights, the output too."""
    (kind,) = (kind for kind in species() if str(kind) == name)
    config = tiny_config(kind)
    config.tie_word_embeddings = False
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    assert "lm_head.weight" not in model.state_dict()
    about = {**config.to_dict(), "architectures": [type(model).__name__]}
    world.finish(
        world.manager(tmp_path, model, export=(ExportConfig("hf"),), sd_transforms=StateDictTransforms(hf_config=about))
    )
    opened = open_strictly(type(model), tmp_path / "exports" / "step-1").state_dict()
    assert opened.keys() == model.state_dict().keys()
    assert all(torch.equal(value, opened[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_narrow_export_keeps_what_transformers_holds_in_float32(
    tmp_path: Path, dtype: Literal["bfloat16", "float16"]
) -> None:
    """A router's biases near 5.0 would all be 5.0 in bfloat16: the file holds float32, as from_pretrained does."""
    (kind,) = (kind for kind in species() if str(kind) == "deepseek_v3")
    model = hf.build({**tiny_config(kind).to_dict(), "model_type": "deepseek_v3"})
    biases = {key: value for key, value in model.state_dict().items() if key.endswith("e_score_correction_bias")}
    for bias in biases.values():
        bias.copy_(5.0 + torch.arange(bias.numel()) / 4096)
    world.finish(world.manager(tmp_path, model, export=(ExportConfig("hf", dtype=dtype),)))
    load: Any = AutoModelForCausalLM.from_pretrained
    opened = load(tmp_path / "exports" / "step-1", dtype=getattr(torch, dtype)).state_dict()
    assert biases
    assert all(torch.equal(opened[key], value) and opened[key].dtype == torch.float32 for key, value in biases.items())
    assert opened["lm_head.weight"].dtype == getattr(torch, dtype)


def test_every_file_of_a_tokenizer_class_is_copied(tmp_path: Path, base: Path) -> None:
    """Every name that an installed class gives its vocabulary files, and those of processors, is in the export."""
    own = Path(transformers.__file__).parent
    tables = [
        re.search(r"^VOCAB_FILES_NAMES\s*=\s*\{(.*?)\}", path.read_text(), re.DOTALL | re.MULTILINE)
        for path in own.rglob("*token*.py")
    ]
    names = {name for table in tables if table for name in re.findall(r':\s*"([^"]+)"', table[1])}
    assert {"vocab.json", "source.spm", "bpe.codes"} < names
    names |= {transformers.utils.PROCESSOR_NAME, transformers.utils.FEATURE_EXTRACTOR_NAME}
    names |= {transformers.utils.VIDEO_PROCESSOR_NAME, transformers.utils.AUDIO_TOKENIZER_NAME, "qwen.tiktoken"}
    for name in names:
        (base / name).write_text("{}")
    exported = run(base, tmp_path, ExportConfig("hf"))
    assert names <= {path.name for path in exported.iterdir()}


def plain_manager(run: Path, hf_config: dict[str, Any], folder: str = "exports") -> CheckpointManager:
    """Return the manager of a run without a base that exports at its end."""
    model = Llama3(CONFIG)
    return world.manager(
        run,
        model,
        export=(ExportConfig("hf", folder=folder),),
        sd_transforms=StateDictTransforms(model.key_map(), hf_config),
    )


@pytest.mark.parametrize(
    ("make", "folder", "fault"),
    [
        (lambda path: path.write_text(""), "exports", r"folder: .*exports is a file, and .*exports is to be a folder"),
        (lambda path: path.symlink_to("nowhere"), "exports", "folder: .*exports is a link to nothing"),
        (lambda path: path.write_text(""), "exports/of/last", "folder: .*exports is a file, and .*of/last is to be"),
        (lambda path: None, "/".join(["x" * 200] * 30), "folder: .*File name too long"),
    ],
)
def test_a_place_where_no_export_can_go_is_told_before_training(
    make: Callable[[Path], None], folder: str, fault: str, tmp_path: Path
) -> None:
    """The manager is not made, and nothing is created."""
    make(tmp_path / "exports")
    before = [*tmp_path.iterdir()]
    with pytest.raises(ExportError, match=f"checkpoint.export cannot be made: {fault}"):
        plain_manager(tmp_path, CONFIG.to_hf(), folder)
    assert [*tmp_path.iterdir()] == before


def test_a_config_that_json_cannot_hold_is_told_before_training(tmp_path: Path) -> None:
    """A dtype of torch is what a config of one's own may hold."""
    fault = r"config holds what config\.json cannot: .*dtype is not JSON"
    settings = {**CONFIG.to_hf(), "kind": torch.float32}
    world.load_fails(plain_manager(tmp_path, settings), ExportError, fault)


def test_exports_from_before_the_run_are_named_at_its_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They stay, so an export of such a step will be refused."""
    (tmp_path / "exports/step-1").mkdir(parents=True)
    with plain_manager(tmp_path, CONFIG.to_hf()) as manager:
        manager.load()
        with pytest.raises(ExportError, match="step-1 is there already"):
            manager.save(1, last_step=True)
    lines = [record.getMessage() for record in caplog.records if "from before this run" in record.getMessage()]
    (line,) = lines
    assert str(tmp_path / "exports/step-1") in line
