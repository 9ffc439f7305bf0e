"""`make zoo` fails if a case is different, if fewer are exact than a floor says, or if one is no longer exact."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.zoo import page
from tests.zoo.worlds import Row

EXACT: list[Row] = [("a: all", "exact", ""), ("b: all", "exact", ""), ("c, with d: all", "exact", "")]
REFUSED: Row = ("b: all", "refused", "a | b")
DIFFERENT: Row = ("b: all", "different", "weights differ")


def test_the_floors_are_those_that_were_promised() -> None:
    """Every part has floors: models, optimizers and settings of PEFT those of issue 13, on one rank and on two."""
    parts = page.parts()
    assert set(parts) >= {"lora_modules", "models", "modules", "optimizers", "peft_settings"}
    promised = {"models": {": all weights": 185, ": LoRA": 119}, "optimizers": {"": 130}, "peft_settings": {"": 64}}
    for name, part in parts.items():
        least = promised.get(name.removesuffix("_on_two_ranks"), {"": 1})
        floors = page.floors(part)
        assert {end: max(floor, least.get(end, 1)) for end, floor in floors.items()} == floors, name


def test_the_page_has_every_part_above_its_floors() -> None:
    """The page that is committed came from a run that did not fail."""
    text = page.PAGE.read_text()
    for name, part in page.parts().items():
        rows: list[Row] = [(case, "exact", "") for case in page.exact_in(text, page.heading(part))]
        assert rows, name
        assert not [*page.faults(rows, page.floors(part), frozenset())], name
    assert "| different |" not in text.partition(page.MARK)[2]


@pytest.mark.parametrize(
    ("rows", "lines"),
    [
        (EXACT, []),
        ([*EXACT[::-1], ("new: LoRA", "refused", "")], []),
        ([*EXACT[1:], ("e: all", "exact", "")], ["was exact: a: all: not tried"]),
        (
            [EXACT[0], REFUSED, EXACT[2]],
            ["2 with `: all` are exact; at least 3 have to be", "was exact: b: all: a | b"],
        ),
        ([*EXACT, DIFFERENT], ["different: b: all: weights differ"]),
    ],
)
def test_a_run_fails_for_what_was_lost(
    rows: list[Row],
    lines: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The exit status is 1 and each reason has a line; the page has the new verdicts, and the other parts' old ones."""
    part = ModuleType("tests.zoo.test_letters", "Letters of the alphabet.")
    vars(part).update(rows=lambda: rows, FLOORS={": all": 3})
    monkeypatch.setattr(page, "parts", lambda: {"letters": part})
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    words = page.with_section(f"# Page\n\n{page.MARK}", "Words", [("word", "exact", "")], {"": 1})
    page.PAGE.write_text(page.with_section(words, "Letters of the alphabet", EXACT, {}))
    assert page.main(["letters"]) == bool(lines)
    assert capsys.readouterr().out.splitlines()[1:] == [f"  {line}" for line in lines]
    text = page.PAGE.read_text()
    assert text.startswith("# Page\n") and page.exact_in(text, "Words") == {"word"}
    assert page.exact_in(text, "Letters of the alphabet") == {name for name, verdict, _ in rows if verdict == "exact"}


def test_an_unknown_part_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is run."""
    monkeypatch.setattr(page, "parts", lambda: {"letters": ModuleType("letters")})
    with pytest.raises(SystemExit, match="no part of the zoo: words; there are letters"):
        page.main(["letters", "words"])
