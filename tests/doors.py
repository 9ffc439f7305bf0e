"""The doors of the rooms: a contract of import-linter. A room's `__all__` names what other rooms may import.

Source: import-linter, "Custom contract types".
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output

ROOT = Path(__file__).parents[1]


class Doors(Contract):
    """An import from another room names only what the room's `__init__` has in `__all__`: modules, or what is in them.

    The rooms are the packages directly in those of `rooms_in`; a package in a room is part of it.
    """

    type_name = "doors"
    rooms_in: Any = fields.ListField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Look at every direct import."""
        faults = [
            f"{importer}:{detail['line_number']} imports {imported}, and {room.replace('.', '/')}/__init__.py does not "
            f"name {door!r} in __all__: import what it names, or name it there if it is for other rooms too"
            for importer in sorted(graph.modules)
            for imported in sorted(graph.find_modules_directly_imported_by(importer))
            for room, door in walls(self.rooms_in, importer, imported)
            for detail in graph.get_import_details(importer=importer, imported=imported)
        ]
        return ContractCheck(kept=not faults, metadata={"faults": faults})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print a line for each import."""
        for fault in check.metadata["faults"]:
            output.print_error(fault)


def walls(rooms_in: Collection[str], importer: str, imported: str) -> Iterator[tuple[str, str]]:
    """Yield (room, name) of each room that an import enters by a name that is no door."""
    parts = imported.split(".")
    for depth in range(1, len(parts)):
        room = ".".join(parts[:depth])
        is_outside = importer != room and not importer.startswith(f"{room}.")
        if is_outside and room.rpartition(".")[0] in rooms_in and parts[depth] not in doors(room):
            yield room, parts[depth]


@cache
def doors(room: str) -> frozenset[str]:
    """Return the names in `__all__` of a package, without importing it."""
    tree = ast.parse((ROOT / room.replace(".", "/") / "__init__.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return frozenset(ast.literal_eval(node.value))
    return frozenset()
