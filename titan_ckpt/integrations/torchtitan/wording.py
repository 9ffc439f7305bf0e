"""Messages of this package in torchtitan's words: a user of its Trainer can write only the settings of its config.

Owns which of this package's settings stand in messages, and what a user of torchtitan does instead. The settings that
TitanCheckpointer.Config has by the same name (`checkpoint.allow`, `.store`, `.stop`, `.folder`) stay as they are.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from titan_ckpt.errors import CheckpointError, ConfigError

P = ParamSpec("P")
R = TypeVar("R")

_AFRESH = "another checkpoint.folder by checkpoint.initial_load_path"
WORDS: Mapping[str, str] = {
    r"checkpoint\.resume\.exclude": "checkpoint.exclude_from_loading",
    # sources
    r"name it in \[\[checkpoint\.initial_load\]\] of another run instead": f"start a run in {_AFRESH}",
    r"in another folder with \[\[checkpoint\.initial_load\]\]": f"in {_AFRESH}",
    r"in another folder, named in \[\[checkpoint\.initial_load\]\]": f"in {_AFRESH}",
    r"\n  Load that revision\. If both hold the same weights, leave `revision` out of \[\[.*?\]\]": "\n  Load that one",
    r"leave the sources before it out of checkpoint\.initial_load": "name it alone, by checkpoint.initial_load_path",
    r"as an initial_load with cast = true": f"in {_AFRESH}, which converts",
    r"\[\[checkpoint\.initial_load\]\]": "checkpoint.initial_load_path",
    r"\. Name new tensors in checkpoint\.initial_load\.initialize": "",
    r"Name tensors that the model does not need in checkpoint\.initial_load\.ignore": "Take a folder of this model",
    r", or name (it|the one that is not used) in checkpoint\.initial_load\.ignore": "",
    r'\. Name one: checkpoint\.initial_load\.prefix = ".*?"': ". Take a folder that holds the model once",
    r"^checkpoint\.initial_load:": "checkpoint.initial_load_path:",
    r'leave load = "training_state" out(?= to load its weights|, )': "set checkpoint.initial_load_model_only",
    r'with load = "training_state"': "with checkpoint.initial_load_model_only = False",
    r"; set cast = true to convert (them|it) while loading": "",
    r" \(set cast = true to convert while loading\)": "",
    # adapters
    r"add \[\[converters\]\] kind = \"lora\"": "add a LoRA converter to the model's registry",
    r"add the converter it belongs to, such as \[\[converters\]\] kind = \"lora\"": "add its LoRA converter",
    r", (start from the export of its run, in which they are merged), or leave them out \(ignore\)": r", or \1",
    r"the \[\[converters\]\] table": "the LoRA converter",
    r"\[\[converters\]\]": "converters",
    r', merge the adapter \(load = "merge"\), or take its base': ", or take its base",
    r', or merge all adapters but one into the base \(load = "merge"\)': "",
    r'\(format = "peft"\)': '(checkpoint.last_save_adapter = "peft")',
    r'\(format = "hf"\)': '(checkpoint.last_save_adapter = "merged")',
    # saves and exports
    r"checkpoint\.export: peft": "checkpoint.last_save_adapter",
    r"checkpoint\.export cannot be made": "the exports of the last step cannot be made",
    r'Export format = "torchtitan_weights" instead': "Leave checkpoint.last_save_in_dcp out",
    r"its config has no \[checkpoint\.save\]": "checkpoint.load_only is set",
    r"a seed is a save of the model: .*": "a seed is a save of the model: leave checkpoint.load_only out",
    r" To save all the same, [^.]*: checkpoint\.save\.check_replicas = \"off\"": "",
    r"; or leave the optimizer out of checkpoints: checkpoint\.components": "",
    r"\[checkpoint\.stop\]": "checkpoint.stop",
}
"""Pattern in a message -> what the message says inside torchtitan; they are replaced in this order."""


def reworded(text: str) -> str:
    """Return a message with the settings of torchtitan's config."""
    for pattern, words in WORDS.items():
        text = re.sub(pattern, words, text)
    return text


def in_torchtitans_words(call: Callable[P, R]) -> Callable[P, R]:
    """Let a method's errors name the settings that its caller has."""

    @functools.wraps(call)
    def worded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except CheckpointError as error:
            error.args = (reworded(str(error)), *error.args[1:])
            if isinstance(error, ConfigError):
                error.problems = tuple(map(reworded, error.problems))
            raise

    return worded


class InTorchtitansWords(logging.Filter):
    """Lets the lines of this package's log name these settings, while it is added to the loggers."""

    def __init__(self) -> None:
        super().__init__()
        names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "titan_ckpt"]
        self._loggers = [logging.getLogger(name) for name in names]
        for logger in self._loggers:
            logger.addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the line; it is kept."""
        said: Any = record.getMessage()
        if (text := reworded(said)) != said:
            record.msg, record.args = text, ()
        return True

    def remove(self) -> None:
        """Leave the lines as they are from now on."""
        for logger in self._loggers:
            logger.removeFilter(self)
