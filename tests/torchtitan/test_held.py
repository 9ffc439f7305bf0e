"""What torchtitan's Trainer holds: classes of torchtitan and of a user resume exactly, or are refused by name."""

# mypy: disable-error-code="misc, no-any-return"
# torchtitan, whose classes are extended here, is not there when mypy runs

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

from tests.torchtitan.runs import FLAVOURS, config, distributed, same, train
from titan_ckpt.errors import ConfigError, PeerError
from titan_ckpt.integrations.torchtitan import held

# isort: split
import torchtitan
import torchtitan.models
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.components.validate import Validator
from torchtitan.config.configs import TrainingConfig
from torchtitan.hf_datasets import text_datasets as texts
from torchtitan.trainer import Trainer

CPU = {
    "llama3": "debugmodel debugmodel_ce_loss debugmodel_dist_gemm debugmodel_float8_emulate_lora",
    "qwen3": "debugmodel debugmodel_non_fused_qkv debugmodel_moe_param_groups moe_debug",
    "deepseek_v3": "debugmodel debugmodel_mtp",
    "gpt_oss": "debugmodel_flex",
    "kimi_k2_7": "debugmodel",
    "muse_glimmer": "debugmodel debugmodel_mm",
}
"""The flavours that run on a CPU. Those with images are trained on text alone."""
ELSEWHERE = {
    "llama3": "debugmodel_varlen_attn debugmodel_float8 debugmodel_nvfp4 debugmodel_first_85_pct_layers_nvfp4",
    "qwen3": "debugmodel_nvfp4 debugmodel_first_85_pct_layers_nvfp4 debugmodel_flex_flash",
    "deepseek_v3": "debugmodel_mxfp8 debugmodel_hybridep debugmodel_minimal_async_ep",
    "gpt_oss": "debugmodel",
}
"""Flavours that need a GPU; but for quantization they are of the classes above."""


def _registry(model: str) -> ModuleType:
    """Return a registry of flavours; what loads images is not installed here, and not called."""
    import datasets as datasets  # these two look for torchvision themselves
    import transformers as transformers

    parts = ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional")
    for name in (f"torchvision{part}" for part in parts):
        sys.modules.setdefault(name, MagicMock(__spec__=None, __path__=[]))
    return importlib.import_module(f"torchtitan.models.{model}.config_registry")


def _flavours(model: str) -> dict[str, Callable[[], Any]]:
    made = vars(_registry(model)).items()
    own = {name: value for name, value in made if getattr(value, "__module__", "").endswith(f"{model}.config_registry")}
    return {name: value for name, value in own.items() if "debug" in name and name[0] != "_" and "sft" not in name}


def test_every_flavour_is_trained_or_needs_a_gpu() -> None:
    """A flavour that a newer torchtitan adds is found here; the models are those of its own list."""
    unproved = {"flux", "qwen3_5"}  # a Trainer of its own; kernels of flash-linear-attention
    assert CPU.keys() == torchtitan.models._supported_models - unproved
    found = {model: {name.removeprefix(f"{_prefix(model)}_") for name in _flavours(model)} for model in CPU}
    assert found == {model: {*CPU[model].split(), *ELSEWHERE.get(model, "").split()} for model in CPU}
    refused = {
        "torchtitan.models.flux.model.model.FluxModel.Config",
        "torchtitan.models.qwen3_5.model.Qwen35Model.Config",
    }
    assert refused.isdisjoint(held.KNOWN)


def _prefix(model: str) -> str:
    return {"kimi_k2_7": "kimi_k2_5"}.get(model, model)


BASES = {
    "Trainer", "BaseDataLoader", "OptimizersContainer", "LRSchedulersContainer", "BaseValidator", "MetricsProcessor",
    "BaseLoss", "IterableDataset",
}  # fmt: skip
REFUSED = """
experiments.graph_trainer.chunked_loss.ChunkedLossWrapperWithParamGrads experiments.graph_trainer.trainer.GraphTrainer
experiments.rl.losses.dapo.DAPOLoss experiments.rl.losses.grpo.GRPOLoss
experiments.torchft.optimizer.TorchFTOptimizersContainer experiments.torchft.trainer.FaultTolerantTrainer
experiments.transformers_modeling_backend.trainer.HFTransformerTrainer components.loss.MSELoss
hf_datasets.multimodal.mm_datasets.HuggingFaceMultiModalDataset hf_datasets.multimodal.mm_datasets.MMDataLoader
models.flux.flux_datasets.FluxDataLoader models.flux.flux_datasets.FluxDataset
models.flux.flux_datasets.FluxValidationDataset models.flux.trainer.FluxTrainer models.flux.validate.FluxValidator
"""


def test_every_class_of_torchtitan_is_exact_or_refused() -> None:
    """Each class that its Trainer may hold is listed, and each that is listed is there."""
    root = Path(torchtitan.__file__).parent
    found: dict[str, tuple[str, set[str]]] = {}
    for path in sorted(root.rglob("*.py")):
        module = ".".join(("torchtitan", *path.relative_to(root).with_suffix("").parts))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}
                found[node.name] = f"{module}.{node.name}", bases
    kinds = {*BASES}
    while more := {name for name, (_, bases) in found.items() if name not in kinds and bases & kinds}:
        kinds |= more
    names = {found[kind][0] for kind in kinds if kind in found}
    names = {name for name in names if ".rl.observability" not in name}  # of the same name as the Trainer's
    exact = {name for name in held.KNOWN if name.startswith("torchtitan.") and not name.endswith(".Config")}
    exact = {
        name for name in exact if not held.KNOWN[name] and name != "torchtitan.components.metrics.MetricsProcessor"
    }
    assert names == exact | {f"torchtitan.{name}" for name in REFUSED.split()}


def test_settings_that_state_may_depend_on_are_listed() -> None:
    """A setting that a newer torchtitan adds to one of these parts is refused, and found here."""
    kinds = [Trainer.Config, TrainingConfig, OptimizersContainer.Config, LRSchedulersContainer.Config, Validator.Config]
    assert {f"{k.__module__}.{k.__qualname__}": {f.name for f in fields(k)} for k in kinds} == held.FIELDS


@distributed(1)
def _resumes(assets: Path, folder: Path, flavour: str, change: Callable[[Any, Path], None] | None) -> None:
    model, _, name = flavour.partition("/")
    registered = _flavours(model)[
        f"{_prefix(model)}_{name}" if f"{_prefix(model)}_{name}" in _flavours(model) else name
    ]

    def flavour_of_text() -> Any:
        made = registered()
        made.dataloader = texts.HuggingFaceTextDataLoader.Config()
        if model == "kimi_k2_7":
            llama = FLAVOURS["llama3_debugmodel"]()
            made.tokenizer, made.optimizer = llama.tokenizer, llama.optimizer  # its own one needs a GPU
        return made

    def run(dump: str, **settings: Any) -> Any:
        FLAVOURS["of text"] = flavour_of_text
        made = config(assets, folder / dump, "of text", steps=4, layers=3, **settings)
        if model in ("muse_glimmer", "kimi_k2_7") or name == "debugmodel_dist_gemm":
            made.parallelism.spmd_backend = "spmd_types"
        if change is not None:
            change(made, assets)
        return made

    whole = train(run("whole"))
    train(run("cut"), until=2)
    resumed = train(run("cut"))
    assert len(resumed.losses) == 2
    same(whole, resumed, losses=2)


def _interleaved(made: Any, assets: Path) -> None:
    sources = [texts.HFDataSource(dataset_path=str(assets / "data"), weight=weight) for weight in (1, 2)]
    made.dataloader = texts.InterleavedHuggingFaceTextDataLoader.Config(sources=sources)


def _rows(assets: Path) -> dict[str, Any]:
    def messages(row: dict[str, str]) -> list[dict[str, str]]:
        return [{"role": "user", "content": row["text"][:20]}, {"role": "assistant", "content": row["text"][20:40]}]

    kwargs = {"data_files": str(assets / "data/text.json"), "split": "train"}
    path = assets / "tokenizer_config.json"
    chat = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": chat}))
    return {"dataset_path": "json", "load_dataset_kwargs": kwargs, "sample_processor": messages}


def _chat(made: Any, assets: Path) -> None:
    made.dataloader = texts.ChatDataLoader.Config(**_rows(assets))


def _chats(made: Any, assets: Path) -> None:
    sources = [texts.ChatDataSource(**_rows(assets), weight=weight) for weight in (1, 2)]
    made.dataloader = texts.InterleavedChatDataLoader.Config(sources=sources)


def _validated(made: Any, assets: Path) -> None:
    data = texts.HuggingFaceTextDataLoader.Config(dataset_path=str(assets / "data"))
    made.validator = Validator.Config(enable=True, freq=1, steps=2, dataloader=data)


CASES: dict[str, tuple[str, Callable[[Any, Path], None] | None]] = {
    f"{model}/{name}": (f"{model}/{name}", None) for model, names in CPU.items() for name in names.split()
}
CASES |= {f.__name__[1:]: ("llama3/debugmodel", f) for f in (_interleaved, _chat, _chats, _validated)}
QUICK = ("deepseek_v3/debugmodel_mtp", "interleaved", "chat", "validated")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.full) for case in CASES]
)
def test_a_listed_class_continues_bit_for_bit(assets: Path, tmp_path: Path, case: str) -> None:
    """4 steps, and 2 and 2 steps of a run that starts again, have the same losses, weights and moments."""
    _resumes(assets, tmp_path, *CASES[case])


class Numbers(BaseDataLoader):
    """A user's own dataloader."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """No settings."""

    def __init__(self, config: Config, *, seq_len: int, local_batch_size: int, **more: Any) -> None:
        self.shape, self.at, self.config = (local_batch_size, seq_len + 1), 0, config

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.at += 1
            rows = torch.randint(3, 500, self.shape, generator=torch.Generator().manual_seed(self.at))
            positions = torch.arange(self.shape[1] - 1).expand(self.shape[0], -1)
            yield {"input": rows[:, :-1], "positions": positions}, rows[:, 1:].clone()

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at = state_dict["at"]


def forgetful(kind: Any, method: str) -> Any:
    """Return a user's subclass whose method counts its calls, which no state holds."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        return getattr(super(made, self), method)(*args, **kwargs)

    @dataclass(kw_only=True, slots=True)
    class Config(kind.Config):
        """No settings of its own."""

    made = type(f"Own{kind.__name__}", (kind,), {"Config": Config, method: call, "__module__": __name__})
    return made


FORGETFUL = {
    "dataloader": forgetful(texts.HuggingFaceTextDataLoader, "__iter__"),
    "optimizer": forgetful(OptimizersContainer, "step"),
    "loss": forgetful(CrossEntropyLoss, "__call__"),
    "metrics": forgetful(MetricsProcessor, "log"),
    "validator": forgetful(Validator, "validate"),
}


class Plateau(LRSchedulersContainer):
    """A schedule that remembers how often it was called."""

    @dataclass(kw_only=True, slots=True)
    class Config(LRSchedulersContainer.Config):
        """No settings of its own; torchtitan's build() knows no subclass."""

        def build(self, **objects: Any) -> Any:
            made = LRSchedulersContainer.Config.build(self, **objects)
            made.__class__ = self._owner
            return made

    def step(self) -> None:
        self.calls = getattr(self, "calls", 0) + 1
        super().step()
        for scheduler in self.schedulers:
            for group in scheduler.optimizer.param_groups:
                group["lr"] *= 0.9**self.calls


class Remembered(Plateau):
    @dataclass(kw_only=True, slots=True)
    class Config(Plateau.Config):
        """No settings of its own."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"calls": getattr(self, "calls", 0)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.calls = state_dict["calls"]
        super().load_state_dict(state_dict)


class Mine(Trainer):
    """A Trainer with a counter, with and without its state."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """No settings of its own."""

    def train_step(self, *args: Any, **kwargs: Any) -> None:
        super().train_step(*args, **kwargs)
        self.seen = getattr(self, "seen", 0) + 1


class Saved(Mine):
    @dataclass(kw_only=True, slots=True)
    class Config(Mine.Config):
        """No settings of its own."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"seen": getattr(self, "seen", 0)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.seen = state_dict["seen"]


def _as(kind: Any, given: Any) -> Any:
    """Return the config of a subclass with the same settings."""
    return kind.Config(**{f.name: getattr(given, f.name) for f in fields(given) if f.init and f.name in _names(kind)})


def _names(kind: Any) -> set[str]:
    return {f.name for f in fields(kind.Config)}


def _part(name: str, kind: Any) -> Callable[[Any, Path], Any]:
    def change(made: Any, assets: Path) -> None:
        setattr(made, name, _as(kind, getattr(made, name)))

    return change


def _smoothed(made: Any, assets: Path) -> None:
    made.loss = _as(FORGETFUL["loss"], made.loss.loss_fn)


def _best(made: Any, assets: Path) -> None:
    _validated(made, assets)
    made.validator = _as(FORGETFUL["validator"], made.validator)


def _streamed(made: Any, assets: Path) -> None:
    rows = _rows(assets)
    rows["load_dataset_kwargs"] |= {"streaming": True}
    made.dataloader = texts.ChatDataLoader.Config(**rows)


def _ending(made: Any, assets: Path) -> None:
    _interleaved(made, assets)
    made.dataloader.stopping_strategy = "all_exhausted"
    for source in made.dataloader.sources:
        source.infinite = False


def _finite(made: Any, assets: Path) -> None:
    made.dataloader.infinite = False


def _of_user(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _lost(part: str, kind: Any) -> str:
    return f"{part} {_of_user(kind)}: its code sets self.calls"


OWN: dict[str, tuple[Callable[[Any, Path], Any], str]] = {
    "dataloader": (_part("dataloader", FORGETFUL["dataloader"]), _lost("dataloader", FORGETFUL["dataloader"])),
    "optimizer": (_part("optimizer", FORGETFUL["optimizer"]), _lost("optimizer", FORGETFUL["optimizer"])),
    "schedule": (_part("lr_scheduler", Plateau), _lost("learning-rate scheduler", Plateau)),
    "loss": (_smoothed, _lost("loss", FORGETFUL["loss"])),
    "metrics": (_part("metrics", FORGETFUL["metrics"]), _lost("metrics processor", FORGETFUL["metrics"])),
    "validator": (_best, _lost("validator", FORGETFUL["validator"])),
    "stream": (_streamed, "the state of a stream leaves out the buffer of shuffle()"),
    "finite": (_finite, "HuggingFaceTextDataset: a resumed run reads a document before it yields what it holds"),
    "interleaved": (_ending, "InterleavedDataset: which sources have ended is not in its state"),
}
"""Objects of a user, or of torchtitan as a user may set them, whose state a resumed run would lose."""


@distributed(1)
def _refused(assets: Path, folder: Path) -> None:
    missed: dict[str, str] = {}
    for name, (change, complaint) in OWN.items():
        made = config(assets, folder / "run", steps=1, layers=1)
        change(made, assets)
        try:
            train(made)
        except ConfigError as error:
            if complaint not in str(error) or "checkpoint.allow = [" not in str(error):
                missed[name] = str(error)
        else:
            missed[name] = "it was trained"
    mine = _as(Mine, config(assets, folder / "run", steps=1, layers=1))
    with pytest.raises(ConfigError, match=r"trainer .*\.Mine: its code sets self.seen"):
        train(mine)
    mine.checkpoint.allow = [_of_user(Mine)]
    train(mine)
    assert missed == {}
    assert [path.name for path in (folder / "run/checkpoint").iterdir() if path.name.startswith("step")] == ["step-1"]
    assert any(_of_user(Mine) in path.read_text() for path in (folder / "run/checkpoint/step-1").glob("*.json"))


def test_what_loses_state_is_refused_before_step_1(assets: Path, tmp_path: Path) -> None:
    """Each by its name; checkpoint.allow lets it run, and its steps say so."""
    _refused(assets, tmp_path)


@distributed(2)
def _refused_by_one(assets: Path, folder: Path) -> None:
    made = config(assets, folder / "run", steps=1, layers=1, degrees={"data_parallel_shard": 2})
    change, complaint = OWN["metrics"]
    if dist.get_rank() == 0:
        change(made, assets)
    with pytest.raises(PeerError if dist.get_rank() else ConfigError, match=re.escape(complaint)):
        train(made)


def test_what_one_rank_alone_would_lose_is_refused_on_all_ranks(assets: Path, tmp_path: Path) -> None:
    """Rank 0 is the one that logs; the others do not wait for it in the load."""
    _refused_by_one(assets, tmp_path)


@distributed(1)
def _own_state(assets: Path, folder: Path) -> None:
    def run(dump: str) -> Any:
        made = config(assets, folder / dump, steps=4, layers=2)
        made.dataloader, made.lr_scheduler = Numbers.Config(), _as(Remembered, made.lr_scheduler)
        return _as(Saved, made)

    seen: list[int] = []
    whole = train(run("whole"))
    train(run("cut"), until=2)
    resumed = train(run("cut"), then=lambda trainer: seen.append(trainer.seen))
    assert len(resumed.losses) == 2
    assert seen == [4]
    same(whole, resumed, losses=2)


def test_a_users_own_objects_that_return_their_state_resume_bit_for_bit(assets: Path, tmp_path: Path) -> None:
    """A dataloader, a schedule and a Trainer with state of their own."""
    _own_state(assets, tmp_path)


def test_hooks_settings_and_parts_that_are_not_known_are_refused() -> None:
    """A hook with variables around it, a setting of a newer torchtitan, and quantization that was not proved."""
    kept: list[int] = []
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_post_hook(lambda *_: kept.append(1))
    lines = held.faults({}, None, [optimizer], None, ())
    assert len(lines) == 1
    assert "optimizer hook" in lines[0]
    assert "which no step holds" in lines[0]
    assert held.faults({}, None, [optimizer], None, (lines[0].rpartition('"')[0].rpartition('"')[2],)) == []

    @dataclass(kw_only=True)
    class Newer(TrainingConfig):
        ema: float = 0.0

    @dataclass
    class NewConfig:
        training: Newer = field(default_factory=Newer)

    Newer.__module__, Newer.__qualname__ = TrainingConfig.__module__, TrainingConfig.__qualname__
    state = SimpleNamespace(config=NewConfig(), state_dict=dict, load_state_dict=dict)
    (line,) = held.faults({"train_state": state}, None, [], None, ())
    assert line.startswith("training.ema: it is not known what a resumed run makes of this setting")
    assert held.faults({"train_state": state}, None, [], None, ("training.ema",)) == []

    from torchtitan.components.quantization.nvfp4 import NVFP4Linear

    args = FLAVOURS["llama3_debugmodel"]().model_spec.model
    args.lm_head = NVFP4Linear.Config(in_features=256, out_features=2048)
    state = SimpleNamespace(model_config=args)
    (line,) = held.faults({"train_state": state}, None, [], None, ())
    assert line.startswith("model part torchtitan.components.quantization.nvfp4.NVFP4Linear.Config: it was not proved")
