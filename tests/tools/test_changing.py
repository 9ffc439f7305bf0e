"""`convert`, `merge`, `prune`, `pin` and `unpin`: exact results, bounded memory, and nothing half done under a kill."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from tests.chats import write_model
from tests.faults.shim import Counter, KillAt, intercepted
from tests.forked import answer, fork, memory_of
from tests.test_bad_input import write_config
from tests.tools.steps import LORA, call, save_step
from tests.world import TOKENS, contents, same, tensors
from titan_ckpt.cli import tables
from titan_ckpt.converters import from_tables
from titan_ckpt.converting import convert, stored_tensor
from titan_ckpt.directory.posix_steps import PosixSteps
from titan_ckpt.formats.dcp.dcp import DcpReader
from titan_ckpt.tools import conversion
from titan_ckpt.tools.difference import compare
from titan_ckpt.tools.retention import Pruned

ROOT = Path(__file__).parents[2]
SOURCES = {
    "native": "run2/checkpoints/step-1",
    "dcp": "dcp",
    "torchtitan": "titan/step-1",
    "hf": "hf",
}


@pytest.mark.parametrize("kind", SOURCES)
def test_f4_every_format_converts_into_every_other_and_back_bit_exact(root: Path, tmp_path: Path, kind: str) -> None:
    """Native, DCP, torchtitan's layout and Hugging Face, into native, DCP, Hugging Face and a torch.save file."""
    source = root / SOURCES[kind]
    config = () if kind == "hf" else ("--config", root / "hf")
    expected = tensors(root / "hf")
    for to in ("native", "dcp", "hf", "torch"):
        assert call("convert", source, tmp_path / to, "--to", to, *(config if to == "hf" else ())) == 0
    assert same(tensors(tmp_path / "hf"), expected)
    LlamaForCausalLM.from_pretrained(tmp_path / "hf")
    for to in ("native", "dcp"):
        assert compare(tmp_path / to, root / "hf", config=root / "hf").same
        assert call("convert", tmp_path / to, tmp_path / f"{to}-hf", "--to", "hf", "--config", root / "hf") == 0
        assert same(tensors(tmp_path / f"{to}-hf"), expected)
    by_torch = torch.load(tmp_path / "torch", weights_only=True)
    native = {k.removeprefix("model."): v for k, v in tensors(tmp_path / "native").items()}
    assert same(by_torch, native)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".staging")]


@pytest.mark.parametrize(
    ("kind", "to", "more"),
    [
        ("native", "hf", ()), ("dcp", "native", ()), ("hf", "torch", ()), ("hf", "dcp", ("--dtype", "bfloat16")),
        ("native", "hf", ("--dtype", "bfloat16", "--json")),
    ],
)  # fmt: skip
def test_f4_the_logits_of_both_sides_are_compared(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, to: str, more: tuple[str, ...]
) -> None:
    """Hugging Face folders by transformers itself, others by our own model; with a dtype, both sides are rounded."""
    words = ["convert", root / SOURCES[kind], tmp_path / "target", "--to", to, "--config", root / "hf", *more]
    assert call(*words, "--check-logits") == 0
    shown = capsys.readouterr().out
    if "--json" in more:
        found = json.loads(shown)["logits"]
        assert found["same"] and found["largest_difference"] <= found["allowed"] < 1e-3 * found["largest_logit"]
    else:
        assert "logits of 32 random tokens: the same but for rounding (largest difference" in shown


def test_f4_a_conversion_that_computes_something_else_answers_1(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of one projection in another order, as by a table without the rotary permutation."""

    def wrong(source: Path, target: Path, *words: Any, **options: Any) -> None:
        convert(source, target, *words, **options)
        file, name = target / "model.safetensors", "model.layers.0.self_attn.v_proj.weight"
        values = load_file(file)
        save_file(values | {name: values[name].flip(0).contiguous()}, file, metadata={"format": "pt"})

    monkeypatch.setattr(conversion, "convert", wrong)
    words = ["convert", root / SOURCES["native"], tmp_path / "hf", "--to", "hf", "--config", root / "hf"]
    assert call(*words, "--check-logits") == 1
    assert "DIFFERENT: do not use the target" in capsys.readouterr().out


def test_f4_logits_that_nobody_can_compute_are_refused_before_anything_is_written(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Adapters, models of other tasks, quantized folders, and names without a config.json."""
    write_model(tmp_path / "other")
    config = json.loads((tmp_path / "other/config.json").read_text())
    for name, change in (
        ("classes", {"architectures": ["LlamaForSequenceClassification"]}),
        ("codes", {"quantization_config": {"quant_method": "fp8"}}),
    ):
        shutil.copytree(tmp_path / "other", tmp_path / name)
        (tmp_path / name / "config.json").write_text(json.dumps(config | change))
    for source, fault in {
        root / "peft1": "an adapter computes nothing by itself",
        tmp_path / "classes": "LlamaForSequenceClassification computes no logits of tokens",
        tmp_path / "codes": "its weights are quantized",
        root / "dcp": "no config.json is known",
    }.items():
        assert call("convert", source, tmp_path / "target", "--to", "native", "--check-logits") == 2
        assert fault in capsys.readouterr().err
        assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"num_hidden_layers": 3}, "the model's .*layers.2.* is not there"),
        ({"num_hidden_layers": 1}, "has no .*layers.1"),
        ({"intermediate_size": 8}, r"has the shape \[8, "),
        (
            {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
            "q_proj.bias is not there|is the config of a model that has no",
        ),
    ],
    ids=["more layers", "fewer layers", "sizes", "class"],
)
def test_tensors_that_are_not_those_of_config_json_are_not_converted(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], complaint: str
) -> None:
    """Under the names of another model nobody would miss what is not there."""
    shutil.copytree(root / "hf", tmp_path / "hf")
    path = tmp_path / "hf/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    for source, to in ((tmp_path / "hf", "native"), (root / SOURCES["native"], "hf")):
        assert call("convert", source, tmp_path / "target", "--to", to, "--config", tmp_path / "hf") == 2
        assert re.search(complaint, capsys.readouterr().err)
        assert not (tmp_path / "target").exists()


def test_a_config_json_of_another_model_with_the_same_tensors_is_refused_or_said(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mistral has Llama's tensors and may have a window: a source that leads to its own config.json is not one."""
    change = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 4}
    (tmp_path / "mistral").mkdir()
    config = json.loads((root / "hf/config.json").read_text()) | change
    (tmp_path / "mistral/config.json").write_text(json.dumps(config))
    other, target = ("--config", tmp_path / "mistral"), tmp_path / "target"
    for words in (
        ("convert", root / "hf", target, "--to", "native"),
        ("convert", root / "hf", target, "--to", "hf"),
        ("convert", root / "peft1", target, "--to", "native"),
        ("merge", root / "hf", root / "peft1", target),
    ):
        assert call(*words, *other) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "its model is a llama, as " in said and "that of --config is a mistral" in said, said
        assert not target.exists()
    assert call("convert", root / "hf", tmp_path / "alone", "--to", "native", "--model", "hf") == 0
    assert "nothing in" not in capsys.readouterr().out
    assert call("convert", tmp_path / "alone", target, "--to", "hf", *other) == 0
    (tmp_path / "alone/config.json").write_text("{")
    assert call("convert", tmp_path / "alone", tmp_path / "cut off", "--to", "hf", *other) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("alone shows that it is of the mistral in --config") == 2, said
    assert json.loads((target / "config.json").read_text())["sliding_window"] == 4


MINE = """
from titan_ckpt.models.registry import ARCHITECTURES

Named, make = ARCHITECTURES["llama3"], ARCHITECTURES["llama3"].make
"""


def test_a_dtype_and_the_names_can_be_chosen(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 is the cast of each tensor; --model chooses the names of transformers, or of your architecture."""
    assert call("convert", root / "hf", tmp_path / "t.pt", "--to", "torch", "--model", "hf", "--dtype", "bfloat16") == 0
    expected = {name: value.bfloat16() for name, value in tensors(root / "hf").items()}
    assert same(torch.load(tmp_path / "t.pt", weights_only=True, mmap=True), expected)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "my_named.py").write_text(MINE)
    for name, code in (("my_named:Named", 0), ("my_named:make", 2), ("my_named:Nothing", 2), ("llama4", 2)):
        assert call("convert", root / "hf", tmp_path / f"{name}.pt", "--to", "torch", "--model", name) == code
    own = torch.load(tmp_path / "my_named:Named.pt", weights_only=True, mmap=True)
    assert call("convert", root / "hf", tmp_path / "llama3.pt", "--to", "torch") == 0
    assert same(own, torch.load(tmp_path / "llama3.pt", weights_only=True, mmap=True))
    assert call("convert", root / "dcp", tmp_path / "hf", "--to", "hf") == 2  # no config.json says what they are called
    assert call("convert", root / "hf", root / "hf", "--to", "hf") == 2
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == [
        "llama3.pt",
        "my_named.py",
        "my_named:Named.pt",
        "t.pt",
    ]


@pytest.mark.parametrize("base", ["hf", "run2/checkpoints/step-1"])
def test_f4_merge_equals_pefts_merge_within_one_rounding(root: Path, tmp_path: Path, base: str) -> None:
    """One adapter and two, on a Hugging Face base and on a step of two ranks; transformers opens the folder."""
    merged: Any = LlamaForCausalLM.from_pretrained(root / "hf")
    for count in (1, 2):
        adapters = [root / f"peft{number}" for number in range(1, count + 1)]
        assert call("merge", root / base, *adapters, tmp_path / f"merged{count}", "--config", root / "hf") == 0
        merged = PeftModel.from_pretrained(merged, str(adapters[-1])).merge_and_unload()
        ours: Any = LlamaForCausalLM.from_pretrained(tmp_path / f"merged{count}")
        for name, value in merged.state_dict().items():
            torch.testing.assert_close(ours.state_dict()[name], value, rtol=2**-22, atol=1e-7)
        assert torch.allclose(ours(TOKENS).logits, merged(TOKENS).logits, atol=1e-5)


@pytest.mark.parametrize(("name", "module"), [("hf", "q_proj"), ("llama3", "wq")])
def test_merge_writes_what_the_run_exports(
    name: str, module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Also over a folder of transformers 4; the run's config.json has nothing that save_pretrained would not write."""
    base = write_model(tmp_path / "base")
    theirs = json.loads((base / "config.json").read_text())
    old = {**theirs, "rope_theta": theirs["rope_parameters"]["rope_theta"], "torch_dtype": theirs["dtype"]}
    del old["dtype"], old["rope_parameters"]
    (base / "config.json").write_text(json.dumps(old))
    run = write_config(
        tmp_path,
        {
            "model": {"flavor": None, "name": name, "folder": str(base)},
            "data": {"tokenizer": None},
            "training": {"steps": 2},
            "converters": [{"kind": "lora", "rank": 2, "target_modules": [module]}],
            "checkpoint": {
                "save": {"interval": 2},
                "export": [{"format": "peft"}, {"format": "hf"}, {"format": "dcp"}],
            },
        },
    )
    caplog.set_level(logging.INFO)
    assert call("train", run) == 0
    exports = tmp_path / "run/exports"
    assert all(f"bytes, to {exports / place} in " in caplog.text for place in ("step-2", "step-2-peft", "dcp/step-2"))
    assert call("merge", base, exports / "step-2-peft", tmp_path / "merged") == 0
    assert call("diff", tmp_path / "merged", exports / "step-2") == 0, capsys.readouterr().out
    assert call("diff", exports / "step-2", exports / "dcp/step-2") == 0, "both exports of the last step are there"
    ours = json.loads((exports / "step-2/config.json").read_text())
    if name == "hf":
        assert ours.keys() - theirs.keys() <= {"tie_word_embeddings"}
    (exports / "step-2/config.json").write_text(json.dumps({**ours, "rms_norm_eps": 1e-3}))
    assert call("diff", tmp_path / "merged", exports / "step-2") == 1


def test_merge_says_nothing_of_other_libraries(tmp_path: Path) -> None:
    """Standard error is empty: kernels of torchao, which transformers imports, are no news."""
    base: Any = AutoModelForCausalLM.from_pretrained(write_model(tmp_path / "base", kind="phi3"))
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False))
    adapted.save_pretrained(str(tmp_path / "adapter"))
    command = [sys.executable, "-m", "titan_ckpt", "merge", "base", "adapter", "merged"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr.decode()) == (0, "")


def test_an_adapter_of_our_own_step_is_merged_as_the_run_would(root: Path, tmp_path: Path) -> None:
    """The step of a LoRA run plus its base are the weights that the run computes with; another base is refused."""
    assert call("merge", root / "hf", root / "lora/checkpoints/step-1", tmp_path / "merged") == 0
    converters = from_tables([LORA])
    model = save_step(root / "hf", tmp_path / "run", converters=converters)
    with torch.no_grad():
        expected = model(TOKENS)
        theirs: Any = LlamaForCausalLM.from_pretrained(tmp_path / "merged")
        assert torch.allclose(theirs(TOKENS).logits, expected, atol=1e-4)
        plain: Any = LlamaForCausalLM.from_pretrained(root / "hf")
        assert not torch.allclose(plain(TOKENS).logits, expected, atol=1e-2)
    assert call("merge", root / "peft1", root / "peft2", tmp_path / "none") == 2
    assert call("merge", root / "hf", root / "hf", tmp_path / "none") == 2
    assert call("merge", root / "hf", tmp_path / "none") == 2
    assert not (tmp_path / "none").exists()


# memory


def write_gigabyte(folder: Path) -> int:
    """Write a Llama of 1 GB, all zeros, as holes; return the bytes of its largest tensor."""
    dim, ffn, vocab, layers = 1024, 4096, 80_000, 21
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": dim, "head_dim": 64}
    config |= {"num_hidden_layers": layers, "num_attention_heads": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-5}
    config |= {"intermediate_size": ffn, "vocab_size": vocab, "max_position_embeddings": 128, "hidden_act": "silu"}
    config |= {"tie_word_embeddings": False, "dtype": "bfloat16"}
    shapes = {"model.embed_tokens.weight": (vocab, dim), "lm_head.weight": (vocab, dim), "model.norm.weight": (dim,)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (dim, dim) for name in "qkvo"}
        shapes |= {f"{prefix}mlp.{name}_proj.weight": (ffn, dim) for name in ("gate", "up")}
        shapes |= {f"{prefix}mlp.down_proj.weight": (dim, ffn)}
        shapes |= {f"{prefix}{name}_layernorm.weight": (dim,) for name in ("input", "post_attention")}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        num_bytes = 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
    assert offset >= 10**9
    return 2 * vocab * dim


def peak_of(*words: object) -> int:
    """Call titan-ckpt in a forked process; return the bytes that it takes at its peak."""
    peak, code = memory_of(lambda: call(*words))
    assert code == 0, words
    return peak


def test_f4_a_gigabyte_takes_little_memory(root: Path, tmp_path: Path) -> None:
    """Every command that reads weights: at most the largest tensor and 256 MiB beyond what the process has anyway."""
    big = tmp_path / "big"
    largest = write_gigabyte(big)
    adapter = tmp_path / "adapter"
    shutil.copytree(root / "peft1", adapter)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(settings | {"target_modules": ["q_proj"]}))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    factors = {name.format("A"): torch.ones(4, 1024), name.format("B"): torch.ones(1024, 4)}
    save_file(factors, adapter / "adapter_model.safetensors", {"format": "pt"})
    native, dcp, merged, plain = (tmp_path / n for n in ("native", "dcp", "merged", "plain.pt"))
    before = peak_of("inspect", big)
    commands = [
        ("convert", big, native, "--to", "native"),
        ("convert", native, dcp, "--to", "dcp"),
        ("diff", dcp, big),
        ("convert", native, plain, "--to", "torch"),
        ("merge", big, adapter, merged),
    ]
    for command in commands:
        peak = peak_of(*command) - before
        assert peak <= largest + (256 << 20), (command, peak >> 20)
        if plain.exists():
            plain.unlink()
    assert load_file(merged / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"].float().mean() > 0


def test_a_stored_chunk_that_is_read_in_parts_is_loaded_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """dcp.save stores a shard as one pickle: reading it block by block must not load it for each block."""
    loads: list[str] = []
    load = DcpReader._load

    def counted(self: DcpReader, stored: Any) -> Any:
        loads.append(stored.name)
        return load(self, stored)

    monkeypatch.setattr(DcpReader, "_load", counted)
    monkeypatch.setattr("titan_ckpt.converting._BLOCK_BYTES", 1024)
    with DcpReader(root / "dcp") as reader:
        assert len([*stored_tensor(reader, "model.tok_embeddings.weight").blocks()]) == 24
    assert loads == ["model.tok_embeddings.weight"] * 2  # one for each rank's shard


# interruptions


def interruptions(act: Callable[[], int]) -> Iterator[KillAt]:
    """Yield kills spread over all operations of `act`, which is run once in a child to count them."""

    def count() -> tuple[int, list[str]]:
        counter = Counter()
        with intercepted(counter):
            return act(), counter.names

    (code, names), _ = answer(count)
    assert code == 0
    every = sorted({*range(0, len(names), max(1, len(names) // 5)), *range(len(names) - 3, len(names))})
    for ordinal in every:
        moment = "half" if names[ordinal] == "pwrite_all" else "before"
        yield KillAt(ordinal=ordinal, moment=moment)  # type: ignore[arg-type]


class InterruptAt(Counter):
    """Presses Ctrl-C at one operation."""

    def __init__(self, ordinal: int) -> None:
        super().__init__()
        self.ordinal = ordinal

    def __call__(self, name: str, operation: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if self.next(name) == self.ordinal:
            raise KeyboardInterrupt
        return operation(*args)


@pytest.mark.parametrize("command", ["convert native", "convert hf", "convert torch", "merge"])
def test_f4_a_kill_or_ctrl_c_leaves_the_source_and_no_half_result(
    root: Path, tmp_path: Path, command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """At operations from the first to the last: the target is whole or not there, and the next call works."""
    source, adapter = tmp_path / "source", tmp_path / "adapter"
    place = SOURCES["native" if command == "convert hf" else "hf"]
    shutil.copytree(root / place, source)
    shutil.copytree(root / "peft1", adapter)
    before = contents(source)
    target = tmp_path / "out" / "target"
    what, _, to = command.partition(" ")
    words = [what, source, target, "--to", to] if to else [what, source, adapter, target]

    def act() -> int:
        return call(*words, "--config", root / "hf")

    target.parent.mkdir()
    kills = [*interruptions(act)]
    for kill in kills:
        for blow in (kill, InterruptAt(kill.ordinal)):
            shutil.rmtree(target.parent)
            target.parent.mkdir()

            def struck(blow: Any = blow) -> int:
                with intercepted(blow):
                    return act()

            code, status = answer(struck)
            assert status == signal.SIGKILL if blow is kill else code in (0, 130)
            assert contents(source) == before
            if target.exists():
                assert to == "torch" or call("verify", target) == 0
            assert all(path == target or path.name.startswith(".staging-") for path in target.parent.iterdir())
    if target.is_dir():
        shutil.rmtree(target)
    target.unlink(missing_ok=True)
    assert act() == 0
    assert [*target.parent.iterdir()] == [target]  # what a kill left is swept


def steps_of(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))


@pytest.fixture
def run(root: Path, tmp_path: Path) -> Path:
    """A run with four steps, the first of which is pinned."""
    folder = tmp_path / "run"
    shutil.copytree(root / "run1", folder)
    step = folder / "checkpoints/step-1"
    text = (step / "MANIFEST.json").read_text()
    for number in (2, 3, 4):
        copy = folder / f"checkpoints/step-{number}"
        shutil.copytree(step, copy)
        body = text[: text.rindex(',\n"digest"')].replace('"step": 1,', f'"step": {number},')
        import xxhash

        (copy / "MANIFEST.json").write_text(f'{body},\n"digest": "{xxhash.xxh3_128_hexdigest(body.encode())}"\n}}\n')
    assert call("pin", step) == 0
    return folder


def test_prune_deletes_what_the_policy_does_not_keep(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pin stays; --dry-run deletes nothing; unpinned, the step goes; a bad policy is exit code 2."""
    capsys.readouterr()
    assert call("prune", run, "--keep", "latest = 1", "--dry-run") == 0
    said = capsys.readouterr().out.splitlines()
    assert "checkpoints: would delete 2 steps: 2, 3 (" in said[0] and said[1] == "kept 2 steps: 1, 4"
    assert steps_of(run) == [1, 2, 3, 4]
    assert call("prune", run, "--keep", "latest = 1", "--json") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["deleted"], found["kept"]) == ([2, 3], [1, 4])
    assert steps_of(run) == [1, 4]
    assert call("unpin", run / "checkpoints/step-1") == 0
    assert call("prune", run / "checkpoints", "--keep", "latest = 1") == 0
    assert steps_of(run) == [4]
    for wrong in ("latest = 0", "latest =", "newest = 1", ""):
        assert call("prune", run, "--keep", wrong) == 2
        assert "--keep" in capsys.readouterr().err


def test_many_steps_are_said_as_ranges(capsys: pytest.CaptureFixture[str]) -> None:
    """Steps at one distance are a range; others are listed one by one."""
    steps = (5, *range(100, 10_000, 100), 9_950, 9_951, 9_999)
    tables.pruned(Pruned("run", steps, (7,), 1024), Console(width=80), dry_run=True, set_aside=False)
    said = "run: would delete 103 steps: 5, 100 to 9900 every 100, 9950, 9951, 9999 (1.0 KiB)"
    assert capsys.readouterr().out.splitlines() == [said, "kept 1 step: 7"]


def test_prune_refuses_beside_a_live_writer(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A process that holds the lease keeps its steps; one of another machine too, until its end is stated."""
    lease = run / "checkpoints/.lease"
    held = os.pipe()
    done = os.pipe()

    def hold() -> None:
        PosixSteps(run / "checkpoints").open()
        os.write(held[1], b"x")
        os.read(done[0], 1)

    pid = fork(hold)
    os.close(held[1])
    assert os.read(held[0], 1) == b"x"
    assert call("prune", run, "--keep", "latest = 1") == 1
    assert "is writing here" in capsys.readouterr().err
    os.write(done[1], b"x")
    os.waitpid(pid, 0)
    holder = json.loads(lease.read_text()) | {"host": "elsewhere", "boot": "another"}
    lease.write_text(json.dumps(holder))
    assert call("prune", run, "--keep", "latest = 1") == 1
    assert "--take-lease" in capsys.readouterr().err
    assert steps_of(run) == [1, 2, 3, 4]
    assert call("prune", run, "--keep", "latest = 1", "--take-lease") == 0
    assert steps_of(run) == [1, 4]


def test_a_killed_prune_leaves_whole_steps(run: Path) -> None:
    """Whatever is still there loads, the pin and the newest are among it, and the next call finishes the work."""

    def act() -> int:
        return call("prune", run, "--keep", "latest = 1")

    original = run.with_name("original")
    shutil.copytree(run, original)
    for kill in [*interruptions(act)]:
        for blow in (kill, InterruptAt(kill.ordinal)):
            shutil.rmtree(run)
            shutil.copytree(original, run)

            def struck(blow: Any = blow) -> int:
                with intercepted(blow):
                    return act()

            assert answer(struck) == (None, signal.SIGKILL) or blow is not kill
            assert {1, 4} <= set(steps_of(run))
            for step in steps_of(run):
                assert call("verify", run / f"checkpoints/step-{step}") == 0
            assert act() == 0
            assert steps_of(run) == [1, 4]


def test_a_pin_that_meets_a_deletion_answers_1(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the run's deletion was first, the pin fails; if the pin was first, the deletion gives the step back."""
    monkeypatch.setattr("titan_ckpt.tools.retention._SETTLE_SECONDS", 0.2)
    step = run / "checkpoints/step-2"
    pin = PosixSteps.pin

    def deleted_first(store: PosixSteps, number: int) -> None:
        shutil.rmtree(step)
        pin(store, number)

    monkeypatch.setattr(PosixSteps, "pin", deleted_first)
    assert call("pin", step) == 1
    assert call("pin", run / "checkpoints/step-99") == 2
    step = run / "checkpoints/step-3"
    aside = run / "checkpoints/.trash/aside"

    def meanwhile(store: PosixSteps, number: int) -> None:
        """The run renames the folder between the pin's file and its sync, sees the pin and renames it back."""
        (step / "PINNED").touch()
        step.rename(aside)
        aside.rename(step)
        raise FileNotFoundError

    monkeypatch.setattr(PosixSteps, "pin", meanwhile)
    assert call("pin", step) == 0
