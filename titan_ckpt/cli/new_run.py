"""`titan-ckpt init KIND`: write a commented run file to start from.

Owns the kinds and what is filled in; the texts are in templates/.
"""

from __future__ import annotations

import json
from pathlib import Path

from titan_ckpt.cli.arguments import Init
from titan_ckpt.errors import ConfigError

TEMPLATES = Path(__file__).parent / "templates"


def write_run_file(command: Init) -> str:
    """Write the file and return what to do next. Raises: ConfigError if it exists, or if an answer does not fit."""
    problems = []
    template = (TEMPLATES / f"{command.kind}.toml").read_text(encoding="utf-8")
    if command.file.exists():
        problems.append(f"{command.file} exists; name another with --file, or remove it")
    elif not command.file.parent.is_dir():
        problems.append(f"{command.file.parent} is no folder; make it first")
    if command.model is not None and not (command.model / "config.json").is_file():
        problems.append(f"{command.model}/config.json is not there; expected a Hugging Face folder")
    if command.data is not None and not command.data.exists():
        problems.append(f"{command.data} is not there; expected a .txt, .md, .jsonl or .parquet file, or a folder")
    if command.model is not None and '"MODEL"' not in template:
        problems.append(f"{command.kind} starts from random values; --model has no place in it")
    if problems:
        raise ConfigError(problems, "titan-ckpt init")
    text = template.replace('"DATA"', json.dumps(str(command.data or "builtin")))
    text = text.replace('"MODEL"', json.dumps(str(command.model or "models/base")))
    command.file.write_text(text, encoding="utf-8")
    edit = "set model.folder, then " if '"MODEL"' in template and command.model is None else ""
    return f"{command.file} is written. Next: {edit}titan-ckpt train {command.file}"
