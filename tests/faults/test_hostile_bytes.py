"""Files of at most 1 MiB that somebody made to harm: each is read within a second and 64 MiB, or is one typed error."""

from __future__ import annotations

import gc
import json
import random
import struct
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import save_file

from tests.chats import chat_tokenizer
from tests.faults.test_fuzz import walk
from tests.faults.test_rank_file_fuzz import sealed
from tests.forked import resident
from tests.unit.directory.test_manifest import example
from titan_ckpt.directory.lease import FileLease
from titan_ckpt.directory.manifest import Manifest
from titan_ckpt.encoding import typed_json
from titan_ckpt.encoding.toml import read_toml
from titan_ckpt.errors import CheckpointError
from titan_ckpt.formats.huggingface.reader import read_config
from titan_ckpt.formats.native.header import parse_header
from titan_ckpt.formats.native.rank_file import lay_out
from titan_ckpt.formats.native.sealed_file import BLOCK_BYTES, with_digests
from titan_ckpt.formats.open import open_reader
from titan_ckpt.geometry.chunks import Chunk, TensorInfo
from titan_ckpt.tools.listing import list_run
from titan_ckpt.tools.report import write_report

MOST_BYTES = 2**20
EQUAL = 2**61 - 1
"""Python's hash of a multiple of this number is 0."""


def many(item: Callable[[int], str], opening: str = "[", closing: str = "]", most: int = MOST_BYTES * 7 // 8) -> str:
    """Return JSON of as many items as fit."""
    made, size, i = [], 0, 0
    while size < most:
        made.append(item(i))
        size += len(made[-1]) + 1
        i += 1
    return opening + ",".join(made) + closing


@cache
def bombs() -> dict[str, str]:
    """Return values in the text of a JSON file. Every worker that collects the tests would make them otherwise."""
    return {
        "deep lists": "[" * 400_000 + "]" * 400_000,
        "deep objects": '{"a":' * 100_000 + "0" + "}" * 100_000,
        "lists just as deep as they are parsed": "[" * 900 + "]" * 900,
        "empty lists": many(lambda i: "[]"),
        "empty objects": many(lambda i: "{}"),
        "small objects": many(lambda i: '{"a":0}'),
        "many names": many(lambda i: f'"{i}":0', "{", "}"),
        "one name again and again": many(lambda i: '"a":0', "{", "}"),
        "a long number": "9" * 900_000,
        "numbers as long as they are parsed": many(lambda i: "9" * 4300),
        "a large count": str(2**24),
        "a larger count": str(2**62),
        "a float that is none": "1" + "0" * 400 + ".0",
        "numbers of one hash": many(lambda i: str(i * EQUAL)),
        "shapes of one hash": many(lambda i: json.dumps([0, *((i >> 2 * k) % 4 * EQUAL for k in range(8))])),
        "half a character": '"\\ud800"',
        "names with half a character": '{"\\udc80":"\\ud800"}',
        "control characters": '"\\u001b[2J\\u009b1m\\r\\n12:00:00 saved step 7\\u2028\\u202e"',
        "a long text": json.dumps("x" * 900_000),
        "an expression that backtracks": json.dumps("(a+)+$"),
        "many expressions": many(lambda i: f'"(a|b)*{i}":1', "{", "}"),
        "sets": many(lambda i: '{"$set":[]}'),
        "a set of numbers of one hash": '{"$set":' + many(lambda i: str(i * EQUAL)) + "}",
        "a dict of numbers of one hash": '{"$dict":' + many(lambda i: f"[{i * EQUAL},0]") + "}",
        "a dict of tuples of one hash": '{"$dict":' + many(lambda i: f'[{{"$tuple":[{i * EQUAL}]}},0]') + "}",
        "deques": many(lambda i: '{"$deque":[null,[]]}'),
        "tensors": many(lambda i: '{"$tensor":["bool",[],"AA=="]}'),
        "tuples in sets in tuples": '{"$set":[{"$tuple":[' * 31 + many(lambda i: str(i)) + "]}]}" * 31,
    }


PLACE = "THE PLACE OF A BOMB"


def planted(document: Any, bomb: str, place: int) -> bytes:
    """Return the JSON of a document in which the value at one place is the bomb."""
    document = json.loads(json.dumps(document))
    node, key = [*walk(document)][place]
    node[key] = PLACE
    return json.dumps(document, separators=(",", ":")).replace(json.dumps(PLACE), bomb).encode()


def in_file(path: Path, read: Callable[[], object]) -> Callable[[bytes], object]:
    """Return a function that writes the bytes to a file and reads what it is part of."""

    def write_and_read(data: bytes) -> object:
        path.write_bytes(data)
        return read()

    return write_and_read


def manifest(folder: Path) -> tuple[Any, Callable[[bytes], object]]:
    document = json.loads(example().to_bytes())
    del document["digest"]
    (folder / "step-500").mkdir()

    def read(data: bytes) -> object:
        body = data[:-1]
        whole = body + f',\n"digest": "{xxhash.xxh3_128_hexdigest(body)}"\n}}\n'.encode()
        (folder / "step-500" / "MANIFEST.json").write_bytes(whole)
        list_run(folder)
        return Manifest.from_bytes(whole)

    return document, read


def run_state(folder: Path) -> tuple[Any, Callable[[bytes], object]]:
    return {"step": 3, "optimizer": {"a": [1, {"$tuple": [2]}]}, "states": {"x": {"$dict": [[1, 2]]}}}, typed_json.loads


def rank_header(folder: Path) -> tuple[Any, Callable[[bytes], object]]:
    info, split = TensorInfo((8, 4), torch.float32), TensorInfo((16, 4), torch.bfloat16)
    chunks = [("a.weight", info, Chunk.whole((8, 4))), ("b", split, Chunk((8, 0), (8, 4)))]
    layout = lay_out(chunks, 0, 2, {"other": info})
    header, _ = with_digests(layout.header, ["0" * 32] * -(-(layout.num_bytes - len(layout.header)) // BLOCK_BYTES))

    def read(data: bytes) -> object:
        raw = sealed(data)
        return parse_header(raw, len(raw) + layout.num_bytes - len(layout.header), "rank-00000.safetensors").infos()

    return json.loads(header[8:]), read


def header(folder: Path) -> tuple[Any, Callable[[bytes], object]]:
    save_file({"a": torch.ones(2), "b": torch.ones(3, 4)}, folder / "model.safetensors", {"format": "pt"})
    data = (folder / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    read = in_file(folder / "model.safetensors", lambda: open_reader(folder).tensors)
    return json.loads(data[8 : 8 + length]), lambda text: read(struct.pack("<Q", len(text)) + text + bytes(56))


def index(folder: Path) -> tuple[Any, Callable[[bytes], object]]:
    save_file({"a": torch.ones(2)}, folder / "model-00001-of-00001.safetensors")
    document = {"metadata": {"total_size": 8}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}
    return document, in_file(folder / "model.safetensors.index.json", lambda: open_reader(folder).tensors)


def config(folder: Path) -> tuple[Any, Callable[[bytes], object]]:
    save_file({"a": torch.ones(2)}, folder / "model.safetensors")
    document = {"model_type": "llama", "hidden_size": 8, "rope_parameters": {"rope_theta": 1e4}, "eos_token_id": [1]}
    return document, in_file(folder / "config.json", lambda: (read_config(folder / "config.json"), open_reader(folder)))


def adapter_config(folder: Path) -> tuple[Any, Callable[[bytes], object]]:
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    save_file(
        {f"{name}.lora_A.weight": torch.ones(2, 3), f"{name}.lora_B.weight": torch.ones(3, 2)},
        folder / "adapter_model.safetensors",
    )
    document = {
        "peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {}, "bias": "none", "modules_to_save": None, "layers_to_transform": None,
    }  # fmt: skip
    return document, in_file(folder / "adapter_config.json", lambda: open_reader(folder).metadata())


def tokenizer_config(folder: Path) -> tuple[Any, Callable[[bytes], object]]:
    from titan_ckpt.training.data.tokenizer import read_tokenizer

    chat_tokenizer(folder / "tokenizer", None)
    read = in_file(
        folder / "tokenizer" / "tokenizer_config.json", lambda: read_tokenizer(folder / "tokenizer").special_ids
    )
    return {"bos_token": {"content": "<|begin_of_text|>"}, "eos_token": "<|end_of_text|>", "extra": [1, {}]}, read


def telemetry(folder: Path) -> tuple[Any, Callable[[bytes], object]]:
    document = {
        "event": "start", "unix_seconds": 1.5, "command": ["python", "x"], "folder": "/x", "host": "h",
        "world_size": 2, "versions": {"python": "3"}, "git": None, "config": {"a": {"b": 1}}, "expired": [1],
        "phases": {"queued": 0.1}, "step": 3,
    }  # fmt: skip
    read = in_file(folder / "telemetry.jsonl", lambda: write_report(folder, folder / "report.html"))
    return document, lambda text: read(json.dumps(document).encode() + b"\n" + text + b"\n")


def lease(folder: Path) -> tuple[Any, Callable[[bytes], object]]:
    document = {"pid": 1, "host": "h", "boot": "b", "started": "1", "pid_namespace": "n"}
    return document, in_file(folder / ".lease", lambda: str(FileLease.named_in(folder)))


def run_file(folder: Path) -> tuple[Any, Callable[[bytes], object]]:
    document = {"model": {"flavor": "x"}, "training": [1, 2]}
    read = in_file(folder / "run.toml", lambda: read_toml(folder / "run.toml"))
    return document, lambda text: read(b"".join(b"%s = %s\n" % pair for pair in lines(text)))


def lines(text: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and the texts of the values of a JSON object of two values, which TOML has in the same form."""
    first, _, second = text[1:-1].partition(b',"training":')
    for pair in (first, b'"training":' + second):
        key, _, value = pair.partition(b":")
        yield key, value.replace(b'":', b'"=')


KINDS = (
    manifest, run_state, rank_header, header, index, config, adapter_config, tokenizer_config, telemetry, lease,
    run_file,
)  # fmt: skip


def peak_mib() -> float:
    """Return the most memory that this process had since it was last asked for."""
    peak = resident("VmHWM")
    Path("/proc/self/clear_refs").write_text("5")
    return peak / (1 << 20)


def fault(read: Callable[[bytes], object], data: bytes) -> str | None:
    """Return what is wrong if the bytes are neither read nor refused by a typed error, or if that takes too much."""
    gc.collect()
    peak_mib()
    before, started = peak_mib(), time.thread_time()
    message = ""
    try:
        read(data)
    except CheckpointError as error:
        message = str(error)
    except Exception as error:
        return f"{error!r:.200}"
    seconds, peak = time.thread_time() - started, peak_mib() - before
    if seconds > 2 or peak > 64:
        return f"{seconds:.1f} s, {peak:.0f} MiB"
    if len(message) > 20_000 or not message.replace("\n", "").isprintable():
        return f"a message of {len(message)} characters: {message!r:.200}"
    return None


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_file_that_is_made_to_harm_is_read_or_refused_at_once(
    kind: Callable[[Path], tuple[Any, Callable[[bytes], object]]], tmp_path: Path
) -> None:
    """A small bomb is tried at every place of the document, a large one at a place that is drawn."""
    document, read = kind(tmp_path)
    generator = random.Random(kind.__name__)
    wrong = {}
    for name, bomb in bombs().items():
        places = [*range(len([*walk(document)]))]
        for place in places if len(bomb) < 10_000 else [generator.choice(places)]:
            data = planted(document, bomb, place)
            assert len(data) <= MOST_BYTES
            if (what := fault(read, data)) is not None:
                wrong[name, place] = what
    assert wrong == {}
