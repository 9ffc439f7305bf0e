"""Hugging Face folders against transformers itself: theirs open here, ours open there, and broken ones are refused."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from tests import world
from tests.interop import folders
from tests.interop.folders import export, gap, load, open_strictly
from tests.world import same, tensors
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ExportError,
    LoadMismatchError,
    NotACheckpointError,
)
from titan_ckpt.formats.huggingface.export import HuggingFaceFormat
from titan_ckpt.formats.huggingface.reader import HuggingFaceReader
from titan_ckpt.formats.open import detect_format, open_reader
from titan_ckpt.formats.publish.plan import pack_model_files
from titan_ckpt.formats.publish.run import FolderExport
from titan_ckpt.geometry.chunks import Block, Chunk, LazyTensor, TensorInfo, info_of
from titan_ckpt.models.llama3 import FLAVORS, Llama3
from titan_ckpt.stores.store import Place
from titan_ckpt.types import StateDict
from titan_ckpt.weights.transforms import StateDictTransforms

SMALL = replace(FLAVORS["debug-0.5m"], vocab_size=160, num_layers=2, max_seq_len=64)
CONFIGS = {
    "tied": SMALL,
    "untied": replace(SMALL, tie_embeddings=False),
    "grouped": replace(SMALL, num_heads=6, num_kv_heads=3, head_dim=18, tie_embeddings=False),
}


def native(name: str = "untied", seed: int = 1) -> Llama3:
    return world.llama(CONFIGS[name], seed).eval()


def theirs(name: str = "untied") -> Any:
    """A model of transformers' own."""
    return folders.theirs(CONFIGS[name].to_hf())


# theirs open here


def without_an_index(folder: Path) -> Path:
    (folder / "model.safetensors.index.json").unlink()
    return folder


def of_links(folder: Path) -> Path:
    """Return a download cache's snapshot, in which every file is a link to a blob."""
    snapshot = folder.with_name("snapshot")
    snapshot.mkdir()
    for file in folder.iterdir():
        (snapshot / file.name).symlink_to(Path("..") / folder.name / file.name)
    return snapshot


def as_a_file(folder: Path) -> Path:
    """Return a .safetensors file by its own path, whatever its name."""
    save_file(tensors(folder), folder / "weights.safetensors")
    return folder / "weights.safetensors"


@pytest.mark.parametrize("change", [without_an_index, of_links, as_a_file])
def test_a_folder_in_another_form_opens(tmp_path: Path, change: Callable[[Path], Path]) -> None:
    """Shards whose headers alone say what is where, links, and one file."""
    model = theirs()
    model.save_pretrained(tmp_path / "base", max_shard_size="100KB")
    place = change(tmp_path / "base")
    assert detect_format(place) == "hf"
    ours = native()
    load(ours, place)
    assert gap(ours, model) <= 1e-5


def test_rotary_frequencies_of_old_folders_are_passed_by(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Keys that the model computes itself are neither loaded nor unexpected, and logged; other strange keys are not."""
    model, rotary, strange = native(), *(f"model.layers.0.self_attn.{name}inv_freq" for name in ("rotary_emb.", ""))
    export(model, tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    save_file(tensors(tmp_path / "out") | {rotary: torch.ones(4), strange: torch.ones(4)}, path, {"format": "pt"})
    with caplog.at_level(logging.INFO, "titan_ckpt.weights.transforms"):
        report = world.fill(native(seed=2).state_dict(), tmp_path / "out", model.key_map())
    assert rotary in caplog.text and report.unexpected == (strange,)


# ours open there


@pytest.mark.parametrize("name", list(CONFIGS))
def test_an_export_in_several_files_opens_with_transformers(tmp_path: Path, name: str) -> None:
    """No warning, no odd key, the native logits, and nothing is left beside it."""
    model = native(name)
    export(model, tmp_path / "out", max_shard_bytes=100_000)
    assert len([*(tmp_path / "out").glob("*.safetensors")]) > 1
    assert gap(open_strictly(LlamaForCausalLM, tmp_path / "out"), model) <= 1e-5
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_bfloat16_export_is_the_cast_of_the_weights(tmp_path: Path) -> None:
    """Every value is rounded once, as `.to` rounds; config.json says so."""
    model = native()
    export(model, tmp_path / "out", dtype=torch.bfloat16)
    opened = open_strictly(LlamaForCausalLM, tmp_path / "out")
    assert opened.dtype == torch.bfloat16
    again = native(seed=9)
    load(again, tmp_path / "out", cast=True)
    for fqn, value in again.state_dict().items():
        assert torch.equal(value, model.state_dict()[fqn].bfloat16().float())


def test_a_value_beyond_float16_is_refused(tmp_path: Path) -> None:
    """It would be infinite in the file; one that is infinite already stays so, and bfloat16 holds both."""
    model: Any = native()
    with torch.no_grad():
        model.norm.weight[:2] = torch.tensor([-7e4, torch.inf])
        model.norm.weight[2] = 65504.0
    with pytest.raises(ExportError, match=r"model.norm.weight: its largest value is 70000, and float16 ends at 65504"):
        export(model, tmp_path / "out", dtype=torch.float16)
    assert not (tmp_path / "out").exists()
    export(model, tmp_path / "out", dtype=torch.bfloat16)
    with torch.no_grad():
        model.norm.weight[0] = -65504.0
    export(model, tmp_path / "half", dtype=torch.float16)
    stored = load_file(tmp_path / "half/model.safetensors")["model.norm.weight"]
    assert stored[:3].tolist() == [-65504, torch.inf, 65504]


def test_the_index_is_what_transformers_writes(tmp_path: Path) -> None:
    """Sizes and counts in the index are those of the tensors."""
    model = native()
    export(model, tmp_path / "out", max_shard_bytes=100_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    open_strictly(LlamaForCausalLM, tmp_path / "out").save_pretrained(tmp_path / "again", max_shard_size="100KB")
    theirs_index = json.loads((tmp_path / "again" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == theirs_index["metadata"]
    assert set(index["weight_map"]) == set(theirs_index["weight_map"])


def test_files_keep_to_the_size_and_big_tensors_stand_alone() -> None:
    """Packing is by natural name order, and does not depend on the order in which ranks list tensors."""
    infos = {f"layers.{i}.w": TensorInfo((10,), torch.uint8) for i in (10, 9, 1, 2)} | {
        "embed": TensorInfo((100,), torch.uint8)
    }
    assert pack_model_files(infos, 20) == {
        "model-00001-of-00003.safetensors": ["embed"],
        "model-00002-of-00003.safetensors": ["layers.1.w", "layers.2.w"],
        "model-00003-of-00003.safetensors": ["layers.9.w", "layers.10.w"],
    }
    assert pack_model_files(dict(reversed(infos.items())), 20) == pack_model_files(infos, 20)
    assert list(pack_model_files(infos, 1000)) == ["model.safetensors"]


def assets(folder: Path) -> Path:
    """A base's folder with everything that goes along, and some that does not."""
    folder.mkdir()
    (folder / "additional_chat_templates").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        (folder / name).write_text(json.dumps({"name": name}))
    (folder / "tokenizer.model").write_bytes(bytes(range(256)) * 40_000)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "additional_chat_templates" / "tool.jinja").write_text("{{ tools }}")
    (folder / "modeling_custom.py").write_text("x = 1\n")
    (folder / "README.md").write_text("other weights")
    (folder / "model.safetensors").write_bytes(b"other weights")
    (folder / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "architectures": ["LlamaForCausalLM"],
                "eos_token_id": 7,
                "auto_map": {"AutoModel": "modeling_custom.X"},
                "quantization_config": {"quant_method": "fp8"},
                "torch_dtype": "float16",
                "hidden_size": 1,
            }
        )
    )
    return folder


def test_tokenizer_and_code_come_along_and_nothing_stale(tmp_path: Path) -> None:
    """Assets are copied byte for byte; config.json is the model's, with what only the base knows."""
    base = assets(tmp_path / "base")
    model = native()
    out = tmp_path / "out"
    export(model, out, assets=base, dtype=torch.bfloat16)
    copied = [
        "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
        "tokenizer.model", "chat_template.jinja", "additional_chat_templates/tool.jinja", "modeling_custom.py",
    ]  # fmt: skip
    found = sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file())
    assert found == sorted([*copied, "config.json", "model.safetensors"])
    assert all((out / name).read_bytes() == (base / name).read_bytes() for name in copied)
    config = json.loads((out / "config.json").read_text())
    expected = model.hf_config() | {
        "dtype": "bfloat16", "eos_token_id": 7, "auto_map": {"AutoModel": "modeling_custom.X"},
    }  # fmt: skip
    assert config == expected


def test_a_config_can_come_from_the_assets_alone(tmp_path: Path) -> None:
    """A model that knows no config is exported with its base's, cleaned of what no longer holds."""
    base = assets(tmp_path / "base")
    export(native(), tmp_path / "out", assets=base, config={})
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert not {"quantization_config", "torch_dtype"} & set(config)


def test_a_generation_config_is_made_where_there_is_none(tmp_path: Path) -> None:
    """It holds the token ids of the config, as transformers derives it."""
    model = native()
    export(model, tmp_path / "out", config=model.hf_config() | {"eos_token_id": 5})
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"_from_model_config": True, "eos_token_id": 5}
    assert open_strictly(LlamaForCausalLM, tmp_path / "out").generation_config.eos_token_id == 5


def test_lazy_tensors_are_written_as_they_resolve(tmp_path: Path) -> None:
    """A computed weight, in parts and in another dtype than the file's, is exact in the file."""
    model = native()
    state: StateDict = dict(model.state_dict())
    weight = state["layers.1.attention.wq.weight"]

    def blocks() -> list[Block]:
        doubled, (rows, columns) = weight.double() * 2, weight.shape
        parts = [Chunk((0, 0), (13, columns)), Chunk((13, 0), (rows - 13, 5)), Chunk((13, 5), (rows - 13, columns - 5))]
        return [Block(part, doubled[part.within(Chunk.whole(weight.shape))]) for part in parts]

    state["layers.1.attention.wq.weight"] = LazyTensor(TensorInfo(tuple(weight.shape), torch.float64), blocks)
    export(model, tmp_path / "out", state=state, dtype=torch.float32)
    again = native(seed=9)
    load(again, tmp_path / "out")
    assert torch.equal(again.state_dict()["layers.1.attention.wq.weight"], weight * 2)
    assert torch.equal(again.state_dict()["layers.0.attention.wq.weight"], state["layers.0.attention.wq.weight"])


def test_tensors_of_every_kind_are_exact_and_every_file_says_what_it_is(tmp_path: Path) -> None:
    """Without dims, of integers, of bits, empty: torch's consolidation makes 0.0 of some and fails on others."""
    values: StateDict = {
        "scale": torch.tensor(2.5),
        "half": torch.tensor(-0.5, dtype=torch.bfloat16),
        "steps": torch.tensor(2**40),
        "mask": torch.tensor([True, False]),
        "codes": torch.arange(6, dtype=torch.uint8).view(2, 3),
        "empty": torch.empty(0, 3),
        "weight": torch.randn(4, 4),
    }
    config = {"architectures": ["Own"], "model_type": "own", "tie_word_embeddings": True}
    world.write_hf(tmp_path / "out", values, config=config, max_shard_bytes=16)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    for path in files:
        with safe_open(path, "pt") as file:
            assert file.metadata()["format"] == "pt"
    assert len(files) > 1 and same(world.tensors(tmp_path / "out"), values)


# exports that must not happen


def test_a_name_that_another_takes_meanwhile_stays_the_others(tmp_path: Path) -> None:
    """Two runs export to one folder at once: the first to be whole has it, the other says so and leaves nothing."""
    model = native()
    norm = model.state_dict()["norm.weight"]

    def blocks() -> list[Block]:
        if not (tmp_path / "out").exists():
            export(native(seed=2), tmp_path / "out")
        return [Block(Chunk.whole(norm.shape), norm)]

    late = dict(model.state_dict()) | {"norm.weight": LazyTensor(info_of(norm), blocks)}
    with pytest.raises(ExportError, match=r"out failed, nothing was published: .*out has come to be there meanwhile"):
        export(model, tmp_path / "out", state=late)
    assert os.listdir(tmp_path) == ["out"]
    first = native()
    load(first, tmp_path / "out")
    assert torch.equal(first.state_dict()["output.weight"], native(seed=2).state_dict()["output.weight"])


def without_an_output() -> StateDict:
    return {k: v for k, v in native().state_dict().items() if k != "output.weight"}


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"config": {}}, "no config.json can be written"),
        ({"config": {"model_type": "llama"}}, "architectures"),
        ({"assets": Path("not-there")}, "assets folder not-there is not there"),
        ({"config": CONFIGS["tied"].to_hf()}, "tie_word_embeddings = true and the export has a lm_head"),
        ({"state": without_an_output()}, "tie_word_embeddings = false and the export has no lm_head"),
        (
            {"config": CONFIGS["untied"].to_hf() | {"vocab_size": 7, "num_hidden_layers": 3}},
            r"vocab_size = 7 and hidden_size = \d+, and .*num_hidden_layers = 3, and there are 2: is it another",
        ),
    ],
)
def test_an_export_that_would_mislead_is_refused(tmp_path: Path, changes: dict[str, Any], cause: str) -> None:
    """Each leaves nothing, and says what is wrong."""
    with pytest.raises(ExportError, match=cause):
        export(native(), tmp_path / "out", **changes)
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_with_the_containers_own_name_is_refused(tmp_path: Path) -> None:
    """A header has one place for __metadata__."""
    with pytest.raises(ExportError, match="keeps the name __metadata__ to itself"):
        world.write_hf(tmp_path / "out", {"__metadata__": torch.ones(2)})
    assert list(tmp_path.iterdir()) == []


def swap_header(folder: Path, key: str) -> None:
    """Claim another dtype of the same width for a tensor."""
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw.replace(f'"{key}":{{"dtype":"F32"'.encode(), f'"{key}":{{"dtype":"I32"'.encode()))


def rename(folder: Path, key: str) -> None:
    """Call a tensor something else of the same length."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(key.encode(), key.replace("up", "no").encode()))


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (swap_header, r"differs in 1 tensor\(s\): KEY: expected float32.*, found int32"),
        (rename, r"differs in 2 tensor\(s\): KEY is missing; .*no_proj\.weight is not the model's"),
    ],
)
def test_f2_what_reads_back_differently_is_not_published(
    tmp_path: Path, damage: Callable[[Path, str], None], cause: str
) -> None:
    """One dtype or one name that is not what was sent fails the export, is said, and leaves nothing."""
    key = "model.layers.1.mlp.up_proj.weight"

    class Damaged(HuggingFaceFormat):
        def open(self, folder: Place, *, dequantize: bool) -> HuggingFaceReader:
            assert isinstance(folder, Path)
            damage(folder, key)
            return HuggingFaceReader(folder)

    model = native()
    groups = StateDictTransforms(model.key_map()).to_file(model.state_dict(), None, None)
    damaged = FolderExport(groups, Damaged(model.hf_config(), None, 5_000_000_000))
    with pytest.raises(ExportError, match=cause.replace("KEY", re.escape(key))):
        damaged.write(tmp_path / "out", Coordinator.current())
    assert list(tmp_path.iterdir()) == []


# folders that must not open


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    theirs().save_pretrained(tmp_path / "base", max_shard_size="100KB")
    return tmp_path / "base"


def first_shard(folder: Path) -> Path:
    return min(folder.glob("model-00001-*"))


def cut_short(folder: Path) -> None:
    os.truncate(first_shard(folder), first_shard(folder).stat().st_size - 1)


def stale(folder: Path) -> None:
    save_file({"model.embed_tokens.weight": torch.zeros(3)}, first_shard(folder))


def without_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    first_shard(folder).unlink()


def of_two_exports(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    save_file({"x": torch.zeros(3)}, folder / "model-00001-of-00002.safetensors")


def both(folder: Path) -> None:
    save_file({"x": torch.zeros(3)}, folder / "model.safetensors")


def index_text(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "model.safetensors.index.json").write_text(text)


def mapped(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Change the map of an index."""

    def damage(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        change(index["weight_map"])
        path.write_text(json.dumps(index))

    return damage


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (lambda folder: first_shard(folder).unlink(), "missing: model-00001"),
        (cut_short, "cut short"),
        (stale, "where the index says it is"),
        (without_index, "missing: model-00001"),
        (of_two_exports, "several exports"),
        (both, "both model.safetensors and"),
        (index_text("{"), "JSON"),
        (index_text("[]"), "no weight_map"),
        (index_text('{"weight_map": {}}'), "no weight_map"),
        (index_text('{"weight_map": {"x": 3}}'), "not the name"),
        (mapped(lambda m: m.pop("model.norm.weight")), "not in the index"),
        (mapped(lambda m: m.update({"new.weight": m["model.norm.weight"]})), "new.weight is not in"),
        (mapped(lambda m: m.update({"model.norm.weight": "model-00001-of-00099.safetensors"})), "missing"),
        (mapped(lambda m: m.update({"model.norm.weight": "../model.safetensors"})), "not the name"),
        (mapped(lambda m: m.update({"model.norm.weight": "/etc/passwd"})), "not the name"),
        (mapped(lambda m: m.update({"model.norm.weight": min(m.values())})), "and the index says"),
    ],
)
def test_a_broken_folder_is_one_clear_error(sharded: Path, damage: Callable[[Path], object], cause: str) -> None:
    """A stale, missing or cut shard, a wrong index, an index with holes: a typed error that names place and cause."""
    damage(sharded)
    with pytest.raises(CorruptCheckpointError, match=cause) as caught:
        open_reader(sharded)
    assert "base" in str(caught.value)


def test_files_that_are_none_are_one_clear_error(tmp_path: Path) -> None:
    """Weights that are a folder, and a config.json that is a link to itself."""
    theirs().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors: no regular file"):
        open_reader(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").symlink_to("config.json")
    with pytest.raises(CorruptCheckpointError, match=r"config\.json: cannot be read"):
        open_reader(tmp_path)


@pytest.mark.parametrize("where", ["top", "text_config"])
def test_quantized_weights_are_never_silently_unscaled(sharded: Path, where: str) -> None:
    """A quantization_config is answered with its method, for text models and for nested ones."""
    config = json.loads((sharded / "config.json").read_text())
    quantized = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (sharded / "config.json").write_text(json.dumps(config | (quantized if where == "top" else {where: quantized})))
    with pytest.raises(LoadMismatchError, match="quant_method = 'fp8'"):
        open_reader(sharded)


# what lies at a path


def test_formats_are_found_from_content(tmp_path: Path) -> None:
    """Each format by the file that makes it one; a folder of steps, pickles or nothing says what to do."""
    for name, files in {
        "native": ["MANIFEST.json", "rank-00000.safetensors"],
        "dcp": [".metadata"],
        "peft": ["adapter_config.json", "adapter_model.safetensors"],
        "hf": ["model-00001-of-00001.safetensors"],
    }.items():
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).touch()
        assert detect_format(tmp_path / name) == name
    with pytest.raises(CheckpointNotFoundError, match="is not there"):
        detect_format(tmp_path / "nowhere")
    with pytest.raises(CheckpointNotFoundError, match="is not there"):
        open_reader(tmp_path / "nowhere", "hf")
    hints = {"step-100": "name one of them", "pytorch_model.bin": "pickle", "notes.txt": "it holds notes.txt"}
    for file, hint in hints.items():
        shutil.rmtree(tmp_path / "odd", ignore_errors=True)
        (tmp_path / "odd").mkdir()
        (tmp_path / "odd" / file).touch()
        with pytest.raises(NotACheckpointError, match=hint):
            detect_format(tmp_path / "odd")
    (tmp_path / "peft" / "model.safetensors").touch()
    with pytest.raises(NotACheckpointError, match='format = "hf" or format = "peft"'):
        detect_format(tmp_path / "peft")
    (tmp_path / "odd" / "pytorch_model.bin").touch()
    with pytest.raises(NotACheckpointError, match="pickle"):
        open_reader(tmp_path / "odd", "hf")


def test_every_refusal_is_a_checkpoint_error() -> None:
    """One except clause catches all that this module refuses."""
    for kind in (CorruptCheckpointError, ExportError, LoadMismatchError, NotACheckpointError, CheckpointNotFoundError):
        assert issubclass(kind, CheckpointError)
