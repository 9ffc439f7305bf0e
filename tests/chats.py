"""Conversations, a tokenizer with a chat template, and a tiny model: what tests of fine-tuning start from."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from titan_ckpt.training.data.corpus import open_corpus
from titan_ckpt.training.data.tokenizer import TextTokenizer, read_tokenizer, train_tokenizer

MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
"""The same text, without marks."""
FORGETFUL = PLAIN.replace("{{ m.content }}{{ eos", "{% if loop.last %}<think>{% endif %}{{ m.content }}{{ eos")
"""Renders an answer differently once there is a later message, as templates of reasoning models do."""
STRADDLING = PLAIN.replace("|>", "|> ")
"""Ends the prompt with a space, which becomes one token with the answer's first letter."""


def conversations(number: int) -> list[list[dict[str, str]]]:
    """Return conversations of different lengths; every third one has two turns."""
    made = []
    for i in range(number):
        turns = [
            {"role": "user", "content": f"{i} + {i}?"},
            {"role": "assistant", "content": f"It is {2 * i}." * (1 + i % 3)},
        ]
        made.append(
            [*([{"role": "system", "content": "Add."}] if i % 2 else []), *turns, *(turns if i % 3 == 0 else [])]
        )
    return made


def write_chats(path: Path, number: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations(number)))
    return path


def chat_tokenizer(folder: Path, template: str | None = MARKED, vocab_size: int = 300) -> TextTokenizer:
    """Return a tokenizer of the built-in corpus with this template, in `folder`."""
    trained = train_tokenizer(open_corpus("builtin"), vocab_size, Path(os.environ["TITAN_CKPT_TESTS_CACHE"]))
    shutil.copytree(trained.folder, folder, dirs_exist_ok=True)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return read_tokenizer(folder)


def learned(template: Any, messages: list[dict[str, str]], tokenizer: TextTokenizer) -> str:
    """Return the text of the learned tokens."""
    ids, mask = template(messages)
    text: str = tokenizer.backend.decode([i for i, m in zip(ids, mask, strict=True) if m], skip_special_tokens=False)
    return text


def write_model(folder: Path, template: str | None = MARKED, kind: str = "llama", **changes: Any) -> Path:
    """Write a tiny model with transformers, and a tokenizer with this template beside it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1,
        "pad_token_id": 1,
    }  # fmt: skip
    torch.manual_seed(0)
    make: Any = AutoModelForCausalLM.from_config
    make(AutoConfig.for_model(kind, **{**sizes, **changes})).save_pretrained(folder)
    chat_tokenizer(folder, template)
    return folder
