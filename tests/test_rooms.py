"""The rooms of the house: folders are layers, their imports make no cycle, and none of them is crowded."""

from __future__ import annotations

import ast
import functools
import graphlib
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

from tests.doors import Doors, doors

ROOT = Path(__file__).parents[1]
FORMATS = ROOT / "titan_ckpt" / "formats"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in (ROOT / "titan_ckpt", ROOT / "titan_ckpt" / "converters")  # a link, into which rglob does not go
    for path in folder.rglob("*.py")
}


@functools.cache
def room_of(module: str) -> str:
    """Return the room that a module is in: its folder, or the module itself if other folders are beside it."""
    path = MODULES[module]
    has_folders = any((folder / "__init__.py").exists() for folder in path.parent.iterdir() if folder.is_dir())
    return module if has_folders else ".".join(path.parent.relative_to(ROOT).parts)


def imported(module: str) -> Iterator[str]:
    """Yield the modules that a module imports when it is imported or when a function runs; not for annotations."""
    tree = ast.parse(MODULES[module].read_text())
    ignored = {
        node
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for node in ast.walk(branch)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node not in ignored and node.module in MODULES:
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                yield inside if inside in MODULES else node.module
        if isinstance(node, ast.Import) and node not in ignored:
            yield from (alias.name for alias in node.names if alias.name in MODULES)


@functools.cache
def rooms() -> dict[str, set[str]]:
    """Return, for each room, the rooms that it imports; the public names of a package bring all of its rooms."""
    graph: dict[str, set[str]] = {}
    for module in MODULES.keys() - {"titan_ckpt"}:
        room = room_of(module)
        graph.setdefault(room, set()).update({room_of(other) for other in imported(module)} - {room})
    return graph | {"titan_ckpt": {*graph}}


def test_a1_rooms_import_each_other_in_one_direction() -> None:
    """The graph of the rooms has an order; a cycle is named."""
    try:
        graphlib.TopologicalSorter(rooms()).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"rooms import each other in a circle: {' -> '.join(error.args[1])}")


def test_a_cycle_would_be_seen() -> None:
    """The graph knows the imports: with one more, from the bottom to the top, it has no order."""
    graph = rooms()
    assert "titan_ckpt.disk" in graph["titan_ckpt.formats.native"]
    graph = graph | {"titan_ckpt.disk": {*graph["titan_ckpt.disk"], "titan_ckpt.manager"}}
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph).prepare()


def test_an_import_past_the_doors_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its line, and the `__init__` that does not name it; inside a room everything may be imported."""
    graph = grimp.ImportGraph()
    reader, header = "titan_ckpt.formats.native.reader", "titan_ckpt.formats.native.header"
    for importer, imported in [
        ("titan_ckpt.saving.saver", reader),
        ("titan_ckpt.saving.saver", header),
        (reader, header),
    ]:
        graph.add_import(importer=importer, imported=imported, line_number=7, line_contents="import")
    options = {"rooms_in": ["titan_ckpt", "titan_ckpt.formats"]}
    found = Doors("doors", {}, options).check(graph, verbose=False)
    (fault,) = found.metadata["faults"]
    assert not found.kept
    assert fault.startswith(
        f"titan_ckpt.saving.saver:7 imports {header}, and titan_ckpt/formats/native/__init__.py does"
    )


def test_every_room_has_doors() -> None:
    """A room without a list would be one that nobody may enter."""
    rooms = [path.parent for path in MODULES.values() if path.name == "__init__.py"]
    names = [folder.relative_to(ROOT) for folder in rooms if folder.parent in (ROOT / "titan_ckpt", FORMATS)]
    assert not [str(name) for name in names if not doors(".".join(name.parts))]


def test_no_room_is_crowded() -> None:
    """At most 14 files lie flat in titan_ckpt, and at most 16 in any folder."""
    folders = {path.parent for path in MODULES.values()}
    num_files = {str(folder.relative_to(ROOT)): len(list(folder.glob("*.py"))) for folder in folders}
    assert num_files["titan_ckpt"] <= 14
    assert max(num_files.values()) <= 16


def test_every_room_says_what_it_is() -> None:
    """Every folder has a docstring."""
    for module, path in MODULES.items():
        if path.name == "__init__.py":
            assert ast.get_docstring(ast.parse(path.read_text())), module
