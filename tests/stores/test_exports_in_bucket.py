"""Exports to a bucket: what other programs open, proved, loadable all at once or not at all, kept and expired."""

from __future__ import annotations

import errno
import threading
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peft import PeftModel
from transformers import LlamaConfig, LlamaForCausalLM

from tests import world
from tests.interop.test_lora_run import IDS, LoraRun, reload
from tests.stores.conftest import SECONDS, behind, get_folder, place_in, put_folder, through
from tests.stores.export_runs import CONFIG, export_from_two_ranks, of_two_ranks, quantizing_model
from tests.stores.servers import Server, refusal
from tests.test_manager import Run
from tests.tiny_run import settings
from titan_ckpt import CheckpointConfig, ExportConfig, InitialLoadConfig
from titan_ckpt.config import StoreConfig
from titan_ckpt.converters import from_tables
from titan_ckpt.distributed.coordinator import Coordinator
from titan_ckpt.errors import ConfigError, ExportError
from titan_ckpt.formats.open import open_reader
from titan_ckpt.formats.publish import bucket_record
from titan_ckpt.formats.publish.bucket_record import BucketExports
from titan_ckpt.formats.publish.exchange import Exchange, Marks
from titan_ckpt.formats.publish.record import RECORDS
from titan_ckpt.formats.publish.run import FolderExport, FolderFormat
from titan_ckpt.geometry.chunks import Block, Chunk, TensorInfo
from titan_ckpt.geometry.keymap import KeyMap
from titan_ckpt.geometry.requests import TensorReader
from titan_ckpt.models.llama3 import Llama3
from titan_ckpt.stores.answers import StoreError
from titan_ckpt.stores.object_files import ObjectWriter
from titan_ckpt.stores.objects import BucketPath
from titan_ckpt.stores.store import Place
from titan_ckpt.training.run_data import find_tokenizer
from titan_ckpt.weights.transforms import file_group

DENIED = refusal("403 Forbidden", "AccessDenied", "Access Denied")
"""A store that is too busy is asked again, for a time in which a slow machine must answer all other requests."""


def export(model: Llama3, place: BucketPath, folder: Path, *, step: int = 1, **settings: Any) -> BucketPath:
    """Export the model as a run's last step does."""
    exports = (ExportConfig(**{"format": "hf", "folder": str(place), **settings}),)
    world.finish(world.manager(folder, model, save=None, store=place.bucket.settings, export=exports), step)
    return place / f"step-{step}"


def names(place: BucketPath) -> list[str]:
    return [f.key.removeprefix(f"{place.key}/") for f in place.bucket.list_objects(place.key)]


def test_an_object_is_uploaded_while_it_is_written_in_any_order(s3: Server) -> None:
    """Bytes that are written twice keep their first value; a hole is an error, and there is no object then."""
    place = place_in(s3, part_mib=5, concurrency=2)
    data = np.random.default_rng(0).integers(0, 256, 23 << 20, dtype=np.uint8)
    edges = sorted({0, len(data), *np.random.default_rng(1).integers(0, len(data), 200).tolist()})
    runs = [*pairwise(edges)]
    writer = ObjectWriter(place / "a", len(data))
    late = [run for number, run in enumerate(runs) if number % 7 == 3]
    for start, stop in [run for run in runs if run not in late]:
        writer.write(data[start:stop].data, start)
    for start, stop in runs[:2]:
        writer.write(memoryview(bytes(stop - start)), start)
    for start, stop in late:
        writer.write(data[max(0, start - 100) : stop].data, max(0, start - 100))
    writer.finish(len(data))
    assert (place / "a").read() == data.tobytes()
    hollow = ObjectWriter(place / "b", 10)
    hollow.write(memoryview(b"12345"), 0)
    with pytest.raises(EOFError, match="5 of 10 bytes were written"):
        hollow.finish(10)
    given_up = ObjectWriter(place / "c", 10)
    given_up.write(memoryview(b"12345"), 0)
    given_up.close()
    assert names(place) == ["a"]


def test_a_rank_that_is_far_ahead_waits_for_the_slowest(s3: Server) -> None:
    """Rank 0 uploads, and has its half of each MiB at once; it holds no more than its lead over the other half."""
    place, store, ranks = place_in(s3, part_mib=5), dist.HashStore(), (0, 1)
    info, half = TensorInfo((40 << 20,), torch.uint8), torch.arange(1 << 19).to(torch.uint8)
    go_on, held = threading.Event(), list[int]()

    def run(rank: int) -> None:
        line = Coordinator(rank, 2, store, "pace", 30.0)
        assert line.peers.connect(line, lambda: {ranks}) == [ranks]
        writer = ObjectWriter(place / "f", 40 << 20)

        def write(part: Block, _: Marks) -> None:
            writer.write(part.data.numpy().data, part.chunk.offsets[0])

        made = Exchange(
            line, ranks, {"f": info}, lambda _, c: (c.offsets[0], c.offsets[0]), lambda *_: 0, write, 5 << 19, 10 << 20
        )
        made.start()
        made.begin()

        def look() -> None:
            held.append(len(made._runs) + len(writer._parts))
            go_on.set()

        for number in range(40):
            if rank == 1 and number == 3:
                assert go_on.wait(30)
            if rank == 0 and number == 8:
                threading.Timer(0.5, look).start()
            piece = Block(Chunk(((number << 20) + (rank << 19),), (1 << 19,)), half, "f")
            for position, part in made.runs_in(piece):
                made.reach(position)
                made.put(piece, part)
        made.finish()
        if rank == 0:
            writer.finish(40 << 20)

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(run, range(2))]
    assert len(held) == 1 and max(held) <= 4
    assert (place / "f").read(40 << 20) == half.numpy().tobytes() * 80


class LongHeader(FolderFormat):
    """Two files whose headers are several parts long."""

    last = "config.json"

    def pack(self, infos: Mapping[str, TensorInfo]) -> Mapping[str, Sequence[str]]:
        return {f"{key}.safetensors": [key] for key in infos}

    def header(self, infos: Mapping[str, TensorInfo], quantized: Mapping[str, str]) -> Mapping[str, str]:
        return {"long": "x" * (30 << 20)}

    def companions(self, *_: Mapping[str, Any]) -> Mapping[str, bytes | Path]:
        return {self.last: b"{}"}

    def open(self, folder: Place, *, dequantize: bool) -> TensorReader:
        raise AssertionError("nothing is read back")

    def check(self, reader: TensorReader) -> None:
        raise AssertionError("nothing is read back")


def test_a_long_header_that_cannot_be_uploaded_stops_all_ranks_at_once(s3: Server) -> None:
    """Parts of it are sent while it is written, so one rank hears of it before any tensor is written."""
    place, store = place_in(s3), dist.HashStore()
    groups = [file_group(KeyMap(identity=True).group_of_fqn(name), [torch.ones(4)], None) for name in ("a", "b")]
    errors: dict[int, str] = {}

    def run(rank: int) -> None:
        with pytest.raises(ExportError) as caught:
            FolderExport(groups, LongHeader()).write(broken / "e", Coordinator(rank, 2, store, "header", 60.0))
        errors[rank] = str(caught.value)

    with behind(s3, DENIED, "PUT", "b.safetensors", times=10_000) as proxy:
        broken = through(place, proxy, part_mib=5, concurrency=1)
        with ThreadPoolExecutor(2) as pool:
            assert [*pool.map(run, range(2))]
    assert "e/b.safetensors" in errors[1] and "Access Denied" in errors[1]
    assert "export/create: stopped on all ranks because\n  rank 1 failed: StoreError" in errors[0]
    assert names(place) == [f"{RECORDS}/e.json"]


def test_transformers_opens_an_export_and_a_run_loads_it(server: Server, tmp_path: Path) -> None:
    """Sharded, with what lies beside it: transformers' logits are the model's, and initial_load takes it."""
    place = place_in(server)
    model = Llama3(CONFIG)
    made = export(model, place, tmp_path, max_shard_bytes=400_000, dtype="bfloat16")
    assert len([name for name in names(made) if name.endswith(".safetensors")]) > 1
    on_disk = ExportConfig("hf", max_shard_bytes=400_000, dtype="bfloat16")
    world.save(world.manager(tmp_path, model, save=None, export=(on_disk,)), last_step=True)
    copy, local = get_folder(made, tmp_path / "copy"), tmp_path / "exports" / "step-1"
    assert {p.name: p.read_bytes() for p in copy.iterdir()} == {p.name: p.read_bytes() for p in local.iterdir()}
    theirs: Any = LlamaForCausalLM.from_pretrained(copy)
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits.float(), model.bfloat16()(tokens).float(), rtol=0.1, atol=0.1)
    again = Llama3(CONFIG).bfloat16()
    world.load(world.manager(tmp_path, again, save=None, store=place.bucket.settings, initial_load=[made]))
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))

    given = {"folder": str(place / "run"), "store": place.bucket.settings}
    with world.manager(tmp_path, torch.nn.Linear(2, 2), **given) as manager:
        manager.load()
        manager.save_seed()
    store = {"endpoint": place.bucket.settings.endpoint, "retry_seconds": SECONDS}
    for named in (made, place / "run" / "step-0"):  # a step's files lie elsewhere in a bucket
        tables: dict[str, Any] = {"checkpoint": {"store": store, "initial_load": [{"path": str(named), "cast": True}]}}
        said = rf"data.tokenizer: {named}.* holds weights, and tokenizers .*the number of tokens of one"
        with pytest.raises(ConfigError, match=said):
            find_tokenizer(settings(tmp_path, data={"tokenizer": None}, **tables), 2048)


def test_a_cut_in_the_middle_leaves_nothing_that_opens(server: Server, tmp_path: Path) -> None:
    """The second shard, then the last file cannot be written: no config.json is there; the next export succeeds."""
    place = place_in(server)
    model = Llama3(CONFIG)
    for suffix in ("-00002-of-00003.safetensors", "config.json"):
        with behind(server, DENIED, "PUT", suffix, times=10_000) as proxy:
            broken = through(place, proxy)
            with pytest.raises(ExportError, match="nothing was published"):
                export(model, broken, tmp_path, max_shard_bytes=400_000)
        assert not [name for name in names(place) if not name.startswith(RECORDS)]
    (place / "step-1" / "model-00007-of-00009.safetensors").bucket.create(
        (place / "step-1" / "model-00007-of-00009.safetensors").key, b"of a process that was killed"
    )
    made = export(model, place, tmp_path, max_shard_bytes=400_000)
    assert "config.json" in names(made) and "model-00007-of-00009.safetensors" not in names(made)


def test_an_export_is_not_written_over(s3: Server, tmp_path: Path) -> None:
    """A published export stays, and so do objects that no export has left."""
    place = place_in(s3)
    model = Llama3(CONFIG)
    made = export(model, place, tmp_path)
    before = [(f.key, f.version) for f in place.bucket.list_objects(made.key)]
    with pytest.raises(ExportError, match="is there already; remove it or choose another folder"):
        export(model, place, tmp_path)
    assert [(f.key, f.version) for f in place.bucket.list_objects(made.key)] == before
    place.bucket.create((place / "step-2" / "notes.txt").key, b"mine")
    with pytest.raises(ExportError, match=r"holds objects that no export has left, such as notes\.txt"):
        export(model, place, tmp_path, step=2)
    assert names(place / "step-2") == ["notes.txt"]


def test_a_flipped_bit_in_the_bucket_is_found_before_it_is_published(
    s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof reads what the store holds."""
    place = place_in(s3)
    real = ObjectWriter.finish

    def flip(writer: ObjectWriter, num_bytes: int) -> None:
        real(writer, num_bytes)
        data = bytearray(writer.path.read())
        data[-3] ^= 4
        writer.path.bucket.upload(writer.path.key, iter([memoryview(data)]), 5 << 20)

    monkeypatch.setattr(ObjectWriter, "finish", flip)
    with pytest.raises(ExportError, match="read back differ from what was"):
        export(Llama3(CONFIG), place, tmp_path)
    assert not [name for name in names(place) if not name.startswith(RECORDS)]


@pytest.mark.parametrize("kind", ["hf", "dcp"])
def test_the_newest_interval_exports_stay(server: Server, kind: str, tmp_path: Path) -> None:
    """Exports of staged copies expire, but none that is not as the run published it."""
    place = place_in(server)
    model = Llama3(CONFIG)
    made = ExportConfig(kind, interval=1, keep=1, folder=str(place))  # type: ignore[arg-type]
    given = {"folder": str(place_in(server)), "store": place.bucket.settings, "export": (made,)}
    with world.manager(tmp_path, model, **given) as manager:
        manager.load()
        for step in (1, 2, 3):
            manager.save(step, last_step=step == 3)
            manager.wait()
            if step == 1:
                place.bucket.create((place / "step-1" / "notes.txt").key, b"mine")
    steps = {name.split("/")[0] for name in names(place) if name.startswith("step-")}
    assert steps == {"step-1", "step-3"}
    assert {name.removeprefix(f"{RECORDS}/") for name in names(place) if name.startswith(RECORDS)} == {
        "step-1.json", "step-3.json",
    }  # fmt: skip
    assert not (tmp_path / "s3:").exists() and not (tmp_path / "az:").exists()


def test_a_removal_that_is_cut_short_is_taken_up_again(s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the export is not taken for a user's folder: it expires, and its step can be exported again."""
    place = place_in(s3)
    exports, config = BucketExports(place), ExportConfig("dcp", interval=1, keep=1, folder=str(place))

    def make(step: int) -> None:
        attempt = exports.begin(f"step-{step}")
        place.bucket.create((place / f"step-{step}" / "__0_0.distcp").key, b"weights")
        attempt.publish(print, (".metadata", b"names"))
        exports.record(config, step)

    def cut(keys: Sequence[str]) -> None:
        if any(key.endswith(".distcp") for key in keys):
            raise StoreError(errno.EIO, "no answer", is_final=False)
        delete(keys)

    make(1)
    make(2)
    delete = place.bucket.delete
    for is_made_again in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(place.bucket, "delete", cut)
            with pytest.raises(StoreError):
                exports.expire(config, 2)
        assert [name for name in names(place) if name.startswith("step-1/")] == ["step-1/__0_0.distcp"]
        if is_made_again:
            make(1)
        exports.expire(config, 2)
        assert names(place) == [f"{RECORDS}/step-2.json", "step-2/.metadata", "step-2/__0_0.distcp"]
        make(1)


def test_what_an_export_left_that_was_cut_short_a_day_ago_is_removed(
    s3: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `keep`, also if no run comes to its step again. One of today may be under way; a user's folder stays.

    Ages are counted by the store's clock: this machine's is years off.
    """
    monkeypatch.setattr("time.time", lambda: 9e9)
    place = place_in(s3)
    config = ExportConfig("dcp", interval=1, keep=1, folder=str(place))
    attempt = BucketExports(place).begin("step-1")
    for name in ("step-1/__0_0.distcp", "step-2/__0_0.distcp"):
        place.bucket.create((place / name).key, b"weights")
    BucketExports(place).expire(config, 3)
    assert len(names(place)) == 3
    monkeypatch.setattr(bucket_record, "_CUT_SHORT_SECONDS", -60.0)
    BucketExports(place).expire(config, 3)
    assert names(place) == ["step-2/__0_0.distcp"]
    with pytest.raises(ExportError, match="another run exports to this name"):
        attempt.publish(print, (".metadata", b"names"))


def test_the_record_of_an_export_that_somebody_has_deleted_is_removed_after_a_day(
    s3: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is what a check left that was killed. A record of today, or of another kind of export, or of objects stays."""
    place = place_in(s3)
    config = ExportConfig("hf", interval=1, keep=5, folder=str(place))
    for name in ("step-1", "step-2", "step-3-peft"):
        BucketExports(place).begin(name)
    place.bucket.create((place / "step-2" / "a.safetensors").key, b"weights")
    place.bucket.create((place / RECORDS / f"probe-{'0' * 32}").key, b"")
    BucketExports(place).expire(config, 3)
    there = names(place)
    assert len(there) == 5
    monkeypatch.setattr(BucketExports, "_is_leftover", lambda *_: False)
    monkeypatch.setattr(bucket_record, "_CUT_SHORT_SECONDS", -60.0)
    BucketExports(place).expire(config, 3)
    assert sorted({*there} - {*names(place)}) == [
        f"{RECORDS}/probe-{'0' * 32}",
        f"{RECORDS}/step-1.json",
    ]


def test_what_cannot_be_an_export_is_said_before_the_first_step(s3: Server, tmp_path: Path) -> None:
    """A bucket that is not there; a place inside the checkpoint folder; an unknown scheme."""
    settings = StoreConfig(endpoint=s3.endpoint, retry_seconds=5.0)
    run = Run()
    saves = run.manager(
        tmp_path, save=None, store=settings, export=(ExportConfig("dcp", folder=f"{s3.url}-none/exports"),)
    )
    with saves, pytest.raises(OSError, match="Create the bucket"):
        saves.load()
    with pytest.raises(ConfigError, match="is inside checkpoint folder"):
        CheckpointConfig(folder="s3://box/run", export=(ExportConfig("dcp", folder="s3://box/run/exports"),))
    with pytest.raises(ConfigError, match="is inside checkpoint folder"):
        CheckpointConfig(folder="s3://box", export=(ExportConfig("dcp", folder="s3://box/commits"),))
    CheckpointConfig(folder="s3://box/run", export=(ExportConfig("dcp", folder="s3://box/run-exports"),))
    with pytest.raises(ConfigError, match="s3://bucket/key, gs://bucket/key or az://container/key"):
        ExportConfig("hf", folder="hdfs://a/b")


def test_shards_of_two_ranks_are_the_files_of_one(s3: Server, tmp_path: Path) -> None:
    """Shards of rows and of columns, and replicas: each file is uploaded by one rank, byte for byte as on a disk, also
    in the background and quantized; and if one rank cannot upload its file, both say so, and nothing is left.
    """
    place = place_in(s3)
    with behind(s3, DENIED, "PUT", "-00002-of-00003.safetensors", times=10_000) as proxy:
        broken = through(place, proxy).bucket.settings
        export_from_two_ranks(str(place), place.bucket.settings, broken, tmp_path)
    assert names(place / "broken") == [f"{RECORDS}/step-1.json"]
    model, converter = quantizing_model()
    given = {"export": of_two_ranks("exports"), "model_converters": converter}
    world.save(world.manager(tmp_path, model, save=None, **given), last_step=True)
    for name in ("step-1", "step-1-quantized"):
        copy, local = get_folder(place / name, tmp_path / "copy" / name), tmp_path / "exports" / name
        assert {p.name: p.read_bytes() for p in copy.iterdir()} == {p.name: p.read_bytes() for p in local.iterdir()}
    assert names(place / "dcp" / "step-1") == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=get_folder(place / "dcp" / "step-1", tmp_path / "dcp"))
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_peft_opens_an_adapter_and_a_run_loads_it_over_a_base_in_the_bucket(server: Server, tmp_path: Path) -> None:
    """PEFT's logits and those of the merged export are the run's; both folders are sources of a new run."""
    place = place_in(server)
    base = world.write_llama(tmp_path / "base")
    put_folder(place / "base", base)
    exports = tuple(ExportConfig(kind, folder=str(place / "exports")) for kind in ("hf", "peft"))
    run = LoraRun.build(base)
    settings = {"store": place.bucket.settings, "save": None, "export": exports}
    with run.manager(tmp_path, [place / "base"], **settings) as manager:  # type: ignore[list-item]
        manager.load()
        run.step()
        run.step()
        manager.save(2, last_step=True)
    made = place / "exports" / "step-2-peft"
    assert names(made) == ["adapter_config.json", "adapter_model.safetensors", "titan_ckpt.json"]
    adapter = get_folder(made, tmp_path / "adapter")
    theirs: Any = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), str(adapter)).eval()
    merged = reload(get_folder(place / "exports" / "step-2", tmp_path / "merged"))
    with torch.no_grad():
        for other in (theirs, merged):
            torch.testing.assert_close(other(IDS).logits, run.logits(), rtol=1e-4, atol=1e-5)
    again = LoraRun.build(base, seed=7)
    settings = {"store": place.bucket.settings, "save": None}
    world.load(again.manager(tmp_path / "b", [place / "base", made], **settings))  # type: ignore[list-item]
    assert torch.equal(again.logits(), run.logits())


def test_an_export_looks_like_its_base_in_the_bucket_and_a_quantized_one_is_that_of_a_disk(
    s3: Server, tmp_path: Path
) -> None:
    """The base's dtypes, files and tokenizer are taken from the bucket; codes and scales are the same bytes."""
    place = place_in(s3)
    theirs: Any = LlamaForCausalLM(LlamaConfig.from_dict(CONFIG.to_hf())).bfloat16()
    theirs.save_pretrained(tmp_path / "base", max_shard_size="100KB")
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    put_folder(place / "base", tmp_path / "base")
    model = Llama3(CONFIG)
    store, source = place.bucket.settings, InitialLoadConfig(str(place / "base"), cast=True)
    looks = ExportConfig("hf", dtype="original", max_shard_bytes="base", folder=str(place / "exports"))
    world.finish(world.manager(tmp_path, model, save=None, store=store, initial_load=[source], export=(looks,)))
    copy = get_folder(place / "exports" / "step-1", tmp_path / "copy")
    files = {p.name: p.read_bytes() for p in (tmp_path / "base").glob("*.safetensors")}
    assert len(files) > 3 and {p.name: p.read_bytes() for p in copy.glob("*.safetensors")} == files
    assert (copy / "tokenizer.json").read_text() == "{}"

    converter = from_tables([{"kind": "qat", "scheme": "int8_weight_only"}])
    converter.convert(model)
    both = tuple(ExportConfig("hf_quantized", folder=folder) for folder in ("exports", str(place / "exports")))
    quantized = world.manager(tmp_path, model, save=None, store=store, export=both, model_converters=converter)
    world.save(quantized, last_step=True)
    name = "step-1-quantized"
    made, local = get_folder(place / "exports" / name, tmp_path / "quantized"), tmp_path / "exports" / name
    assert {p.name: p.read_bytes() for p in made.iterdir()} == {p.name: p.read_bytes() for p in local.iterdir()}


def test_exports_of_a_branch_that_was_given_up_are_replaced_by_the_new_branchs(server: Server, tmp_path: Path) -> None:
    """Before that nobody can load them by their names, they keep their bytes, and retention leaves them."""
    place, model = place_in(server), torch.nn.Linear(2, 2, bias=False)
    exports = (ExportConfig("dcp", interval=1, keep=2, folder=str(place)),)
    given = {"async_mode": "disabled", "store": place.bucket.settings, "export": exports}
    with world.manager(tmp_path, model, **given) as manager:
        manager.load()
        for step in (1, 2, 3, 4):
            torch.nn.init.constant_(model.weight, step)
            manager.save(step)
        before = {key: (place / "step-4" / key).read() for key in names(place / "step-4")}
        manager.load(2)
        assert {key: (place / "step-4" / key).read() for key in names(place / "step-4")} == before
        torch.nn.init.constant_(model.weight, 103)
        manager.save(3)
        assert [*before] == [".metadata", "__0_0.distcp"]
        assert names(place / "step-4") == [".metadata.abandoned", "__0_0.distcp"]
        assert (place / "step-4" / ".metadata.abandoned").read() == before[".metadata"]
        with open_reader(get_folder(place / "step-3", tmp_path / "copy")) as reader:
            loaded = torch.empty(2, 2)
            reader.read([Block(Chunk.whole((2, 2)), loaded, "weight")])
        assert loaded.unique().tolist() == [103.0]
        manager.save(4)
    assert names(place / "step-4") == [".metadata", "__0_0.distcp"]
