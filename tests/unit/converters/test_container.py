"""ModelConvertersContainer: order, owners of keys, adapters that need a filter, tables, resumes with another set."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

from titan_ckpt.converters import (
    Float8Config,
    LoRAConfig,
    LoRAConverter,
    ModelConverter,
    ModelConvertersContainer,
    QATConfig,
    build,
    from_tables,
)
from titan_ckpt.converters.float8 import gather
from titan_ckpt.converters.parallel import ConvertedParallel
from titan_ckpt.errors import ConfigError, ConverterError
from titan_ckpt.geometry.keymap import KeyMap, KeyRule
from titan_ckpt.types import Stage, StateDict, StateDictAdapter
from titan_ckpt.weights.identity import check_converters, differences


def model() -> nn.Module:
    return nn.ModuleDict({"up": nn.Linear(32, 64, bias=False), "down": nn.Linear(64, 32)})


@dataclass(frozen=True)
class Settings:
    kind: str


class Probe(ModelConverter):
    """A converter that does what a test tells it to."""

    stage: ClassVar[Stage] = "adapt"

    def __init__(
        self,
        change: Callable[[nn.Module], None] = lambda model: None,
        claim: Callable[[str], bool] = lambda fqn: False,
        factor: float = 1.0,
        addend: float = 0.0,
        kind: str = "probe",
        **attributes: Any,
    ) -> None:
        super().__init__(Settings(kind))
        self.change, self.claim, self.factor, self.addend = change, claim, factor, addend
        vars(self).update(attributes)

    def convert(self, model: nn.Module) -> None:
        self.change(model)

    def key_filter(self, fqn: str) -> bool:
        return self.claim(fqn)

    def state_dict_transform(self, state_dict: StateDict, last_step: bool) -> StateDict:
        return {fqn: value * self.factor + self.addend for fqn, value in state_dict.items()}

    def post_optimizer_hook(self, model_parts: Sequence[nn.Module]) -> None:
        for part in model_parts:
            part.get_parameter("up.weight").detach().mul_(self.factor).add_(self.addend)


def test_a3_wrong_order_is_answered_with_the_right_one() -> None:
    """A converter that replaces modules after one that adapts them is refused, and the right order is given."""
    with pytest.raises(ConverterError, match=r"order lora, qat: .* in this order: qat, lora"):
        build([LoRAConfig(("up",)), QATConfig("int8_weight_only")])
    with pytest.raises(ConverterError, match="in this order: float8, lora"):
        build([LoRAConfig(("up",)), Float8Config(emulate=True)])


def test_a3_right_order_keeps_the_adapters() -> None:
    """Quantization first and LoRA last leaves both: fake-quantized modules with adapter keys."""
    m = model()
    converters = build([QATConfig("int8_weight_only"), LoRAConfig(("up",), rank=2)])
    converters.convert(m)
    assert [fqn for fqn in m.state_dict() if converters.key_filter(fqn)] == ["up.lora_a.weight", "up.lora_b.weight"]
    assert hasattr(m.get_submodule("up"), "weight_fake_quantizer")


def test_one_kind_twice_is_refused() -> None:
    """Two converters of one kind cannot be told apart."""
    with pytest.raises(ConverterError, match="'lora' appears 2 times"):
        build([LoRAConfig(("up",)), LoRAConfig(("down",))])


def test_two_replacements_of_one_module_are_refused() -> None:
    """Float8 and QAT both exchange linear modules: the second would undo the first without a word."""
    with pytest.raises(ConverterError, match="down: is a Float8Linear, whose own computation would be lost"):
        build([Float8Config(emulate=True, exclude_modules=("up",)), QATConfig("int8_weight_only")]).convert(model())


def test_a_second_replacement_by_anyone_is_refused() -> None:
    """Also for converters that do not look: which modules changed their type is compared after each."""

    def swap(m: nn.Module) -> None:
        m.get_submodule("up").__class__ = type("Swapped", (type(m.get_submodule("up")),), {})

    with pytest.raises(ConverterError, match="'other' replaces what 'probe' has replaced: up"):
        ModelConvertersContainer([Probe(swap, stage="replace", kind=kind) for kind in ("probe", "other")]).convert(
            model()
        )


def test_two_replacements_of_different_modules_work() -> None:
    """Float8 on one module and QAT on another do not meet."""
    converters = build(
        [Float8Config(emulate=True, exclude_modules=("up",)), QATConfig("int8_weight_only", exclude_modules=("down",))]
    )
    m = model()
    converters.convert(m)
    assert [type(x).__name__ for x in m.children()] == ["FakeQuantizedLinear", "Float8Linear"]


class _NoFilter(ModelConverter):
    stage: ClassVar[Stage] = "adapt"

    def convert(self, model: nn.Module) -> None: ...

    def state_dict_adapter(self) -> StateDictAdapter | None:
        return None


def test_a3_adapter_without_filter_is_an_error() -> None:
    """Names for added keys mean nothing where nothing says which keys were added."""
    with pytest.raises(ConverterError, match="'probe' has a state_dict_adapter and no key_filter"):
        ModelConvertersContainer([_NoFilter(Settings("probe"))])


def rename(m: nn.Module) -> None:
    m.add_module("above", m._modules.pop("up"))


def add(m: nn.Module) -> None:
    m.register_parameter("extra", nn.Parameter(torch.zeros(1)))


@pytest.mark.parametrize(
    ("probe", "fault"),
    [
        (Probe(rename, lambda fqn: fqn.startswith("above")), r"'probe' dropped or renamed up\.weight"),
        (Probe(add), "added keys that it does not claim: extra"),
        (Probe(claim=lambda fqn: "bias" in fqn), r"claims keys that it did not add: down\.bias"),
    ],
)
def test_a_converter_that_breaks_a_law_is_named(probe: Probe, fault: str) -> None:
    """The keys are checked as soon as a converter has changed them."""
    with pytest.raises(ConverterError, match=fault):
        ModelConvertersContainer([probe]).convert(model())


def test_a3_a_key_has_one_owner() -> None:
    """An added key that another converter claims too is refused."""
    greedy = Probe(claim=lambda fqn: fqn == "extra", kind="other")
    with pytest.raises(ConverterError, match="added keys that another converter claims too: extra"):
        ModelConvertersContainer([Probe(add, lambda fqn: fqn == "extra"), greedy]).convert(model())


def test_a3_transforms_are_undone_last_first() -> None:
    """The last converter applied is the first whose transform runs."""
    converters = ModelConvertersContainer([Probe(factor=10.0), Probe(addend=1.0, kind="other")])
    assert converters.state_dict_transform({"x": torch.tensor(1.0)}, last_step=True)["x"] == 20.0


def test_hooks_run_after_the_optimizer_in_order() -> None:
    """Every converter's hook gets all model parts, the first converter's first."""
    parts = [model(), model()]
    for part in parts:
        nn.init.ones_(part.get_parameter("up.weight"))
    ModelConvertersContainer([Probe(factor=10.0), Probe(addend=1.0, kind="other")]).post_optimizer_hook(parts)
    assert all(bool((part.get_parameter("up.weight") == 11.0).all()) for part in parts)


class _Table:
    def __init__(self, name: str) -> None:
        self.name = name

    def key_map(self, base: KeyMap, found: object = None) -> KeyMap:
        return KeyMap((KeyRule.of(f"native.{self.name}", f"file.{self.name}"),))

    def file_config(self, base: KeyMap) -> dict[str, Any]:
        return {}

    def misfits(self, base: KeyMap, found: Mapping[str, Any]) -> list[str]:
        return [] if found["name"] == self.name else [f"it is {found['name']}'s"]


def test_a3_adapters_are_joined_and_one_folder_holds_one() -> None:
    """The tables of several converters serve one checkpoint; a folder for another tool has one adapter's settings."""
    converters = [Probe(kind=kind, state_dict_adapter=partial(_Table, kind)) for kind in ("probe", "other")]
    adapter = ModelConvertersContainer(converters).state_dict_adapter()
    assert adapter is not None
    table = adapter.key_map(KeyMap())
    assert table.group_of_fqn("native.probe").keys == ("file.probe",)
    assert table.group_of_key("file.other").fqns == ("native.other",)
    assert adapter.misfits(KeyMap(), {"name": "other"}) == []
    assert adapter.misfits(KeyMap(), {"name": "third"}) == ["it is third's"]
    with pytest.raises(ConverterError, match="2 converters own keys"):
        adapter.file_config(KeyMap())


def test_no_converters_change_nothing() -> None:
    """An empty container is false, owns nothing and passes tensors on."""
    none = from_tables([])
    m = model()
    none.convert(m)
    assert not none and none.describe() == [] and none.state_dict_adapter() is None
    given = m.state_dict()
    made = none.state_dict_transform(given, last_step=True)
    assert list(made) == list(model().state_dict()) and made is not given


def test_tables_become_converters_in_their_order() -> None:
    """`[[converters]]` tables are told apart by kind and described for the manifest with every setting."""
    converters = from_tables(
        [{"kind": "qat", "scheme": "int4_weight_only", "group_size": 16}, {"kind": "lora", "target_modules": ["up"]}]
    )
    qat, lora = converters.describe()
    assert qat == {
        "kind": "qat", "scheme": "int4_weight_only", "group_size": 16, "exclude_modules": None, "embeddings": False,
    }  # fmt: skip
    assert lora["target_modules"] == ["up"] and lora["rank"] == 8 and lora["use_dora"] is False
    assert isinstance(list(converters)[1], LoRAConverter)


@pytest.mark.parametrize(
    ("table", "fault"),
    [
        ({}, "converters.0.kind: required"),
        ({"kind": "lorra"}, 'did you mean "lora"'),
        ({"kind": "lora"}, "converters.0.target_modules: required"),
        ({"kind": "lora", "target_modules": []}, "target_modules: names no module"),
        ({"kind": "lora", "target_modules": ["up"], "r": 8}, "PEFT's name; here: rank"),
        ({"kind": "lora", "target_modules": ["up"], "rank": 0}, "rank: expected a positive integer, found 0"),
        ({"kind": "lora", "target_modules": ["up"], "alpha": 0}, "alpha: expected a positive number"),
        ({"kind": "lora", "target_modules": ["up"], "dropout": 1.0}, "dropout: expected a probability below 1"),
        ({"kind": "lora", "target_modules": ["up"], "rank_pattern": {"up": -1}}, "rank_pattern.up: expected a pos"),
        ({"kind": "qat", "scheme": "int5"}, "scheme: expected one of"),
        ({"kind": "qat", "scheme": "int8_weight_only", "group_size": 32}, "int8_weight_only has none of its own"),
        ({"kind": "qat", "scheme": "mxfp8", "embeddings": True}, "embeddings: mxfp8 quantizes activations"),
        ({"kind": "float8", "recipe": "rowwise", "fsdp_all_gather": True}, "a gathered weight has one scale"),
        ({"kind": "float8", "recipe": "columnwise"}, "recipe: expected one of"),
    ],
)
def test_bad_tables_are_answered(table: dict[str, Any], fault: str) -> None:
    """Every setting that cannot mean anything is named with its path and its cause."""
    with pytest.raises(ConfigError) as caught:
        from_tables([table])
    assert fault in str(caught.value)


QAT = {"kind": "qat", "scheme": "int8_weight_only"}
LORA = {"kind": "lora", "target_modules": ["wq", "wv"], "rank": 4}


def described(*tables: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the records of converters as a manifest gives them back."""
    stored: list[dict[str, Any]] = json.loads(json.dumps(from_tables(list(tables)).describe()))
    return stored


def test_the_same_set_is_accepted() -> None:
    """Equal settings, through JSON, are no difference; neither is having no converters twice."""
    check_converters(described(QAT, LORA), from_tables([QAT, LORA]).describe(), 5)
    check_converters([], [], 5)


def test_a_plan_of_tensor_parallelism_is_a_containers() -> None:
    """PyTorch's styles would cut added modules as they cut the weight, so a converter in no container is refused."""
    converters, plan = from_tables([{"kind": "lora", "target_modules": ["wq"]}]), {"wq": ColwiseParallel()}
    fit = converters.parallel_plan(plan)["wq"]
    assert isinstance(fit, ConvertedParallel) and fit.style is plan["wq"]
    (alone,) = converters
    with pytest.raises(NotImplementedError, match=r"lora: .* pass ModelConvertersContainer\(\[converter\]\)"):
        alone.parallel_plan(plan)


def test_f10_every_difference_is_listed() -> None:
    """Added, removed and changed converters are all in the one message, which says what to do."""
    saved = described(QAT, LORA)
    here = described({"kind": "float8", "emulate": True}, {**LORA, "rank": 8, "target_modules": ["wq"]})
    with pytest.raises(ConverterError) as caught:
        check_converters(saved, here, 7)
    for line in (
        "step 7 was saved with converters qat, lora, this run has float8, lora",
        "qat: only in the checkpoint",
        "float8: only in this run",
        "lora.target_modules: ['wq', 'wv'] in the checkpoint, ['wq'] in this run",
        "lora.rank: 4 in the checkpoint, 8 in this run",
        "Resume with the same [[converters]]",
    ):
        assert line in str(caught.value)
    assert "dropout" not in str(caught.value)


def test_order_and_unknown_settings_count() -> None:
    """The same converters the other way round differ, as does a setting that only one side knows."""
    one, other = {"kind": "a"}, {"kind": "b", "new": None}
    assert differences([one, other], [other, one]) == ["order: a, b in the checkpoint, b, a in this run"]
    assert differences([{"kind": "b"}], [other]) == ["b.new: nothing in the checkpoint, None in this run"]


ROOT = Path(__file__).parents[3]


def test_a_checkouts_second_name_is_the_same_modules() -> None:
    """A class is the same one whichever name was imported first, and a module below it, too."""
    assert importlib.import_module("converters.float8.gather") is gather
    assert importlib.import_module("converters").LoRAConverter is LoRAConverter
    first = (
        "from converters.lora.converter import LoRAConverter as first\n"
        "from titan_ckpt.converters import LoRAConverter as second\n"
        "assert first is second and first.__module__ == 'titan_ckpt.converters.lora.converter'\n"
    )
    subprocess.run([sys.executable, "-c", first], cwd=ROOT, check=True, timeout=280)
