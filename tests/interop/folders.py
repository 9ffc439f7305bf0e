"""A model's way into and out of a Hugging Face folder, as training runs take it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.formats.huggingface.export import export_huggingface
from titan_ckpt.formats.huggingface.reader import HuggingFaceReader
from titan_ckpt.geometry.keymap import KeyMap
from titan_ckpt.weights.transforms import StateDictTransforms
from titan_ckpt.weights.wrapper import ModelWrapper


def load(model: nn.Module, table: KeyMap, folder: Path) -> None:
    """Fill the model's live tensors from the folder, with nothing missing, left over or cast."""
    with HuggingFaceReader(folder) as reader:
        plan = StateDictTransforms(table).from_file(
            ModelWrapper([model]).state_dict(), reader.tensors, None, cast=False
        )
        assert not (plan.report.missing or plan.report.unexpected or plan.report.mismatched), plan.report
        reader.read(plan.requests)


def export(model: nn.Module, table: KeyMap, config: dict[str, Any], folder: Path) -> None:
    """Write the model to a new folder; collective where the model is sharded."""
    groups = StateDictTransforms(table).to_file(ModelWrapper([model]).state_dict("export"), None, None)
    export_huggingface(
        folder, groups, config=config, assets=None, max_shard_bytes=1_000_000, coordinator=Coordinator.current()
    )


class Recorder(logging.Handler):
    """Keeps the messages it is given."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def without_a_word(*loggers: str) -> Iterator[None]:
    """Make any warning an error, Python's and those that the named loggers get."""
    recorder = Recorder()
    for name in loggers:
        logging.getLogger(name).addHandler(recorder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # PEFT's own
            yield
    finally:
        for name in loggers:
            logging.getLogger(name).removeHandler(recorder)
    assert recorder.messages == []


def open_strictly(auto: Any, folder: Path) -> Any:
    """Open a folder with transformers; any warning, of Python's or of its logger, and any odd key is an error."""
    with without_a_word("transformers"):
        model, info = auto.from_pretrained(folder, output_loading_info=True, dtype="auto")
    assert not any(info.values()), info
    return model.eval()
