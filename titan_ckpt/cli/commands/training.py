"""The commands that begin a training: `train`, and `init`, which writes a commented run file to start from.

Owns the kinds of run files and what is filled in; the texts are in templates/. With a model or data of the user's, the
file is written only after a rehearsal (rehearsal.py), because `train` must not refuse it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import tyro
from rich.console import Console

from titan_ckpt.cli.command import SAME, Command
from titan_ckpt.encoding.paths import how_to_get, hub_folder
from titan_ckpt.errors import CheckpointError, refuse

TEMPLATES = Path(__file__).parents[1] / "templates"
_LINE = r"^{key} = .*?(?= *(#.*)?$)"
"""A key of a template with its value; the comment behind it stays."""
_RANK = re.compile(r"^rank = (\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Train(Command):
    """Train a model as a TOML file says: titan-ckpt train run.toml [--table.key VALUE ...]."""

    config: tyro.conf.Positional[Path]
    """The TOML file; `titan-ckpt init` writes one, `titan-ckpt train --list` lists every setting."""

    def run(self, console: Console) -> int:
        raise AssertionError("main hands this command on")


@dataclass(frozen=True)
class Init(Command):
    """Write a commented run file to start from."""

    kind: tyro.conf.Positional[Literal["pretrain", "finetune", "lora", "qat", "ranks"]]
    """pretrain: from random values; finetune: all weights of a model; lora: an adapter; qat: fake quantization; ranks:
    pretraining on several GPUs."""
    file: Path = Path("run.toml")
    """The file to write; it must not exist."""
    model: Path | None = None
    """The Hugging Face folder of the model to start from, or the id of one that `hf download` has fetched."""
    data: Path | None = None
    """Your texts or conversations: a .txt, .md, .jsonl or .parquet file, or a folder. Absent: a small built-in text."""

    def run(self, console: Console) -> int:
        console.print(write_run_file(self), markup=False)
        return SAME


def write_run_file(command: Init) -> str:
    """Write the file and return what to do next.

    Raises: ConfigError if it exists, and if an answer does not fit; CheckpointError for what `train` would refuse.
    """
    problems = []
    template = (TEMPLATES / f"{command.kind}.toml").read_text(encoding="utf-8")
    has_model = '"MODEL"' in template
    if command.file.exists():
        problems.append(f"{command.file} exists; name another with --file, or remove it")
    elif not command.file.parent.is_dir():
        problems.append(f"{command.file.parent} is no folder; make it first")
    if command.model is not None and not (hub_folder(command.model) / "config.json").is_file():
        expected = f"expected a Hugging Face folder{how_to_get(command.model)}"
        problems.append(f"{command.model}/config.json is not there; {expected}")
    if command.data is not None and not command.data.exists():
        problems.append(f"{command.data} is not there; expected a .txt, .md, .jsonl or .parquet file, or a folder")
    if command.model is not None and not has_model:
        other = "leave it out, or train the model on with titan-ckpt init finetune, lora or qat"
        problems.append(f"{command.kind} starts from random values; --model has no place in it: {other}")
    refuse(*problems, source="init")
    known = {"output_folder": _free_folder(template, command.file), "corpus": str(command.data or "builtin")}
    if has_model:
        known["folder"] = str(command.model or "models/base")
    is_whole = command.model is not None or not has_model
    if is_whole and (command.model is not None or command.data is not None):
        text = _fitted(template, known, has_model=has_model)
    else:
        text = _filled(template, known)
    command.file.write_text(text, encoding="utf-8")
    edit = "" if is_whole else "set model.folder, then "
    program = "torchrun --nproc-per-node auto -m titan_ckpt" if "[parallel]" in template else "titan-ckpt"
    return f"{command.file} is written. Next: {edit}{program} train {command.file}"


def _free_folder(template: str, file: Path) -> str:
    """Return where the run writes: the template's folder, or one by the file's name; a number follows if it is there.

    `train` would go on with the run that is there, or refuse it.
    """
    own = re.search(r'^output_folder = "(.*?)"', template, re.MULTILINE)
    assert own is not None, "every template has one"
    name = own[1] if file.stem == "run" else f"outputs/{file.stem}"
    return next(free for free in chain([name], (f"{name}-{i}" for i in count(2))) if not Path(free).exists())


def _filled(template: str, values: Mapping[str, object]) -> str:
    """Return the template with other values for some of its keys; one that it lacks follows the corpus."""
    text = template
    for key, value in values.items():
        line = f"{key} = {json.dumps(value, ensure_ascii=False)}"
        place = re.search(_LINE.format(key=key), text, re.MULTILINE)
        if place is not None:
            text = text[: place.start()] + line + text[place.end() :]
        else:
            corpus = re.search(r"^corpus = .*\n", text, re.MULTILINE)
            assert corpus is not None, "every template has one"
            text = f"{text[: corpus.end()]}{line}\n{text[corpus.end() :]}"
    return text


def _fitted(template: str, known: Mapping[str, object], *, has_model: bool) -> str:
    """Return the filled template that a rehearsal accepts, of those that read the data as text or as conversations.

    Raises: CheckpointError of the first one if there is none.
    """
    from titan_ckpt.cli.rehearsal import fit, rehearse  # not before the arguments are known to be good
    from titan_ckpt.training.launch.terminal import hide_foreign

    hide_foreign()
    refusals: list[CheckpointError] = []
    with TemporaryDirectory() as folder:
        draft = Path(folder, "run.toml")
        for fields in _readings(str(known["corpus"]), chats_first=has_model):
            values = {**known, **fields}
            try:
                draft.write_text(_filled(template, values), encoding="utf-8")
                found = _RANK.search(template)
                fitting = fit(str(draft), rank=int(found[1]) if found else 1)
                values["sequence_length"] = fitting.sequence_length
                if fitting.too_long != "error":
                    values["too_long"] = fitting.too_long
                if found and not set(re.findall(r'"(\w+_proj)"', template)) <= {*fitting.target_modules}:
                    values["target_modules"] = fitting.target_modules
                draft.write_text(text := _filled(template, values), encoding="utf-8")
                rehearse(str(draft))
            except CheckpointError as error:
                refusals.append(error)
            else:
                return text
    raise refusals[0]


def _readings(corpus: str, *, chats_first: bool) -> Iterator[dict[str, str]]:
    """Yield the settings with which a corpus may be read, by the fields of its first row; at least one."""
    from titan_ckpt.training.data.corpus import fields_of

    texts, chats = fields_of(corpus)
    plain = "text" if "text" in texts or len(texts) != 1 else texts[0]
    as_text: dict[str, str] = {} if plain == "text" else {"field": plain}
    as_chats = [{"messages": name} for name in sorted(chats, key=lambda name: name != "messages")]
    if not as_chats:
        yield as_text
    else:
        alternatives = [as_text] if plain in texts else []
        yield from [*as_chats, *alternatives] if chats_first else [*alternatives, *as_chats]
