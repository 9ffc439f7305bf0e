"""initial_load from a bucket: the same weights as from a disk, in every format, by few requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests import world
from tests.stores.conftest import behind, place_in, put_folder, through
from tests.stores.servers import Proxy, Server
from tests.test_manager import Run
from tests.unit.test_progress import watch
from tests.world import same
from titan_ckpt import CheckpointConfig, InitialLoadConfig
from titan_ckpt.config import SaveConfig, StoreConfig
from titan_ckpt.directory.bucket_commits import Commits
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import CheckpointNotFoundError, ConfigError, CorruptCheckpointError, NotACheckpointError
from titan_ckpt.formats.dcp.writer import DcpExport
from titan_ckpt.models.llama3 import FLAVORS, Llama3
from titan_ckpt.stores.answers import StoreError
from titan_ckpt.stores.objects import BucketPath

CONFIG = replace(FLAVORS["debug-0.5m"], vocab_size=160, num_layers=3, max_seq_len=64, tie_embeddings=False)


@contextmanager
def counted(place: BucketPath, server: Server) -> Iterator[tuple[BucketPath, Proxy]]:
    with Proxy(server.endpoint, lambda method, path: None) as proxy:
        yield through(place, proxy), proxy


def loaded(model: nn.Module, path: object, folder: Path, place: BucketPath | None = None, **source: Any) -> nn.Module:
    """Load a source into the model as a run does."""
    store = StoreConfig() if place is None else place.bucket.settings
    sources = [InitialLoadConfig(str(path), **source)]
    world.load(world.manager(folder, model, save=None, initial_load=sources, store=store))
    return model


def equal(one: nn.Module, other: nn.Module) -> bool:
    return same(dict(one.state_dict()), dict(other.state_dict()))


def test_a_hugging_face_folder_is_read_by_few_requests(server: Server, tmp_path: Path) -> None:
    """Sharded, with an index: the weights are those of the folder; small neighbours share a request."""
    theirs: Any = LlamaForCausalLM(LlamaConfig.from_dict(CONFIG.to_hf())).bfloat16()
    theirs.save_pretrained(tmp_path / "base", max_shard_size="400KB")
    place = place_in(server)
    put_folder(place, tmp_path / "base")
    files = len(list((tmp_path / "base").glob("*.safetensors")))
    assert files > 1
    expected = loaded(Llama3(CONFIG), tmp_path / "base", tmp_path, cast=True)
    with counted(place, server) as (seen, proxy):
        assert equal(loaded(Llama3(CONFIG), seen, tmp_path, seen, cast=True), expected)
    gets = [path for method, path in proxy.requests if method == "GET" and ".safetensors" in path]
    assert len(gets) <= 4 * files < len(expected.state_dict())
    assert [method for method, _ in proxy.requests if method != "GET"] == []


def test_a_shard_of_columns_and_one_file_alone(s3: Server, tmp_path: Path) -> None:
    """A strided region is cut from the rows that hold it; a file is named without its folder, which may be large."""
    from titan_ckpt.formats.open import open_reader
    from titan_ckpt.geometry.chunks import Block, Chunk

    theirs: Any = LlamaForCausalLM(LlamaConfig.from_dict(CONFIG.to_hf()))
    theirs.save_pretrained(tmp_path / "base")
    place = place_in(s3)
    put_folder(place, tmp_path / "base")
    weight = theirs.state_dict()["model.embed_tokens.weight"]
    into = torch.empty(weight.shape[0], 5)
    with counted(place, s3) as (seen, proxy), open_reader(seen / "model.safetensors") as reader:
        reader.read([Block(Chunk((0, 3), (weight.shape[0], 5)), into, "model.embed_tokens.weight")])
        assert reader.format == "hf" and reader.metadata()["model_type"] == "llama"
    assert torch.equal(into, weight[:, 3:8])
    assert "delimiter" in [path for _, path in proxy.requests if "list-type" in path][-1]


def test_a_step_is_a_source(server: Server, tmp_path: Path) -> None:
    """By the name that a run logs, or as a copied folder: weights alone, or the whole run; a flipped bit is found."""
    place, run = place_in(server), Run()
    with run.manager(tmp_path, folder=str(place), store=place.bucket.settings, save=SaveConfig(interval=1)) as saves:
        run.train(saves, 2)
    assert equal(loaded(Run(seed=4).model, place / "step-2", tmp_path, place), run.model)
    again = Run(seed=5)
    source = InitialLoadConfig(str(place / "step-2"), load="training_state")
    assert world.load(again.manager(tmp_path / "b", initial_load=(source,), store=place.bucket.settings)).step == 2
    assert same(again.state()["optimizer"], run.state()["optimizer"]) and equal(again.model, run.model)
    with run.manager(tmp_path / "c", save=SaveConfig(interval=1)) as saves:
        run.train(saves, 1)
    copy = place_in(server) / "step-1"
    put_folder(copy, tmp_path / "c" / "checkpoints" / "step-1")
    assert equal(loaded(Run(seed=6).model, copy, tmp_path, copy), run.model)
    source = InitialLoadConfig(str(copy), load="training_state")
    saves = again.manager(tmp_path / "d", initial_load=(source,), store=place.bucket.settings)
    with saves, pytest.raises(NotACheckpointError, match='gives the weights alone: leave load = "training_state" out'):
        saves.load()
    data = bytearray((copy / "rank-00000.safetensors").read())
    data[-1] ^= 1
    copy.bucket.upload((copy / "rank-00000.safetensors").key, iter([memoryview(data)]), 5 << 20)
    with pytest.raises(CorruptCheckpointError, match="do not have the digest"):
        loaded(Run(seed=6).model, copy, tmp_path, copy)
    of_run = place_in(server)
    put_folder(of_run / "checkpoints" / "step-1", tmp_path / "c" / "checkpoints" / "step-1")
    with pytest.raises(NotACheckpointError, match=f"as in titan-ckpt inspect {of_run}/checkpoints/step-1$"):
        loaded(Run().model, of_run, tmp_path, of_run)
    Commits(place).fence(3, "0" * 32, "another writer")
    with pytest.raises(NotACheckpointError, match=f"it holds steps; name one of them, such as {place}/step-2$"):
        loaded(Run().model, place, tmp_path, place)
    place.bucket.create((place / "model.pt").key, b"x")
    with pytest.raises(NotACheckpointError, match=r"a single file must be a \.safetensors file"):
        loaded(Run().model, place / "model.pt", tmp_path, place)


def test_a_dcp_folder_is_a_source(server: Server, tmp_path: Path) -> None:
    """A DCP checkpoint, read item by item: small items that are neighbours share a request."""
    run, place = Run(width=80_000), place_in(server)  # more than comes with the head
    state = {f"model.{name}": value for name, value in run.model.state_dict().items()}
    DcpExport(state).write(tmp_path / "dcp", Coordinator.current())
    put_folder(place, tmp_path / "dcp")
    with counted(place, server) as (seen, proxy):
        assert equal(loaded(Run(seed=3, width=80_000).model, seen, tmp_path, seen), run.model)
    assert len([path for _, path in proxy.requests if path.partition("?")[0].endswith(".distcp")]) == 2


def test_f11_every_load_from_a_bucket_has_a_bar(s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a console, with the bytes of the weights: a step, a Hugging Face folder, a DCP folder."""
    place, model = place_in(s3), Llama3(CONFIG)
    with Run().manager(tmp_path, folder=str(place), store=place.bucket.settings, save=SaveConfig(interval=1)) as saves:
        run = Run()
        run.train(saves, 1)
    world.write_hf(tmp_path / "hf", dict(model.state_dict()), model.key_map(), config=model.hf_config())
    DcpExport(dict(model.state_dict())).write(tmp_path / "dcp", Coordinator.current())
    out = watch(monkeypatch, terminal=True, delay=0.0)
    loaded(Run(seed=2).model, place / "step-1", tmp_path, place)
    assert "loading" in out.getvalue()
    for name in ("hf", "dcp"):
        put_folder(place / name, tmp_path / name)
        loaded(Llama3(CONFIG), place / name, tmp_path, place)
        assert f"loading {name}" in out.getvalue()
    assert out.getvalue().count("1.3/1.3 MB") == 2


def test_what_is_wrong_with_a_source_is_said(s3: Server, tmp_path: Path) -> None:
    """Nothing there, a shard that is missing, a store that does not answer, an unknown scheme."""
    place = place_in(s3)
    with pytest.raises(CheckpointNotFoundError, match=r"initial_load: s3://box/runs/\w+/none is not there"):
        loaded(Run().model, place / "none", tmp_path, place)
    with pytest.raises(CheckpointNotFoundError, match="step 7 is not there; committed steps: none"):
        loaded(Run().model, place / "step-7", tmp_path, place)
    theirs: Any = LlamaForCausalLM(LlamaConfig.from_dict(CONFIG.to_hf()))
    theirs.save_pretrained(tmp_path / "base", max_shard_size="400KB")
    put_folder(place, tmp_path / "base")
    lost = next(path.name for path in (tmp_path / "base").glob("*00002-of*"))
    place.bucket.delete([(place / lost).key])
    with pytest.raises(CorruptCheckpointError, match=lost):
        loaded(Llama3(CONFIG), place, tmp_path, place)
    with behind(s3, "stall", "GET", "config.json", times=99) as proxy:
        silent = through(place, proxy, retry_seconds=1.5)
        with pytest.raises(StoreError, match="could not read"):
            loaded(Llama3(CONFIG), silent, tmp_path, silent)
    with pytest.raises(ConfigError, match="s3://bucket/key, gs://bucket/key or az://container/key"):
        InitialLoadConfig("ftp://host/base")
    with pytest.raises(ConfigError, match="store: for buckets"):
        CheckpointConfig(store=place.bucket.settings)
