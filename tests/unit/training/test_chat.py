"""Conversations: how they are rendered, which tokens are learned, and which conversations are refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.chats import FORGETFUL, MARKED, PLAIN, STRADDLING, chat_tokenizer, conversations, learned, write_chats
from titan_ckpt.errors import ConfigError
from titan_ckpt.training.data.batch import IGNORED
from titan_ckpt.training.data.chat import ChatError, ChatTemplate
from titan_ckpt.training.data.corpus import open_corpus
from titan_ckpt.training.data.tokenizer import EOS, read_tokenizer
from titan_ckpt.training.data.tokens import tokenise_conversations


def test_d8_ids_and_mask_are_those_of_transformers(tmp_path: Path) -> None:
    """With a template that marks what is learned; one without marks learns the same tokens."""
    tokenizer = chat_tokenizer(tmp_path / "marked")
    marked, plain = ChatTemplate(tokenizer), ChatTemplate(chat_tokenizer(tmp_path / "plain", PLAIN))
    reference: Any = AutoTokenizer.from_pretrained(tmp_path / "marked")
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    with_tools = "{% if tools %}{{ tools | tojson }}{% endif %}" + MARKED
    called = ChatTemplate(chat_tokenizer(tmp_path / "tools", with_tools))(conversations(1)[0], tools)
    options: Any = {"tools": tools, "chat_template": with_tools, "return_dict": True}
    assert called[0] == reference.apply_chat_template(conversations(1)[0], **options)["input_ids"]
    assert learned(lambda _: called, [], tokenizer) == learned(marked, conversations(1)[0], tokenizer)
    for messages in conversations(7):
        expected = reference.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = marked(messages)
        assert ids == expected["input_ids"]
        assert [*map(int, mask)] == expected["assistant_masks"]
        assert plain(messages) == (ids, mask)
        answers = "".join(m["content"] + EOS for m in messages if m["role"] == "assistant")
        assert learned(marked, messages, tokenizer) == answers


def test_d8_a_conversation_that_cannot_be_masked_exactly_is_refused(tmp_path: Path) -> None:
    """A template that renders an answer anew, a token across the border, a template that refuses, nothing to learn."""
    two_turns, one_turn = conversations(1)[0], conversations(2)[1]
    forgetful = ChatTemplate(chat_tokenizer(tmp_path / "a", FORGETFUL))
    with pytest.raises(ChatError, match=r"message 1 cannot be masked: .*mark the assistant's text with"):
        forgetful(two_turns)
    straddling = ChatTemplate(chat_tokenizer(tmp_path / "b", STRADDLING))
    with pytest.raises(ChatError, match=r"the token ' t.*' is learned in part"):
        straddling([one_turn[0], {"role": "assistant", "content": "the sum"}])
    picky = ChatTemplate(chat_tokenizer(tmp_path / "c", "{{ raise_exception('no system') }}" + PLAIN))
    with pytest.raises(ChatError, match=r"the chat template cannot render its first . messages: no system"):
        picky(one_turn)
    marked = ChatTemplate(chat_tokenizer(tmp_path / "d"))
    endless = ChatTemplate(chat_tokenizer(tmp_path / "e", PLAIN.replace("{{ eos_token }}", "")))
    for said in (one_turn[:1], one_turn[:2], [one_turn[1], {"role": "assistant", "content": ""}]):
        with pytest.raises(ChatError, match="the assistant says nothing in it"):
            endless(said)
    parts: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "x"}]}, one_turn[2]]
    with pytest.raises(ChatError, match=r"the content of message 0 is a list of parts, and the chat template writes"):
        marked(parts)
    called: list[dict[str, Any]] = [one_turn[1], {"role": "assistant", "content": [], "tool_calls": []}, one_turn[2]]
    with pytest.raises(ChatError, match="the content of message 1 is a list of parts"):
        marked(called)
    walks = PLAIN.replace("{{ m.content }}", "{% if m.content is string %}{{ m.content }}{% endif %}")
    listing = ChatTemplate(chat_tokenizer(tmp_path / "g", walks.replace("<|{{", "a[] <|{{")))
    assert "a[] " in listing._render(called, None)[0], "a template's own text may look like an empty list"
    knows = PLAIN.replace("{% else %}{{ m.content }}", "{% else %}{{ m.content[0].text }}")
    joined: list[dict[str, Any]] = [{"role": "user", "content": "x"}, one_turn[2]]
    assert ChatTemplate(chat_tokenizer(tmp_path / "f", knows))(parts) == marked(joined)


def test_d8_a_tokenizer_without_a_template_is_refused(tmp_path: Path) -> None:
    """The message names the folder, the files, and what to do."""
    with pytest.raises(ConfigError, match=r"data\.messages: the tokenizer in .*/x has no chat template; expected"):
        ChatTemplate(chat_tokenizer(tmp_path / "x", None))


def test_a_tokenizer_with_code_of_its_own_is_refused(tmp_path: Path) -> None:
    """None of its code is asked about or run; the message names the folder and what is expected."""
    chat_tokenizer(tmp_path / "x")
    (tmp_path / "x" / "own.py").write_text("raise SystemExit('the code of the tokenizer ran')")
    path = tmp_path / "x" / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"data\.messages: the tokenizer in .*/x: expected files that AutoTokenizer"):
        ChatTemplate(read_tokenizer(tmp_path / "x"))


@pytest.mark.parametrize("name", [7, ["a"], {"content": {}}, "\ud800"])
def test_a_tokenizer_whose_special_token_is_no_name_is_refused(tmp_path: Path, name: object) -> None:
    """The message names the file and what it has."""
    chat_tokenizer(tmp_path / "x")
    (tmp_path / "x" / "tokenizer_config.json").write_text(json.dumps({"eos_token": name}))
    with pytest.raises(ConfigError, match=r"data\.tokenizer: .*/x/tokenizer_config.json "):
        read_tokenizer(tmp_path / "x")


@pytest.mark.parametrize("inner", ["", "{{ b }}"])
def test_a_template_whose_loops_do_not_end_is_refused(tmp_path: Path, inner: str) -> None:
    """A loop of ten thousand millions is left after a million; whoever traces this thread goes on to."""
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}" + inner + "{% endfor %}{% endfor %}"
    endless, before = ChatTemplate(chat_tokenizer(tmp_path / "x", loops + MARKED)), sys.gettrace()
    with pytest.raises(ChatError, match="cannot render its first 2 messages: it runs more than 1000000 lines"):
        endless(conversations(2)[1][1:])
    assert sys.gettrace() is before


def test_d8_a_template_that_writes_the_day_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Such a template renders another text on another day, and a warning names it; other templates give no warning."""
    ChatTemplate(chat_tokenizer(tmp_path / "timeless"))
    assert caplog.text == ""
    ChatTemplate(chat_tokenizer(tmp_path / "dated", "{{ strftime_now('%d %b %Y') }}" + MARKED))
    assert "dated writes the day on which it is rendered" in caplog.text and "write a fixed date" in caplog.text


def test_d8_conversations_that_are_too_long_are_an_error_cut_or_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As the settings say; how many were is logged, from the cache too."""
    path = write_chats(tmp_path / "chat.jsonl", 6)
    corpus, template = (
        open_corpus(str(path), field="messages", messages=True),
        ChatTemplate(chat_tokenizer(tmp_path / "t")),
    )
    whole = tokenise_conversations(corpus, template, 500, "error", tmp_path / "cache")
    lengths = [len(whole[i]["tokens"]) for i in range(6)]
    longest = sorted(lengths)[2]
    with pytest.raises(ConfigError) as caught:
        tokenise_conversations(corpus, template, longest + 1, "error", tmp_path / "cache")
    assert len(caught.value.problems) == 3
    assert f"{path}:1: {lengths[0] + 1} tokens are longer than data.sequence_length {longest} + 1" in str(caught.value)
    dropped = tokenise_conversations(corpus, template, longest + 1, "drop", tmp_path / "cache")
    assert [len(dropped[i]["tokens"]) for i in range(len(dropped))] == [n for n in lengths if n <= longest]
    assert "3 conversations are longer than" in caplog.text
    caplog.clear()
    cut = tokenise_conversations(corpus, template, longest + 1, "truncate", tmp_path / "cache")
    again = tokenise_conversations(corpus, template, longest + 1, "truncate", tmp_path / "cache")
    assert caplog.text.count("3 conversations are longer than") == 2
    assert [cut[i]["tokens"].tolist() for i in range(len(cut))] == [
        again[i]["tokens"].tolist() for i in range(len(again))
    ]
    assert all((cut[i]["labels"] != IGNORED).any() and len(cut[i]["tokens"]) <= longest for i in range(len(cut)))
    with pytest.raises(ConfigError, match="all 6 conversations are longer than 3 tokens"):
        tokenise_conversations(corpus, template, 3, "drop", tmp_path / "cache")


def test_d8_every_conversation_that_cannot_be_used_is_listed(tmp_path: Path) -> None:
    """By file and line, with the reason."""
    user, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
    rows = [{"messages": [user]}, {"messages": [user, answer]}, {"messages": "x"}, {"messages": [answer, user]}]
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpus = open_corpus(str(path), field="messages", messages=True)
    template = ChatTemplate(chat_tokenizer(tmp_path / "t", "{{ 1 / (messages | length - 1) }}" + MARKED))
    with pytest.raises(ConfigError) as caught:
        tokenise_conversations(corpus, template, 500, "error", tmp_path / "cache")
    assert [p.partition(f"{path}:")[2][0] for p in caught.value.problems] == ["1", "3"]
