"""Faults of real folders and real runs -> the whole message, word for word: one cause once, and the next step."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests import world
from tests.world import Value, flip_bit
from titan_ckpt import CheckpointConfig, CheckpointManager, ResumeConfig, SaveConfig
from titan_ckpt.errors import CheckpointError
from titan_ckpt.formats.open import open_reader
from titan_ckpt.models.registry import build_model

DIGEST = re.compile(r"\b[0-9a-f]{32}\b")
Fault = Callable[[Path], object]
FAULTS: list[tuple[Fault, str]] = []


def says(message: str) -> Callable[[Fault], Fault]:
    """Record the message that a fault must give; the test's folder is called RUN in it."""

    def record(fault: Fault) -> Fault:
        FAULTS.append((fault, message))
        return fault

    return record


def model(*sizes: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Linear(a, b, dtype=dtype) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*layers)


class Counting(nn.Linear):
    """A module with state beside its tensors."""

    def get_extra_state(self) -> dict[str, Any]:
        return {"count": 0}

    def set_extra_state(self, state: Any) -> None:
        pass


def manager(folder: Path, net: nn.Module, **given: Any) -> CheckpointManager:
    optimizers = given.pop("optimizers", [torch.optim.AdamW(net.parameters())])
    return world.manager(folder, net, *optimizers, async_mode="disabled", **given)


def saved(folder: Path, net: nn.Module, *steps: int, **objects: Any) -> Path:
    """Train and save steps; return the folder of the last one."""
    with manager(folder, net, **objects) as run:
        start = run.load().step
        for step in steps:
            assert step > start
            first = next(net.parameters())
            net(torch.ones(2, first.shape[1], dtype=first.dtype)).sum().backward()
            for optimizer in objects.get("optimizers", []):
                optimizer.step()
            net.zero_grad()
            run.save(step)
    return folder / "checkpoints" / f"step-{steps[-1]}"


def load(folder: Path, net: nn.Module, **given: Any) -> None:
    world.load(manager(folder, net, save=None, **given))


@says(
    "the weights do not fit the model; nothing was loaded\n"
    "  RUN/old/checkpoints/step-1: 40 of dtype bfloat16, expected float32: 0.weight, 0.bias, 1.weight, 1.bias, "
    "2.weight, 2.bias, 3.weight, 3.bias, 4.weight, 4.bias, 5.weight, 5.bias, and 28 more; set cast = true to convert "
    "them while loading"
)
def weights_of_another_dtype(folder: Path) -> None:
    source = saved(folder / "old", model(*(4,) * 21, dtype=torch.bfloat16), 1)
    load(folder, model(*(4,) * 21), initial_load=[source])


@says(
    "the weights do not fit the model; nothing was loaded\n"
    "  RUN/old/checkpoints/step-1: 3 of another shape than the model's: 0.weight: expected float32[6, 4], found "
    "float32[5, 4]; 0.bias: expected float32[6], found float32[5]; 1.weight: expected float32[2, 6], found "
    "float32[2, 5]\n"
    "  Was it saved from a different model config?"
)
def weights_of_another_size(folder: Path) -> None:
    load(folder, model(4, 6, 2), initial_load=[saved(folder / "old", model(4, 5, 2), 1)])


@says(
    "the weights do not fit the model; nothing was loaded\n"
    "  RUN: 1 of dtype int32, expected float32: 0.weight; such values cannot be converted: take weights of the "
    "model's dtype"
)
def weights_of_integers(folder: Path) -> None:
    save_file({"0.weight": torch.ones(2, 4, dtype=torch.int32), "0.bias": torch.ones(2)}, folder / "model.safetensors")
    load(folder, model(4, 2), initial_load=[folder])


@says(
    "the weights do not fit the model; nothing was loaded\n"
    "  RUN/old/checkpoints/step-1: 2 missing: 1.weight, 1.bias. Name new tensors in "
    "checkpoint.initial_load.initialize\n"
    "  Was it saved from a different model config?"
)
def weights_of_fewer_layers(folder: Path) -> None:
    load(folder, model(4, 4, 4), initial_load=[saved(folder / "old", model(4, 4), 1)])


@says(
    "the weights do not fit the model; nothing was loaded\n"
    "  RUN: all 2 names begin with 'module.', and the model's do not: save the state dict of the module inside its "
    "wrapper, or name the tensors anew, such as 0.weight"
)
def weights_under_a_prefix(folder: Path) -> None:
    tensors = {f"module.{name}": value for name, value in model(4, 4).state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    load(folder, model(4, 4), initial_load=[folder])


@says("checkpoint.initial_load: RUN/nowhere is not there; name an existing checkpoint folder or .safetensors file")
def weights_that_are_not_there(folder: Path) -> None:
    load(folder, model(4, 4), initial_load=[folder / "nowhere"])


@says("RUN/old/checkpoints is no checkpoint: it holds steps; name one of them, such as RUN/old/checkpoints/step-1")
def weights_named_by_their_run(folder: Path) -> None:
    step = saved(folder / "old", model(4, 4), 1)
    step.with_name("step-2.abandoned-0badcafe").mkdir()  # set aside by a rollback
    load(folder, model(4, 4), initial_load=[step.parent])


@says(
    "RUN/old is no checkpoint: it holds checkpoints/step-2, checkpoints/step-10, exports/step-10; name one of them, as "
    "in titan-ckpt inspect RUN/old/checkpoints/step-10"
)
def weights_named_by_the_folder_of_a_run(folder: Path) -> None:
    step = saved(folder / "old", model(4, 4), 2)
    step.with_name("step-10").mkdir()
    (folder / "old/exports/step-10").mkdir(parents=True)
    load(folder, model(4, 4), initial_load=[folder / "old"])


@says(
    "CheckpointConfig: 1 problem(s)\n"
    "  initial_load.1.path: 'RUN/old/checkpoints/step-1' is named twice; each weight has one source"
)
def the_same_weights_twice(folder: Path) -> None:
    source = saved(folder / "old", model(4, 4), 1)
    load(folder, model(4, 4), initial_load=[source, source])


@says(
    "the weights do not fit the model; nothing was loaded\n"
    "  RUN/checkpoints/step-1: 3 of another shape than the model's: 0.weight: expected float32[6, 4], found "
    "float32[5, 4]; 0.bias: expected float32[6], found float32[5]; 1.weight: expected float32[2, 6], found "
    "float32[2, 5]\n"
    "  Was it saved from a different model config?"
)
def a_resume_of_another_size(folder: Path) -> None:
    saved(folder, model(4, 5, 2), 1)
    load(folder, model(4, 6, 2))


@says(
    "the weights do not fit the model; nothing was loaded\n"
    "  RUN/checkpoints/step-1: 2 missing: 1.weight, 1.bias\n"
    "  Was it saved from a different model config?"
)
def a_resume_with_a_new_layer(folder: Path) -> None:
    saved(folder, model(4, 4), 1)
    load(folder, model(4, 4, 4))


@says(
    "the weights do not fit the model; nothing was loaded\n"
    "  RUN/checkpoints/step-1: 2 of dtype bfloat16, expected float32: 0.weight, 0.bias; build the model in bfloat16, "
    "or start a new run from this step as an initial_load with cast = true"
)
def a_resume_in_another_dtype(folder: Path) -> None:
    saved(folder, model(4, 4, dtype=torch.bfloat16), 1)
    load(folder, model(4, 4))


@says(
    "RUN/checkpoints/step-1/rank-00000.safetensors: 1 block(s) do not have the digest they were written with: bytes "
    "4096-4175; they hold values of 2 tensor(s): model.0.weight, model.0.bias. Overwritten in memory so far: no "
    "tensor. Load another step, or copy the file again from where it is whole"
)
def a_flipped_bit(folder: Path) -> None:
    flip_bit(saved(folder, model(4, 4), 1) / "rank-00000.safetensors", -1)
    load(folder, model(4, 4))


@says(
    "RUN/checkpoints holds no checkpoint that can be loaded, but content that looks like one:\n"
    "  step-1: rank-00000.safetensors: No such file or directory\n"
    "  Repair it, name it in [[checkpoint.initial_load]], move it away, or choose another folder: a run is not started "
    "afresh beside it"
)
def a_missing_file(folder: Path) -> None:
    (saved(folder, model(4, 4), 1) / "rank-00000.safetensors").unlink()
    load(folder, model(4, 4))


@says(
    "RUN/old/checkpoints/step-1/rank-00000.safetensors: is missing. Load another step, or copy the folder again from "
    "where it is whole"
)
def a_missing_file_in_a_source(folder: Path) -> None:
    source = saved(folder / "old", model(4, 4), 1)
    (source / "rank-00000.safetensors").unlink()
    load(folder, model(4, 4), initial_load=[source])


@says(
    "RUN/checkpoints holds no checkpoint that can be loaded, but content that looks like one:\n"
    "  step-1: MANIFEST.json: not a manifest of this format: its digest is DIGEST, DIGEST was committed\n"
    "  Repair it, name it in [[checkpoint.initial_load]], move it away, or choose another folder: a run is not started "
    "afresh beside it"
)
def a_damaged_manifest(folder: Path) -> None:
    path = saved(folder, model(4, 4), 1) / "MANIFEST.json"
    path.write_text(path.read_text().replace('"step": 1', '"step": 2'))
    load(folder, model(4, 4))


@says("RUN/checkpoints: step 7 is not there; committed steps: 1, 2")
def a_step_that_is_not_there(folder: Path) -> None:
    saved(folder, model(4, 4), 1, 2)
    load(folder, model(4, 4), resume=ResumeConfig(step=7))


@says("RUN/checkpoints is not a folder, so it cannot hold checkpoints; choose another path")
def a_folder_that_is_a_file(folder: Path) -> None:
    (folder / "checkpoints").write_text("")
    load(folder, model(4, 4))


@says(
    "the checkpoint has 1 optimizer(s) with [1] parameter groups, this run 1 with [2]: group 1 of optimizer 0: its "
    "parameters were in one group with others, such as 0.bias. Build the same ones, or start the optimizer afresh: "
    'checkpoint.resume.exclude = ["optimizer"]'
)
def other_parameter_groups(folder: Path) -> None:
    saved(folder, model(4, 4), 1)
    net = model(4, 4)
    load(folder, net, optimizers=[torch.optim.AdamW([{"params": [net[0].weight]}, {"params": [net[0].bias]}])])


@says(
    "the checkpoint has no state for: states ('counter'). It was saved by a run without them, or by another number "
    'of ranks; to start afresh with them: checkpoint.resume.exclude = ["states"]'
)
def a_state_that_was_not_saved(folder: Path) -> None:
    saved(folder, model(4, 4), 1)
    load(folder, model(4, 4), states={"counter": Value()})


@says(
    "1 object(s) of this run cannot be saved: 1 value(s) cannot be stored as typed JSON:\n"
    "  states.counter.value: a builtins.function\n"
    "  Return plain values, tensors or arrays from state_dict()."
)
def a_state_that_cannot_be_stored(folder: Path) -> None:
    saved(folder, model(4, 4), 1, states={"counter": Value(lambda: 0)})


@says(
    "the checkpoint lacks the extra state of 10 modules: 0._extra_state, 1._extra_state, 2._extra_state, "
    "3._extra_state, 4._extra_state, 5._extra_state, 6._extra_state, 7._extra_state and 2 more. Was it saved from a "
    "different model?"
)
def modules_with_new_state(folder: Path) -> None:
    saved(folder, model(*(4,) * 11), 1)
    load(folder, nn.Sequential(*(Counting(4, 4) for _ in range(10))))


@says(
    "two model parts both hold '0.weight', '0.bias': their parameter names must be disjoint, as those of the stages "
    "of one model are. Put the parts into one nn.ModuleDict, and pass that"
)
def two_parts_with_the_same_names(folder: Path) -> None:
    parts = [model(4, 4), model(4, 4)]
    optimizers = [torch.optim.AdamW(part.parameters()) for part in parts]
    CheckpointManager(CheckpointConfig(), model_parts=parts, optimizers=optimizers, base_folder=folder)


@says(
    "parameter 0 (shape [4, 4]) of AdamW is in no model part: pass every module the optimizer trains in model_parts, "
    "and build the optimizer after anything that replaces parameters"
)
def an_optimizer_of_another_model(folder: Path) -> None:
    load(folder, model(4, 4), optimizers=[torch.optim.AdamW(model(4, 4).parameters())])


@says(
    "the model's own code does not load what its state_dict() returns, so that a resumed run would not be this one\n"
    "  the model (Sequential): 12 entries are not what was loaded: 0.weight, 0.bias, 1.weight, 1.bias, 2.weight, "
    "2.bias, 3.weight, 3.bias and 4 more\n"
    "  Mend the module's state-dict hooks and overrides: load_state_dict(state_dict()) must change nothing and write "
    "every parameter in place"
)
def a_state_dict_with_new_values(folder: Path) -> None:
    net = model(4, 4, 4, 4, 4, 4, 4)
    net.register_state_dict_post_hook(lambda _, state, *__: state.update({k: v + 1 for k, v in state.items()}))
    saved(folder, net, 1)


@says("RUN/checkpoints: this process already writes here through another object: close it first")
def a_second_writer(folder: Path) -> None:
    with manager(folder, model(4, 4)) as run:
        run.load()
        run.save(1)
        other = manager(folder, model(4, 4))
        other.load()
        other.save(2)


@says(
    "RUN/checkpoints: step 2 is to be saved, load() was never called, and step 1 of an earlier run is there: call "
    "load() before the first step to resume, or choose another folder"
)
def a_run_that_never_loaded(folder: Path) -> None:
    saved(folder, model(4, 4), 1)
    world.save(manager(folder, model(4, 4)), 2)


@says(
    "step 5 holds model weights only, so training cannot resume from it; name it in [[checkpoint.initial_load]] of "
    "another run instead"
)
def weights_only_as_a_step(folder: Path) -> None:
    save = SaveConfig(interval=1, async_mode="disabled", model_only_last=True)
    with manager(folder, model(4, 4), save=save) as run:
        run.load()
        run.save(5, last_step=True)
    load(folder, model(4, 4), resume=ResumeConfig(step=5))


@says(
    "RUN is an adapter, and no converter of this run owns adapter weights: add the converter it belongs to, such as "
    '[[converters]] kind = "lora"'
)
def an_adapter_without_lora(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "target_modules": ["q"]}))
    load(folder, model(4, 4), initial_load=[folder])


@says(
    "RUN/.metadata is not the metadata of a DCP checkpoint, and may be hostile: it names posix.system, which no DCP "
    "metadata needs. Nothing was executed. Take another checkpoint"
)
def metadata_of_dcp_that_is_hostile(folder: Path) -> None:
    (folder / ".metadata").write_bytes(b"cposix\nsystem\n(S'true'\ntR.")
    load(folder, model(4, 4), initial_load=[folder])


@says(
    "RUN/config.json: 1 problem(s)\n"
    "  model_type: 'gpt2' is not supported, expected 'llama'; set model.name = \"hf\", which takes every causal "
    "language model of transformers"
)
def a_hugging_face_folder_of_another_architecture(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 8}))
    build_model("llama3", folder=folder)


@says(
    "RUN/adapter_model.safetensors: 40 tensor(s): expected 16 in dim 0 of A and in dim 1 of B, the rank that the "
    "config gives, found 4: base_model.model.layers.0.q_proj.lora_A.weight, "
    "base_model.model.layers.0.q_proj.lora_B.weight, base_model.model.layers.1.q_proj.lora_A.weight, "
    "base_model.model.layers.1.q_proj.lora_B.weight, base_model.model.layers.10.q_proj.lora_A.weight, "
    "base_model.model.layers.10.q_proj.lora_B.weight, base_model.model.layers.11.q_proj.lora_A.weight, "
    "base_model.model.layers.11.q_proj.lora_B.weight and 32 more. Save the adapter again, or take another"
)
def an_adapter_whose_rank_is_not_that_of_its_config(folder: Path) -> None:
    names = [f"base_model.model.layers.{i}.q_proj" for i in range(20)]
    tensors = {f"{name}.lora_A.weight": torch.ones(4, 8) for name in names}
    tensors |= {f"{name}.lora_B.weight": torch.ones(8, 4) for name in names}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 16, "lora_alpha": 16, "target_modules": ["q_proj"]})
    )
    open_reader(folder)


@says(
    "step 2 was saved with converters lora, this run has none\n"
    "  lora: only in the checkpoint\n"
    "  Resume with the same [[converters]], or start from the step in another folder, named in "
    "[[checkpoint.initial_load]]"
)
def a_step_of_other_converters(folder: Path) -> None:
    shutil.copytree(Path(__file__).parent / "golden/native-1/lora-adapter", folder, dirs_exist_ok=True)
    load(folder, model(4, 4), initial_load=[folder / "base/step-0"])


@says(
    "RUN/checkpoints/step-2 holds only adapter weights, and no base is configured: name the base it was trained on "
    "in [[checkpoint.initial_load]]"
)
def a_step_of_an_adapter_without_its_base(folder: Path) -> None:
    shutil.copytree(Path(__file__).parent / "golden/native-1/lora-adapter", folder, dirs_exist_ok=True)
    load(folder, model(4, 4))


@pytest.mark.parametrize(("fault", "message"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_fault_is_told_word_for_word(tmp_path: Path, fault: Fault, message: str) -> None:
    """The message says the fault, the place, what was expected and found, and the next step, and nothing twice."""
    with pytest.raises(CheckpointError) as caught:
        fault(tmp_path)
    assert DIGEST.sub("DIGEST", str(caught.value).replace(str(tmp_path), "RUN")) == message
