"""DCP metadata written by hand to harm: nothing of it is looked up, called or changed, and each is one typed error."""

from __future__ import annotations

import pathlib
import pickle
import struct
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from titan_ckpt.errors import CorruptCheckpointError
from titan_ckpt.formats.dcp.dcp import DcpReader
from titan_ckpt.formats.dcp.metadata import unpickle

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # dcp in one process, as meant here

DCP = "torch.distributed.checkpoint.metadata"


def text(value: str) -> bytes:
    return pickle.SHORT_BINUNICODE + bytes([len(value.encode())]) + value.encode()


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + pickle.STACK_GLOBAL


def number(value: int) -> bytes:
    return pickle.BININT + struct.pack("<i", value)


def record(name: str, *fields: bytes) -> bytes:
    """Return an instance of a class of DCP that is filled with these names and values."""
    made = named(DCP, name) + pickle.EMPTY_TUPLE + pickle.NEWOBJ
    return made + pickle.EMPTY_DICT + pickle.MARK + b"".join(fields) + pickle.SETITEMS + pickle.BUILD


def called(function: bytes, *arguments: bytes) -> bytes:
    return function + pickle.MARK + b"".join(arguments) + pickle.TUPLE + pickle.REDUCE


def doubled(times: int) -> bytes:
    """Return a tuple of two references to a tuple of two references, and so on: 2 ** times leaves, a few bytes each."""
    deeper = b"".join(pickle.MEMOIZE + pickle.BINGET + bytes([i]) + pickle.TUPLE2 for i in range(times))
    return number(1) + deeper


def under_key(key: bytes) -> bytes:
    return pickle.EMPTY_DICT + key + pickle.NONE + pickle.SETITEM


SIZE, PATH, INDEX = named("torch", "Size"), named("pathlib", "PosixPath"), named(DCP, "MetadataIndex")
ATTRIBUTES = pickle.EMPTY_DICT + text("hacked") + pickle.NONE + pickle.SETITEM
ONE_TUPLE = number(1) + pickle.TUPLE1
ATTRIBUTES_W = pickle.EMPTY_DICT + text("fqn") + text("w") + pickle.SETITEM
INDEX_W = INDEX + pickle.EMPTY_TUPLE + pickle.NEWOBJ + ATTRIBUTES_W + pickle.BUILD
INDEX_OF_DOUBLED = record("MetadataIndex", text("fqn"), text("w"), text("index"), doubled(60))


def entry(chunks: bytes) -> bytes:
    properties = record("TensorProperties", text("dtype"), named("torch", "float32"))
    size = called(SIZE, ONE_TUPLE)
    return record("TensorStorageMetadata", text("properties"), properties, text("size"), size, text("chunks"), chunks)


TWO_OF_ONE_LIST = (
    pickle.EMPTY_DICT + text("a") + entry(pickle.EMPTY_LIST + pickle.BINPUT + b"\x09") + pickle.SETITEM
    + text("b") + entry(pickle.BINGET + b"\x09") + pickle.SETITEM
)  # fmt: skip
LONG_NAME = pickle.BINUNICODE + struct.pack("<I", 5000) + b"a" * 5000
FAR_AWAY = (
    pickle.EMPTY_DICT + INDEX_W
    + named("torch.distributed.checkpoint.filesystem", "_StorageInfo") + pickle.EMPTY_TUPLE + pickle.NEWOBJ
    + pickle.EMPTY_DICT + pickle.MARK + text("relative_path") + LONG_NAME + text("offset") + number(0)
    + text("length") + number(4) + pickle.SETITEMS + pickle.BUILD + pickle.SETITEM
)  # fmt: skip
HOSTILE = {
    "an attribute of pathlib": (PATH + ATTRIBUTES + pickle.BUILD, "sets attributes of a pathlib.PosixPath"),
    "an attribute of a class of dcp": (INDEX + ATTRIBUTES + pickle.BUILD, f"sets attributes of a {DCP}.MetadataIndex"),
    "an attribute of an enum": (
        called(named(DCP, "_MEM_FORMAT_ENCODING"), number(0)) + ATTRIBUTES + pickle.BUILD,
        "sets attributes of a _MEM_FORMAT_ENCODING",
    ),
    "an attribute of a dtype": (named("torch", "float32") + ATTRIBUTES + pickle.BUILD, "sets attributes of a dtype"),
    "slots of a path": (
        called(PATH, text("a")) + pickle.NONE + ATTRIBUTES + pickle.TUPLE2 + pickle.BUILD,
        "sets attributes of a PurePosixPath",
    ),
    "a field that is none": (record("Metadata", text("__class__"), pickle.NONE), "gives a Metadata __class__"),
    "a state that is a tuple": (
        INDEX + pickle.EMPTY_TUPLE + pickle.NEWOBJ + ONE_TUPLE + pickle.BUILD, "gives a MetadataIndex a tuple"
    ),
    "size of text": (called(SIZE, text("a") + pickle.TUPLE1), "calls torch.Size in a way"),
    "size of no tuple": (called(SIZE, number(5)), "calls torch.Size in a way"),
    "size beyond 64 bits": (called(SIZE, pickle.LONG1 + b"\x09" + b"\x01" * 9 + pickle.TUPLE1), "calls torch.Size"),
    "size with the hash of another": (
        called(SIZE, pickle.LONG1 + b"\x08" + (2**61 - 1).to_bytes(8, "little") + pickle.TUPLE1), "calls torch.Size"
    ),
    "a key with the hash of another": (
        under_key(pickle.LONG1 + b"\x09" + (2**63 - 4).to_bytes(9, "little")), "has a int as the key of a dict"
    ),
    "path of a number": (called(PATH, number(5)), "calls pathlib.PosixPath in a way"),
    "layout of anything": (called(named("torch.serialization", "_get_layout"), text("os.system")), "_get_layout in a"),
    "format of 7": (called(named(DCP, "_MEM_FORMAT_ENCODING"), number(7)), "_MEM_FORMAT_ENCODING in a way"),
    "a dict of pairs": (called(named("collections", "OrderedDict"), pickle.EMPTY_LIST), "OrderedDict in a way"),
    "a call of a class of dcp": (called(named(DCP, "Metadata"), pickle.EMPTY_DICT), "calls .*Metadata in a way"),
    "a call of a dtype": (called(named("torch", "float32")), "calls dtype in a way"),
    "a call without a tuple": (SIZE + pickle.EMPTY_LIST + pickle.REDUCE, "calls torch.Size in a way"),
    "a new one with arguments": (INDEX + ONE_TUPLE + pickle.NEWOBJ, "makes a .*MetadataIndex in a way"),
    "a new path": (PATH + pickle.EMPTY_TUPLE + pickle.NEWOBJ, "makes a pathlib.PosixPath in a way"),
    "a new one with keywords": (
        INDEX + pickle.EMPTY_TUPLE + pickle.EMPTY_DICT + pickle.NEWOBJ_EX, "uses NEWOBJ_EX, which no DCP metadata"
    ),
    "system": (called(named("posix", "system"), text("true")), "names posix.system, which"),
    "system by line": (pickle.GLOBAL + b"posix\nsystem\n" + pickle.EMPTY_TUPLE + pickle.REDUCE, "names posix.system"),
    "a way through a class": (named("torch", "Size.__class__"), "names torch.Size.__class__"),
    "a function of torch": (named("torch", "load"), "names torch.load"),
    "a name that is a number": (number(1) + number(2) + pickle.STACK_GLOBAL, "names something by other than text"),
    "an instance": (pickle.INST + b"posix\nsystem\n", "uses INST"),
    "an object": (pickle.MARK + INDEX + pickle.OBJ, "uses OBJ"),
    "an extension": (pickle.EXT1 + b"\x01", "uses EXT1"),
    "an extension of four bytes": (pickle.EXT4 + b"\x01\0\0\0", "uses EXT4"),
    "a persistent id": (pickle.PERSID + b"x\n", "uses PERSID"),
    "a persistent id on the stack": (text("x") + pickle.BINPERSID, "uses BINPERSID"),
    "a buffer out of band": (pickle.NEXT_BUFFER, "uses NEXT_BUFFER"),
    "text of 4 GiB": (pickle.BINUNICODE + b"\xff" * 4, "expected 4294967295 bytes"),
    "bytes of 2**60": (pickle.BINBYTES8 + struct.pack("<Q", 2**60), "uses BINBYTES8"),
    "an integer of 2 GiB": (pickle.LONG4 + struct.pack("<i", 2**31 - 1), "uses LONG4"),
    "a decimal without end": (pickle.LONG + b"9" * 5000 + b"L\n", "uses LONG"),
    "nested lists": (pickle.EMPTY_LIST * 20_000 + pickle.APPEND * 19_999, "it holds a list"),
    "nested tuples": (pickle.NONE + pickle.TUPLE1 * 50_000, "it holds a tuple"),
    "a number not stored": (pickle.BINGET + b"\x05", "asks for number 5, which it has not stored"),
    "a place far away": (pickle.NONE + pickle.LONG_BINPUT + b"\xff" * 4, "it holds a NoneType"),
    "nothing to store": (pickle.MEMOIZE, "takes a value that it has not made"),
    "a mark as a value": (pickle.MARK + pickle.TUPLE1, "takes a value that it has not made"),
    "a list without a mark": (number(1) + pickle.TUPLE, "ends a list that it has not begun"),
    "nothing": (b"", "takes a value that it has not made"),
    "a key without end": (under_key(doubled(60)), "has a tuple as the key of a dict"),
    "an index without end": (
        under_key(record("MetadataIndex", text("fqn"), text("w"), text("offset"), doubled(60))),
        "has a MetadataIndex as the key",
    ),
    "a key that cannot be shown": (
        pickle.EMPTY_DICT + INDEX_OF_DOUBLED + pickle.NONE + pickle.SETITEM, "has a MetadataIndex as the key"
    ),
    "a key that changes": (under_key(INDEX_W + ATTRIBUTES_W + pickle.BUILD), "fills a MetadataIndex twice"),
    "a size of many dims": (called(SIZE, pickle.MARK + number(1) * 65 + pickle.TUPLE), "calls torch.Size in a way"),
    "a long path": (called(PATH, *[text("a" * 250)] * 17), "calls pathlib.PosixPath in a way"),
    "chunks of two tensors": (
        record("Metadata", text("state_dict_metadata"), TWO_OF_ONE_LIST, text("storage_data"), pickle.NONE),
        "the chunks of 'b' are those of another tensor",
    ),
    "a file with a long name": (
        record("Metadata", text("state_dict_metadata"), pickle.EMPTY_DICT, text("storage_data"), FAR_AWAY),
        "the place of 'w' is malformed",
    ),
    "a list as a key": (under_key(pickle.EMPTY_LIST), "has a list as the key"),
    "a key twice": (
        under_key(text("w")) + text("w") + pickle.NONE + pickle.SETITEM, "has a key twice: 'w'"
    ),
    "items of a tuple": (pickle.EMPTY_TUPLE + number(1) + number(2) + pickle.SETITEM, "sets items of a tuple"),
    "a list of a dict": (pickle.EMPTY_DICT + number(1) + pickle.APPEND, "appends to a dict"),
    "an odd number of items": (
        pickle.EMPTY_DICT + pickle.MARK + text("a") + pickle.SETITEMS, "sets items of a dict|key of a dict"
    ),
    "no fields": (named(DCP, "Metadata") + pickle.EMPTY_TUPLE + pickle.NEWOBJ, "its tables of names and places"),
    "tables that are lists": (
        record("Metadata", text("state_dict_metadata"), pickle.EMPTY_LIST), "its tables of names and places"
    ),
    "an entry that is none": (
        record("Metadata", text("state_dict_metadata"), under_key(text("w"))), "the entry of 'w' is malformed"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_pickle_is_refused_at_once_with_its_cause(tmp_path: Path, what: str) -> None:
    """The error names the file and the cause; no class has changed, and little time has passed."""
    before = set(vars(pathlib.PurePosixPath)), set(vars(pathlib.PosixPath)), set(vars(Metadata))
    body, cause = HOSTILE[what]
    (tmp_path / ".metadata").write_bytes(pickle.PROTO + b"\x04" + body + pickle.STOP)
    started = time.process_time()  # a busy machine is no failure
    with pytest.raises(CorruptCheckpointError, match=cause) as caught:
        DcpReader(tmp_path)
    assert str(tmp_path / ".metadata") in str(caught.value)
    assert "Nothing was executed" in str(caught.value)
    assert time.process_time() - started < 5
    assert before == (set(vars(pathlib.PurePosixPath)), set(vars(pathlib.PosixPath)), set(vars(Metadata)))


def test_a_frame_longer_than_the_file_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    """The claimed length of a frame reserves no memory."""
    (tmp_path / ".metadata").write_bytes(pickle.PROTO + b"\x04" + pickle.FRAME + struct.pack("<Q", 2**62) + b"N.")
    with pytest.raises(CorruptCheckpointError, match="it holds a NoneType"):
        DcpReader(tmp_path)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_real_metadata_is_what_pickle_makes_of_it(tmp_path: Path, protocol: int) -> None:
    """Whatever the protocol, with tensors, views, scalars, items that are no tensors, and a path."""
    state = {
        "model": {"w": torch.ones(3, 4).t(), "half": torch.ones(2).half(), "n": torch.tensor(1)},
        "optim": {"state": {0: {"step": torch.tensor(1.0)}}, "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
        "images": torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "nothing": None,
    }
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path))
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    assert isinstance(metadata.storage_meta.checkpoint_id, pathlib.PosixPath)
    assert unpickle(pickle.dumps(metadata, protocol)) == metadata
