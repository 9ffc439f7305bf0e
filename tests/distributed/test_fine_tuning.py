"""Fine-tuning on conversations: the loss and gradients of transformers on any number of ranks, and exact resumes."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.chats import chat_tokenizer, conversations, write_chats
from tests.forked import Program
from tests.tiny_run import Gradients, losses, settings
from tests.world import on_ranks
from titan_ckpt.testing import distributed
from titan_ckpt.training.callbacks import Callback
from titan_ckpt.training.trainer import Trainer

CHATS, STEPS = 8, 10


def fine_tune(root: Path, ranks: int, accumulation: int) -> None:
    """Take one step on all conversations."""
    folder = root / f"{ranks}x{accumulation}"
    config = settings(
        folder,
        model={"name": "hf", "flavor": None, "folder": str(root / "model")},
        data={"corpus": str(root / "chats.jsonl"), "messages": "messages", "sequence_length": 100, "tokenizer": None},
        training={"steps": 1, "batch_size": CHATS // (ranks * accumulation), "accumulation": accumulation},
        checkpoint={"save": None},
    )
    gradients = Gradients()
    Trainer(config, callbacks=[gradients]).run()
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(gradients.found[0], folder / "gradients.pt")


def fine_tune_with(root: Path, ranks: int, accumulations: tuple[int, ...]) -> None:
    for accumulation in accumulations:
        fine_tune(root, ranks, accumulation)


def test_d8_loss_and_gradients_of_conversations_are_those_of_transformers(tmp_path: Path) -> None:
    """The reference is one padded batch; here each batch is padded to its own longest, on any number of ranks."""
    torch.manual_seed(1)
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, vocab_size=300))
    chat_tokenizer(tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    write_chats(tmp_path / "chats.jsonl", CHATS)

    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "model")
    options = {"return_dict": True, "return_assistant_tokens_mask": True, "padding": True, "return_tensors": "pt"}
    batch = tokenizer.apply_chat_template(conversations(CHATS), **options)
    labels = batch["input_ids"].masked_fill(batch["assistant_masks"] == 0, -100)
    expected = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
    expected.backward()

    for ranks, accumulations in ((1, (1, 4)), (2, (1, 2))):
        on_ranks(ranks, fine_tune_with, tmp_path, ranks, accumulations)
    for layout in ("1x1", "1x4", "2x1", "2x2"):
        assert losses(tmp_path / layout) == [pytest.approx(expected.item(), abs=1e-6)], layout
        found = torch.load(tmp_path / layout / "gradients.pt")
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=1e-6, msg=f"{layout} {name}")


@distributed(nproc=2)
def meet_bad_rows(root: Path) -> None:
    """Two runs, on a corpus that all ranks read before the first step, and on a stream; write down who says what."""
    rank = dist.get_rank()
    for streaming in (False, True):
        data = {"corpus": str(root / "chats.jsonl"), "messages": "messages", "streaming": streaming, "shuffle": False}
        config = settings(
            root / str(streaming),
            data={**data, "sequence_length": 100, "tokenizer": str(root / "tokenizer")},
            training={"batch_size": 1},
            checkpoint={"stop": {"grace_seconds": 0.2}},
        )
        try:
            Trainer(config).run()
        except Exception as error:
            said = [type(error).__name__, getattr(error, "repeats", None), str(error)]
            (root / f"{streaming} {rank}.json").write_text(json.dumps(said))
        dist.barrier() if not streaming else os._exit(0)  # the end of rank 1 is what rank 0 waits for


def test_d8_a_bad_row_is_said_by_one_rank_and_by_the_one_that_has_met_it(tmp_path: Path) -> None:
    """One rank speaks if all meet it. In a stream of conversations the reader of the row alone knows it."""
    chat_tokenizer(tmp_path / "tokenizer")
    rows = [{"messages": messages} for messages in conversations(8)]
    rows[3] = {"messages": [{"role": "user", "content": "nobody answers"}]}
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    meet_bad_rows(tmp_path)
    whole, streamed = (
        [json.loads((tmp_path / f"{streaming} {rank}.json").read_text()) for rank in (0, 1)]
        for streaming in (False, True)
    )
    assert sorted(repeats for _, repeats, _ in whole) == [False, True]
    assert all("chats.jsonl:4: " in text for _, _, text in whole)
    assert streamed[1][:2] == ["DataError", False] and "chats.jsonl:4: " in streamed[1][2]
    assert streamed[0][0] != "DataError"


def streamed(root: Path, folder: Path, batch_size: int, workers: int) -> Any:
    return settings(
        folder,
        data={
            "corpus": str(root / "chats.jsonl"),
            "messages": "messages",
            "sequence_length": 100,
            "tokenizer": str(root / "tokenizer"),
            "streaming": True,
            "shuffle": 5,
            "num_workers": workers,
        },
        training={"steps": STEPS, "batch_size": batch_size},
        checkpoint={"save": {"interval": 2}},
    )


class Pause(Callback):
    """Waits for the kill in the sixth step, when a save and batches of the workers are under way."""

    def on_step_begin(self, trainer: Trainer, step: int) -> None:
        time.sleep(60 if step == 6 else 0)


def train_until_killed(root: str) -> int:
    Trainer(streamed(Path(root), Path(root) / "killed", 4, 2), callbacks=[Pause()]).run()
    return 0


def go_on(root: Path) -> None:
    Trainer(streamed(root, root / "killed", 2, 0)).run()


def test_d8_a_killed_run_goes_on_in_its_stream_on_another_number_of_ranks_and_workers(tmp_path: Path) -> None:
    """One rank with two workers, killed; then two ranks without: every step has the loss of the uninterrupted run."""
    chat_tokenizer(tmp_path / "tokenizer")
    write_chats(tmp_path / "chats.jsonl", 23)
    Trainer(streamed(tmp_path, tmp_path / "whole", 4, 0)).run()
    run = Program(train_until_killed, str(tmp_path), output=tmp_path / "log", environment=os.environ)
    run.wait_until((tmp_path / "killed" / "run" / "checkpoints" / "step-4").is_dir)
    run.kill()
    assert run.wait(60) == -signal.SIGKILL
    assert not (tmp_path / "killed" / "run" / "checkpoints" / "step-6").exists()
    on_ranks(2, go_on, tmp_path)
    assert losses(tmp_path / "killed") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    assert len(losses(tmp_path / "killed")) == STEPS
