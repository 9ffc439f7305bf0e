"""Conversations as tokens, and which of the tokens are learned: what the assistant says.

Owns rendering by the tokenizer's chat template, and the mask. A template marks what the assistant says with
{% generation %} blocks; for one without, it is what a rendering has beyond that of the messages before. A conversation
whose mask would not be exact is refused.
"""

from __future__ import annotations

import hashlib
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from titan_ckpt.errors import ConfigError
from titan_ckpt.training.data.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)

_MAX_LINES = 1_000_000
"""Lines of a template's program: a second. A conversation takes some hundreds."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
Span = tuple[int, int]
"""Begin and end in a rendered text, in characters."""


class ChatError(ValueError):
    """A conversation cannot be rendered, or its mask is not exact."""


class ChatTemplate:
    """Turns a conversation into token ids and the mask of those that are learned."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        """Raises: ConfigError if the tokenizer's folder has no template, or without the extra `hf`."""
        self._encode = tokenizer.backend.encode
        self.template, self._special = _read_template(tokenizer.folder)
        if "strftime_now" in self.template:
            logger.warning(
                "data.messages: the chat template of %s writes the day on which it is rendered, so a stream that is "
                "resumed on another day has other tokens; write a fixed date into the template",
                tokenizer.folder,
            )
        self.has_marks = _GENERATION.search(self.template) is not None
        self.digest = hashlib.sha256(f"{tokenizer.digest}{self.template}{self._special}".encode()).hexdigest()

    def __call__(self, messages: Sequence[dict[str, Any]], tools: Any = None) -> tuple[list[int], list[bool]]:
        """Return the ids of a conversation, and for each whether it is learned. Raises: ChatError."""
        marked = {"return_assistant_tokens_mask": True}
        text, spans = self._render(messages, tools, **marked) if self.has_marks else self._compared(messages, tools)
        encoded = self._encode(text, add_special_tokens=False)
        mask, left = [], [*spans]
        for first, last in encoded.offsets:
            while left and left[0][1] <= first:
                left.pop(0)
            mask.append(bool(left) and left[0][0] < last)
            if mask[-1] and not left[0][0] <= first <= last <= left[0][1]:
                raise ChatError(
                    f"the token {text[first:last]!r} is learned in part, because the assistant's text begins or ends "
                    "inside it; a template that ends a message with a special token avoids this"
                )
        if not any(mask[1:]):
            raise ChatError("the assistant says nothing in it, so there is nothing to learn; leave it out")
        return encoded.ids, mask

    def _compared(self, messages: Sequence[dict[str, Any]], tools: Any) -> tuple[str, list[Span]]:
        """Return the text, and where each assistant's message is: between the prompt for it and what follows it."""
        text, _ = self._render(messages, tools)
        spans = []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt, _ = self._render(messages[:i], tools, add_generation_prompt=True)
                answered, _ = self._render(messages[: i + 1], tools)
                if not answered.startswith(prompt) or not text.startswith(answered):
                    raise ChatError(
                        f"message {i} cannot be masked: the template renders what comes before it differently once it, "
                        "or a later message, is there; mark the assistant's text with {% generation %} in the template"
                    )
                spans.append((len(prompt), len(answered)))
        return text, spans

    def _render(self, messages: Sequence[dict[str, Any]], tools: Any, **options: Any) -> tuple[str, list[Span]]:
        """Return the text of messages, and the spans of what is learned if they are asked for. Raises: ChatError."""
        text, spans = self._rendered(messages, tools, **options)
        for i, message in enumerate(messages):
            if isinstance(content := message.get("content"), list) and str(content) in text:
                without = [*messages[:i], {**message, "content": ""}, *messages[i + 1 :]]
                if self._rendered(without, tools, **options)[0].count(str(content)) < text.count(str(content)):
                    raise ChatError(
                        f"the content of message {i} is a list of parts, and the chat template writes it as Python "
                        "does; join the parts to one text, or name a tokenizer whose template knows parts"
                    )
        return text, spans

    def _rendered(self, messages: Sequence[dict[str, Any]], tools: Any, **options: Any) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            with _bounded():
                rendered: Any = render_jinja_template(
                    [list(messages)], tools=tools, chat_template=self.template, **options, **self._special
                )
        except Exception as error:  # a template is a program, and may fail in any way
            raise ChatError(f"the chat template cannot render its first {len(messages)} messages: {error}") from None
        (text,), spans = rendered
        return text, spans[0] if spans else []


@contextmanager
def _bounded() -> Iterator[None]:
    """Let this thread run at most `_MAX_LINES` lines of templates; a loop in a loop may take years otherwise.

    Raises: ChatError, from inside the template.
    """
    left, before = _MAX_LINES, sys.gettrace()

    def line(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise ChatError(f"it runs more than {_MAX_LINES} lines; are its loops meant to be so long?")
        return line

    def call(frame: FrameType, event: str, _: object) -> Any:
        return line if frame.f_code.co_filename == "<template>" else None

    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(before)


def _read_template(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the chat template of a tokenizer, and the special tokens that it may name. Raises: ConfigError."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError([f'data.messages: needs transformers ({error}); pip install "titan-ckpt[hf]"']) from error
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers raises what its files make it run into
        expected = "expected files that AutoTokenizer loads without code of their own"
        raise ConfigError([f"data.messages: the tokenizer in {folder}: {expected}: {error}"]) from error
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        expected = "expected chat_template.jinja, or chat_template in tokenizer_config.json"
        choices = "name the tokenizer of the model's chat version in data.tokenizer, or add its template"
        raise ConfigError([f"data.messages: the tokenizer in {folder} has no chat template; {expected}: {choices}"])
    return template, dict(tokenizer.special_tokens_map)
