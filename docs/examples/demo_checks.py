"""Check the claims of the demo: compare the resumed run with the uninterrupted one, and exports with native models.

Owns the comparisons and their display. transformers and peft are the references; nothing is compared with itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from rich.console import Console
from rich.table import Table
from rich.text import Text
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from titan_ckpt.directory.manifest import MANIFEST_NAME, Manifest
from titan_ckpt.training.data.tokenizer import TextTokenizer
from titan_ckpt.training.run_file import read_run
from titan_ckpt.training.trainer import Trainer

if TYPE_CHECKING:
    from docs.examples.demo import Run

PROMPT = "Return the"
NEW_TOKENS = 24
DRAWN_FROM = 40
NEW_TEXT = (64, 128)
"""Number and length of the sequences of the new text on which the base and the merged model are compared."""
TOLERANCE = 1e-5
"""Largest accepted absolute difference of logits in float32."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One comparison: the claim, the result, and whether the claim holds."""

    what: str
    found: str
    holds: bool


@dataclass(frozen=True)
class Story:
    """The runs of the demo, and their observations."""

    whole: Run
    killed: Run
    first: Run
    second: Run
    before_kill: list[tuple[int, float]]
    new_text: str
    """The text that the adapters were trained on."""
    texts: dict[str, str] = field(default_factory=dict)

    @property
    def base(self) -> Path:
        return self.killed.folder / "exports" / f"step-{self.killed.num_steps}"

    @property
    def base_bf16(self) -> Path:
        return self.killed.folder / "exports-bf16" / f"step-{self.killed.num_steps}"

    @property
    def merged(self) -> Path:
        return self.second.folder / "exports" / f"step-{self.second.num_steps}"

    @property
    def resumed_from(self) -> int:
        """Return the step from which the killed run resumed, as its last checkpoint records it."""
        step = self.killed.folder / "checkpoints" / f"step-{self.killed.num_steps}"
        manifest = Manifest.from_bytes((step / MANIFEST_NAME).read_bytes(), str(step))
        assert manifest.resumed_from is not None
        return int(manifest.resumed_from["step"])

    def adapter(self, run: Run) -> Path:
        return run.folder / "exports" / f"step-{run.num_steps}-peft"


class Probe(Trainer):
    """A trainer that only loads a run's last checkpoint, to use its model."""

    def train(self) -> None:
        """Take no step."""
        self.model.train(False)


def native(run: Run) -> tuple[nn.Module, TextTokenizer]:
    """Return the model and tokenizer of a finished run from its newest native checkpoint."""
    config, overrides = run.arguments[0], run.arguments[1:]
    probe = Probe(*read_run(config, overrides))
    state = probe.run()
    assert state.step == run.num_steps, "a finished run loads its last step"
    assert probe.tokenizer is not None
    return probe.model, probe.tokenizer


def greedy(logits_of: Callable[[torch.Tensor], torch.Tensor], ids: list[int]) -> list[int]:
    """Return `ids` continued with the model's most likely tokens, one at a time."""
    out = list(ids)
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            out.append(int(logits_of(torch.tensor([out]))[0, -1].argmax()))
    return out


def sampled(model: nn.Module, ids: list[int]) -> list[int]:
    """Return `ids` continued with likely tokens, drawn alike each time: the most likely ones repeat."""
    draws, out = torch.Generator().manual_seed(0), list(ids)
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            logits, tokens = model(torch.tensor([out]))[0, -1].topk(DRAWN_FROM)
            out.append(int(tokens[torch.multinomial(logits.softmax(0), 1, generator=draws)]))
    return out


def difference(model: nn.Module, other: nn.Module, tokens: torch.Tensor) -> float:
    """Return the largest absolute difference between the logits of a native and a transformers or PEFT model."""
    with torch.no_grad():
        return float((model(tokens) - other(tokens).logits).abs().max())


def load_hf(folder: Path) -> Any:
    """Return a folder's model, loaded by transformers in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def resume_claims(story: Story) -> Iterator[Claim]:
    """Compare the killed and resumed run with the uninterrupted one."""
    whole, resumed = story.whole.course(), story.killed.course()
    died, last = story.before_kill[-1][0], story.killed.num_steps
    yield Claim("killed at step, resumed from step", f"{died}, {story.resumed_from}", story.resumed_from < died < last)
    same = sum(a == b for a, b in zip(whole, resumed, strict=False))
    yield Claim("losses equal an uninterrupted run's, bit for bit", f"{same} of {last}", whole == resumed)
    files = [run.folder / "exports" / f"step-{last}" / "model.safetensors" for run in (story.whole, story.killed)]
    expected, weights = map(load_file, files)
    equal = sum(torch.equal(expected[k], weights[k]) for k in expected)
    holds = equal == len(expected) == len(weights)
    yield Claim("final weights equal, bit for bit", f"{equal} of {len(expected)} tensors", holds)
    fall = whole[0][1] - resumed[-1][1]
    yield Claim("loss falls", f"{whole[0][1]:.3f} to {resumed[-1][1]:.3f}", fall > 2)


def base_claims(story: Story) -> Iterator[Claim]:
    """Compare the pretrained exports with the native model: float32, bfloat16, tokenizer, generated text."""
    model, tokenizer = native(story.killed)
    ids = tokenizer.encode_document(PROMPT)[:-1]
    tokens = torch.randint(0, tokenizer.vocab_size, (2, 64), generator=torch.Generator().manual_seed(0))
    hf = load_hf(story.base)
    yield within("Hugging Face export, float32: logits", difference(model, hf, tokens))
    appended = greedy(model, ids)
    story.texts["base"] = tokenizer.decode(sampled(model, ids))
    theirs = hf.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)
    yield Claim("transformers generates the same text", f"{NEW_TOKENS} tokens", theirs[0].tolist() == appended)
    same = AutoTokenizer.from_pretrained(story.base)(PROMPT)["input_ids"] == ids
    yield Claim("AutoTokenizer gives the same ids", f"{len(ids)} tokens", same)
    tied = "lm_head.weight" not in load_file(story.base / "model.safetensors")
    yield Claim("tied model has no lm_head on disk", "absent" if tied else "present", tied)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    yield within("Hugging Face export, bfloat16: logits", difference(model, load_hf(story.base_bf16), tokens))


def lora_claims(story: Story) -> Iterator[Claim]:
    """Compare adapters and the merged model with the native LoRA models from which they were exported."""
    for run, title in ((story.first, "PEFT adapter"), (story.second, "PEFT adapter, continued")):
        model, tokenizer = native(run)
        tokens = torch.randint(0, tokenizer.vocab_size, (2, 64), generator=torch.Generator().manual_seed(0))
        base = load_hf(story.base)
        without = difference(model, base, tokens)
        yield within(
            f"{title} + base: logits", difference(model, PeftModel.from_pretrained(base, story.adapter(run)), tokens)
        )
        yield Claim(f"{title} moves logits by", f"{without:.3f}", without > 0.1)
    merged = load_hf(story.merged)
    yield within("merged Hugging Face export: logits", difference(model, merged, tokens))
    ids = tokenizer.encode_document(PROMPT)[:-1]
    appended = greedy(model, ids)
    story.texts["with adapters"] = tokenizer.decode(sampled(model, ids))
    same = greedy(lambda x: merged(x).logits, ids) == appended
    yield Claim("merged model continues the prompt alike", f"{NEW_TOKENS} tokens", same)
    new = tokenizer.encode_document(story.new_text)[: NEW_TEXT[0] * NEW_TEXT[1]]
    before, after = (loss_on(hf, torch.tensor(new).view(NEW_TEXT)) for hf in (load_hf(story.base), merged))
    yield Claim("loss on the new text, base and merged", f"{before:.3f} to {after:.3f}", after < before - 0.05)


def loss_on(model: Any, sequences: torch.Tensor) -> float:
    """Return the loss of a transformers model on some sequences, which are the same for every model."""
    with torch.no_grad():
        return float(model(sequences, labels=sequences).loss)


def within(what: str, largest: float) -> Claim:
    """Return the claim that logits differ by at most TOLERANCE."""
    return Claim(what, f"max difference {largest:.1e}", largest <= TOLERANCE)


def report(story: Story, console: Console) -> bool:
    """Make all comparisons, print their results in sections, and return whether all claims hold."""
    claims: list[Claim] = []
    disable_progress_bar()  # type: ignore[no-untyped-call]
    for title, compare, about in (
        ("Killed and resumed", resume_claims, losses_table),
        ("Exported, and opened with transformers", base_claims, None),
        ("Fine-tuned with LoRA, and opened with PEFT", lora_claims, texts_table),
    ):
        with warnings.catch_warnings(), console.status(title):
            warnings.simplefilter("ignore")  # other libraries' advice
            results = [*compare(story)]
        claims += results
        console.print()
        console.rule(f"[bold]{title}", align="left")
        console.print(claims_table(results))
        if about is not None:
            console.print(about(story))
    console.print()
    console.rule(f"[bold]Files in {story.killed.folder.parent}", align="left")
    console.print(files_table(story))
    held = sum(claim.holds for claim in claims)
    colour = "green" if held == len(claims) else "bold red"
    console.print(f"\n[{colour}]{held} of {len(claims)} comparisons hold[/]", highlight=False)
    return held == len(claims)


def table(*columns: str) -> Table:
    """Return a table without lines; it has a header only if a column has a name."""
    return Table(*columns, box=None, show_header=any(columns), header_style="dim", padding=(0, 2))


def claims_table(claims: Sequence[Claim]) -> Table:
    """Return a table of the claims, their results, and whether they hold."""
    out = table("", "", "")
    for claim in claims:
        mark = "[green]✓[/]" if claim.holds else "[bold red]✗[/]"
        out.add_row(mark, claim.what, claim.found)
    return out


def losses_table(story: Story) -> Table:
    """Return a table of the losses around the kill; its three columns must agree where they overlap."""
    out = table("step", "uninterrupted", "before the kill", "after the resume")
    whole, before, after = (dict(c) for c in (story.whole.course(), story.before_kill, story.killed.course()))
    died = story.before_kill[-1][0]
    restarted = story.resumed_from
    for step in sorted({1, restarted, restarted + 1, died, died + 1, story.killed.num_steps}):
        resumed = repr(after[step]) if step > restarted else "-"
        out.add_row(str(step), repr(whole[step]), repr(before[step]) if step in before else "-", resumed)
    return out


def texts_table(story: Story) -> Table:
    """Return a table of the models' continuations of the prompt."""
    out = table("", "")
    for name, text in story.texts.items():
        out.add_row(name, Text(" ".join(text.split())))
    return out


def files_table(story: Story) -> Table:
    """Return a table of the folders on disk and their sizes."""
    out = table("", "", "")
    steps = f"checkpoints/step-{story.killed.num_steps}"
    adapter_only = story.first.folder / "checkpoints" / f"step-{story.first.num_steps}"
    for folder, what in (
        (story.killed.folder / steps, "checkpoint"),
        (adapter_only, "checkpoint, adapter only"),
        (story.base, "Hugging Face, float32"),
        (story.base_bf16, "Hugging Face, bfloat16"),
        (story.adapter(story.first), "PEFT adapter"),
        (story.merged, "Hugging Face, merged"),
    ):
        size = sum(file.stat().st_size for file in folder.iterdir())
        where = folder.relative_to(story.killed.folder.parent).as_posix()
        out.add_row(where, what, f"{size / 1e6:.2f} MB")
    return out
