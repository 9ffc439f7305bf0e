"""The learning rate of each step as a factor of its peak; torch's LambdaLR applies it to the optimizer.

Owns [schedule], too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from titan_ckpt.config import NonNegative, PositiveInt
from titan_ckpt.encoding.named import ImportName, is_import_name
from titan_ckpt.encoding.toml import Check, Checked, ForeignKeys
from titan_ckpt.errors import ConfigError, counted
from titan_ckpt.training.train_state import TrainState

if TYPE_CHECKING:
    from titan_ckpt.training.config import OptimizerConfig, RunConfig

Tokens = Annotated[
    str, Check('a number such as "1_000_000 tokens"', re.compile(r"(?=.*[1-9])\d+(_\d+)* tokens").fullmatch)
]
Ratio = Annotated[float, Check("a number from 0 to 1", lambda x: 0 <= x <= 1)]

DECAY_LENGTH = "schedule.decay in steps"
"""Key of `TrainState.schedule`: the length of a decay that is given in tokens, which depends on the size of a step."""
DECAY_BEGAN = "schedule.decay_began"
"""Key of `TrainState.schedule`: the step that a decay with start_decay = "now" began at."""


@dataclass(frozen=True, slots=True)
class ScheduleConfig(Checked):
    """The learning-rate schedule; ratios are shares of all steps."""

    FOREIGN_KEYS: ClassVar[ForeignKeys] = {
        "another library's key": {
            "warmup_steps": "schedule.warmup_ratio, a share of training.steps",
            "decay_type": "schedule.kind",
            "lr_scheduler_type": "schedule.kind",
            "min_lr_factor": "schedule.min_ratio",
            "total_steps": "training.steps",
        },
    }

    kind: Literal["constant", "linear", "cosine", "wsd"] | ImportName = "cosine"
    """Course of the rate after warm-up; "wsd": warm-up, stable, decay. Your own as "package.module:Name" is called with
    the optimizer and `settings` and returns an LRScheduler; parameters `steps` and `total_steps` get the last step."""
    warmup_ratio: Ratio = 0.05
    """Share of the steps with linear warm-up, rounded up to whole steps."""
    decay: PositiveInt | Ratio | Tokens = 0.2
    """Length of the linear decay of "wsd": a share of the steps, such as 0.2; a number of steps, such as 200; or of
    tokens, such as "1_000_000 tokens", counted as full batches and rounded up to whole steps. With 0 the rate
    stays at its peak, for a run that is annealed later."""
    start_decay: Literal["now"] | NonNegative | None = None
    """The step after which "wsd" decays: a number, or "now", the step that the run resumes, for annealing. It needs
    `decay` in steps or tokens. Absent: so that the decay ends with the last step."""
    min_ratio: Ratio = 0.1
    """Learning rate at the end, as a share of the peak; "constant" stays at the peak."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of your own schedule."""

    def problems(self) -> Iterator[str]:
        if is_import_name(self.kind):
            for key, default in (("warmup_ratio", 0.05), ("min_ratio", 0.1)):
                if getattr(self, key) != default:
                    yield f"{key}: your own schedule has no ratios; leave it out"
        elif self.settings:
            yield f"settings: they are the keyword arguments of your own schedule; {self.kind} has ratios"
        if self.kind != "wsd":
            set_anyway = ["decay"] * (self.decay != 0.2) + ["start_decay"] * (self.start_decay is not None)
            yield from (f'{key}: a setting of kind = "wsd"; leave it out' for key in set_anyway)
        elif isinstance(self.decay, float):
            if self.start_decay is not None:
                yield 'start_decay: the length of the decay is missing; set decay = 200 (steps), or "1_000_000 tokens"'
            if self.warmup_ratio + self.decay > 1:
                yield f"decay: {self.decay} of the steps and warmup_ratio {self.warmup_ratio} exceed 1"

    @property
    def decay_tokens(self) -> int | None:
        """Return the length of the decay in tokens; None if it is given in another unit."""
        return int(self.decay.split()[0]) if isinstance(self.decay, str) else None


@dataclass(frozen=True, slots=True)
class Decay:
    """The decay of "wsd": after step `start`, for `length` steps."""

    start: int
    length: int


def find_decay(
    config: RunConfig, num_steps: int, tokens_per_step: int, state: TrainState | None = None
) -> Decay | None:
    """Return the decay that the settings of "wsd" describe; None if there are none, or before the load that it needs.

    `tokens_per_step`: of a full batch. `state`: that of the run after its load, which says how many steps the epochs
    that are left take. A decay that has begun "now" goes on in every later resume with the same settings;
    `state.schedule` gets the step that it began at, and its length.
    Raises: ConfigError that says what is missing.
    """
    schedule = config.schedule
    length = schedule.decay if isinstance(schedule.decay, int) else 0
    length = length or math.ceil((schedule.decay_tokens or 0) / tokens_per_step)
    if not length or not num_steps or (state is None and config.training.epochs is not None):
        return None
    if state is not None and schedule.decay_tokens:
        state.schedule[DECAY_LENGTH] = length
    start = schedule.start_decay
    if start is None:
        start = max(num_steps - length, math.ceil(schedule.warmup_ratio * num_steps))
    elif start == "now":
        if state is None:
            return None
        if not state.step:
            problem = '"now" anneals a run that is resumed, and there is no checkpoint; give the number of a step'
            raise ConfigError([f"schedule.start_decay: {problem}"])
        goes_on = state.saved_schedule.get("schedule.start_decay") == "now"
        start = state.saved_schedule.get(DECAY_BEGAN, state.step) if goes_on else state.step
        state.schedule[DECAY_BEGAN] = start
    if num_steps < start + length:
        problem = f"the decay after step {start} takes {counted(length, 'step')} and training has {num_steps - start}"
        longer = "train more epochs" if config.training.epochs else f"set training.steps = {start + length}"
        raise ConfigError([f"schedule.kind: {problem}; {longer}, or a shorter decay"])
    return Decay(start, length)


def rate_factor(config: ScheduleConfig, num_steps: int, decay: Decay | None = None) -> Callable[[int], float]:
    """Return a function from the index of an optimizer step, 0 to num_steps - 1, to its factor.

    Warm-up rises linearly and reaches 1 at its last step; its length is rounded up, so every ratio above zero has one.
    Then the factor falls to `min_ratio`, which it reaches after the last step: linearly from the end of warm-up
    (linear), along half a cosine (cosine), or linearly over the last share of all steps, or in `decay` (wsd: warm-up,
    stable, decay).
    """
    warmup = math.ceil(config.warmup_ratio * num_steps)
    length = max(num_steps - warmup, 1)
    if config.kind == "wsd":
        length = min(math.ceil((config.decay if isinstance(config.decay, float) else 0) * num_steps), length)
    fall = decay or Decay(num_steps - max(length, 1), max(length, 1))

    def factor(index: int) -> float:
        if index < warmup:
            return (index + 1) / warmup
        left = min(max((fall.start + fall.length - index) / fall.length, 0.0), 1.0)
        half_cosine = 0.5 * (1 + math.cos(math.pi * (1 - left)))
        height = {"constant": 1.0, "linear": left, "wsd": left, "cosine": half_cosine}[config.kind]
        return config.min_ratio + (1 - config.min_ratio) * height

    return factor


def rescaled(before: Mapping[str, Any], now: Mapping[str, Any], step: int) -> str:
    """Return every setting by which the rates after `step` differ from those of an earlier run, as `changes` does."""
    if "schedule.decay_ratio" in before:  # an earlier version has recorded three settings of one length
        steps, tokens = before["schedule.decay_steps"], before["schedule.decay_tokens"]
        length = steps or (f"{tokens} tokens" if tokens else before["schedule.decay_ratio"])
        before = {**before, "schedule.decay": length}
    if before.get("schedule.kind") == now["schedule.kind"] == "constant":
        names = ("training.steps", "schedule.warmup_ratio")  # they give the length of warm-up, and nothing else counts
        lengths = {math.ceil(math.prod(record[name] for name in names)) for record in (before, now)}
        if len(lengths) == 1 or step >= max(lengths):
            return ""
        now = {name: now[name] for name in names}
    return changes(before, now)


def schedule_record(config: RunConfig, num_steps: int) -> dict[str, Any]:
    """Return the settings that the learning rate of a step depends on, by their keys; a checkpoint records them."""
    settings = {f"schedule.{k}": v for k, v in asdict(config.schedule).items() if v != {}}
    return {"training.steps": num_steps, **settings}


def optimizer_record(config: OptimizerConfig) -> dict[str, Any]:
    """Return the settings that the optimizer's groups are built with, by their names there, for the checkpoint."""
    own = config.settings if is_import_name(config.name) else {"betas": list(config.betas), "eps": config.eps}
    return {"lr": config.lr, "weight_decay": config.weight_decay, **own}


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> frozenset[str]:
    """Return the settings of the optimizer that the run file gives another value than the run that saved had.

    A checkpoint of an earlier version records nothing, and nothing is known to have changed.
    """
    return frozenset(name for name in before.keys() | now.keys() if before and before.get(name) != now.get(name))


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return every setting that differs, from its old value to its new one; "" if all are the same.

    A checkpoint of an earlier version records nothing, and nothing is known to have changed.
    """
    changed = (name for name in now if name in before and before[name] != now[name])
    return ", ".join(f"{name} from {before[name]} to {now[name]}" for name in changed)


def own_schedule_faults(before: Mapping[str, Any], now: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    """Return what a schedule of one's own would go on with, although this run's settings say something different.

    `state`: the state of the scheduler after the load, which holds what it was built with. A schedule that was saved
    without a record, or by the same settings, has no faults.
    """
    if not before or not any(is_import_name(record["schedule.kind"]) for record in (before, now)):
        return []
    names = ["schedule.kind", "schedule.settings"]
    if before["training.steps"] in (state.get("steps"), state.get("total_steps")):
        names.append("training.steps")
    pairs = ((name, before.get(name, {}), now.get(name, {})) for name in names)
    return [f"{name} is {new}, and the checkpoint's schedule has {old}" for name, old, new in pairs if old != new]
