"""Every kind of adapter, variant of LoRA and optimizer of PEFT: a resumed run is exact, or refused by name.

Each is killed and resumed with other initial values, in a loop of one's own and in transformers' Trainer, where a step
holds the adapters and a digest of the base.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.lora.layer import LoraVariant
from torch.optim import Optimizer

from tests.integrations.peft_runs import ALL, CASES, CONFIG, WITH_BASE, adapted, judge, trainer_of
from tests.integrations.trainer_runs import model
from tests.zoo.sample import chosen
from tests.zoo.worlds import Row
from titan_ckpt import CheckpointConfig, CheckpointManager
from titan_ckpt.components.known.peft_adapters import KNOWN, adapter_states
from titan_ckpt.errors import ConfigError, LoadMismatchError
from titan_ckpt.integrations.transformers import attach

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT warns of layers without bias and of its own settings

FLOORS = {"": 66}
_ALWAYS = ["ADALORA", "CARTRIDGE", "OSF", "LORA, target_parameters", "LORA, a frozen reference", "LORA, lorafa"]


def rows() -> list[Row]:
    """Return the row of every case, and of every class that is refused."""
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        found = [row for row in judge(ALL, Path(folder)) if row[1] != "refused"]
    return found + [(name, "refused", why) for name, why in KNOWN.items() if why]


def below(kind: type[Any]) -> Iterator[str]:
    """Yield the names of the public classes of PEFT that are derived from a class."""
    for own in kind.__subclasses__():
        if own.__module__.startswith("peft.") and not own.__name__.startswith("_"):
            yield f"{own.__module__}.{own.__qualname__}"
        yield from below(own)


def test_every_kind_of_the_installed_peft_is_listed() -> None:
    """One that a newer version adds is refused until it is listed."""
    configs = {f"{kind.__module__}.{kind.__qualname__}" for kind in PEFT_TYPE_TO_CONFIG_MAPPING.values()}
    assert {*PEFT_TYPE_TO_CONFIG_MAPPING} == {*peft.PeftType}
    for name in ("lorafa", "riemannian"):
        CASES[f"LORA, {name}"][1](adapted(model(), "LORA", {}))  # its class is made by a function
    assert configs | {*below(LoraVariant)} | {*below(Optimizer)} == KNOWN.keys()


def test_every_function_that_makes_an_optimizer_has_a_run() -> None:
    made = {name.removeprefix("create_").removesuffix("_optimizer") for name in peft.optimizers.__all__}
    assert {f"LORA, {name}" for name in made} <= CASES.keys()


@pytest.mark.filterwarnings("ignore:.*lora_bias=True")
def test_what_is_listed_as_exact_has_a_run() -> None:
    """Adapters are found in a model by the same way as in a run."""
    without = {name for name, why in KNOWN.items() if not why}
    for kind in PEFT_TYPE_TO_CONFIG_MAPPING:
        if kind.value in CASES:
            config = PEFT_TYPE_TO_CONFIG_MAPPING[kind]
            without.discard(f"{config.__module__}.{config.__qualname__}")
    for adapt, optimizer_of in (case for name, case in CASES.items() if name.startswith("LORA")):
        network = adapt(model())
        found = [optimizer_of(network)]
        found += [each for m in network.modules() for each in getattr(m, "lora_variant", {}).values()]
        without -= {f"{type(each).__module__}.{type(each).__qualname__}" for each in found}
    assert without == set()


def test_killed_runs_go_on_bit_for_bit(tmp_path: Path) -> None:
    """Refused are those that the table says."""
    names = [*_ALWAYS, *chosen([name for name in ALL if name not in _ALWAYS], 6)]
    for name, verdict, note in judge(names, tmp_path):
        refused = [kind for kind, why in KNOWN.items() if why and kind in note]
        assert verdict == ("refused" if refused else "exact"), (name, note)


class NewConfig(peft.LoraConfig):
    __module__ = "peft.tuners.new.config"


def test_a_kind_that_is_not_listed_is_refused_unless_it_is_allowed(tmp_path: Path) -> None:
    """In a loop and in a Trainer alike."""
    network = peft.get_peft_model(model(), NewConfig(target_modules=["q_proj"]))
    message = r"adapter 'default' peft\.tuners\.new\.config\.NewConfig: it was not proved .* checkpoint\.allow = "
    with pytest.raises(ConfigError, match=message):
        CheckpointManager(CONFIG, model_parts=[network], base_folder=tmp_path)
    allowing = CheckpointConfig(allow=("peft.tuners.new.config.NewConfig",))
    CheckpointManager(allowing, model_parts=[network], base_folder=tmp_path).close()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("LORA, lorafa", "optimizer LoraFAOptimizer: its groups have frozen parameters of the base: save the base too"),
        ("LORA, init_lora_weights=pissa_niter_4", r"init_lora_weights='pissa_niter_4' changes the base .*include_base"),
        ("LORA, velora_config", r"VeloraLinearVariant: no step says .* checkpoint\.allow"),
    ],
)
def test_a_trainer_is_refused_whose_steps_would_lack_something(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        attach(trainer_of(tmp_path, name, 0), CONFIG)


def test_an_optimizer_over_the_base_that_the_trainer_makes_itself_is_told_what_to_attach(tmp_path: Path) -> None:
    """The advice can be followed: a trainer that is built anew trains with it."""

    def trainer(folder: Path) -> Any:
        built: Any = trainer_of(folder, "LORA, lorafa", 0)
        optimizer, built.optimizer = built.optimizer, None

        def make(*_: Any, **__: Any) -> Any:
            built.optimizer = optimizer
            return optimizer

        built.create_optimizer = make
        return built

    first, second = trainer(tmp_path / "first"), trainer(tmp_path / "second")
    attach(first, CONFIG)
    with pytest.raises(ConfigError, match=r"LoraFAOptimizer: its groups .*include_base=True\), in the attach\(\) of"):
        first.train()
    attach(second, WITH_BASE)
    assert second.train().global_step > 0


def test_hidden_tensors_of_other_settings_are_refused() -> None:
    (stored,) = adapter_states([adapted(model(), "FOURIERFT", {})]).values()
    (live,) = adapter_states([adapted(model(), "FOURIERFT", {"n_frequency": 11})]).values()
    with pytest.raises(LoadMismatchError, match=r"indices\.default"):
        live.load_state_dict(stored.state_dict())
