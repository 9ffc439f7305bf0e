"""Strict config: what can be said is understood exactly, what cannot be meant is answered, all of it at once."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from titan_ckpt.config import (
    CheckpointConfig,
    ExportConfig,
    InitialLoadConfig,
    KeepConfig,
    NonEmpty,
    PositiveInt,
    ResumeConfig,
    SaveConfig,
)
from titan_ckpt.encoding.overrides import apply_overrides
from titan_ckpt.encoding.toml import foreign_keys, from_dict, read_toml, validate
from titan_ckpt.errors import ConfigError


@dataclass(frozen=True)
class Lora:
    """One arm of a tagged union."""

    rank: PositiveInt
    kind: Literal["lora"] = "lora"


@dataclass(frozen=True)
class Float8:
    """The other arm."""

    kind: Literal["float8"] = "float8"
    emulate: bool = False


@dataclass(frozen=True)
class Training:
    """Every scalar, array and table type that a config may have."""

    steps: PositiveInt
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    compile: bool | Literal["auto"] = "auto"
    data: Path | None = None
    axes: dict[str, int] = field(default_factory=dict)

    def problems(self) -> list[str]:
        """Plain dataclasses have rules too."""
        return ["lr: expected less than 1 where steps is 1"] if self.steps == 1 and self.lr >= 1 else []


@dataclass(frozen=True)
class Job:
    """A config's root."""

    training: Training = field(default_factory=lambda: Training(steps=100))
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    converters: tuple[Lora | Float8, ...] = ()


def problems(raw: dict[str, Any], cls: type = Job) -> list[str]:
    """Return what from_dict has against `raw`."""
    with pytest.raises(ConfigError) as caught:
        from_dict(cls, raw)
    return list(caught.value.problems)


def in_checkpoint(table: dict[str, Any]) -> list[str]:
    return problems({"checkpoint": table})


def test_every_table_of_the_documented_example_is_understood(tmp_path: Path) -> None:
    """The TOML of the architecture document becomes exactly these dataclasses."""
    path = tmp_path / "run.toml"
    path.write_text(
        """
        [checkpoint]
        folder = "outputs/run/checkpoints"
        [checkpoint.save]
        interval = 500
        async_mode = "thread"
        keep = { latest = 3, every = 5000 }
        [checkpoint.resume]
        step = 1000
        exclude = ["dataloader"]
        [[checkpoint.initial_load]]
        path = "assets/base"
        [[checkpoint.initial_load]]
        path = "assets/adapter"
        format = "peft"
        [checkpoint.export]
        format = "hf"
        dtype = "bfloat16"
        """
    )
    assert from_dict(Job, read_toml(path)).checkpoint == CheckpointConfig(
        folder="outputs/run/checkpoints",
        save=SaveConfig(interval=500, async_mode="thread", keep=KeepConfig(latest=3, every=5000)),
        resume=ResumeConfig(step=1000, exclude=("dataloader",)),
        initial_load=(InitialLoadConfig("assets/base"), InitialLoadConfig("assets/adapter", format="peft")),
        export=(ExportConfig(format="hf", dtype="bfloat16"),),
    )


def test_f12_saves_are_in_the_background_by_default() -> None:
    """Whoever says nothing trains on while a thread writes."""
    assert SaveConfig(interval=1).async_mode == "thread"


def test_absent_tables_have_their_meaning() -> None:
    """An empty config loads what is there, saves nothing and exports nothing."""
    config = from_dict(Job, {}).checkpoint
    assert config == CheckpointConfig()
    assert config.save is None
    assert config.export == ()
    assert config.resume.step is None


def test_types_bind_without_loss() -> None:
    """An int may stand for a float, an array becomes a tuple, a string a path; everything keeps its value."""
    table = {"steps": 5, "lr": 1, "betas": [0, 0.5], "compile": True, "data": "a/b", "axes": {"dp": 2, "tp": 1}}
    training = from_dict(Job, {"training": table}).training
    assert training == Training(5, 1.0, (0.0, 0.5), True, Path("a/b"), {"dp": 2, "tp": 1})
    assert type(training.lr) is float
    assert type(training.betas[0]) is float


def test_unions_are_told_apart_by_kind() -> None:
    """Each element of [[converters]] becomes the dataclass that its kind names; one table is an array of one."""
    raw = {"converters": [{"kind": "float8"}, {"kind": "lora", "rank": 8}]}
    assert from_dict(Job, raw).converters == (Float8(), Lora(rank=8))
    assert from_dict(Job, {"converters": {"kind": "lora", "rank": 4}}).converters == (Lora(rank=4),)


def test_faults_in_unions_name_the_kinds() -> None:
    """A kind that is missing or misspelled, and a key of another kind, are each answered."""
    raw = {"converters": [{"rank": 8}, {"kind": "lroa"}, {"kind": "float8", "rank": 8}, {"kind": "lora"}, 3]}
    assert problems(raw) == [
        'converters.0.kind: required, expected one of "lora", "float8"',
        'converters.1.kind: expected one of "lora", "float8", found "lroa"; did you mean "lora"?',
        "converters.2.rank: unknown key; known here: kind, emulate",
        "converters.3.rank: required, expected a positive integer",
        "converters.4: expected a table, found 3",
    ]


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"save": {"interval": -5}}, "save.interval: expected a positive integer (steps), found -5"),
        ({"save": {"interval": 0}}, "save.interval: expected a positive integer (steps), found 0"),
        ({"save": {"interval": True}}, "save.interval: expected a positive integer (steps), found true"),
        ({"save": {"interval": 5.0}}, "save.interval: expected a positive integer (steps), found 5.0"),
        ({"save": {"interval": "5"}}, 'save.interval: expected a positive integer (steps), found "5"'),
        ({"save": {}}, "save.interval: required, expected a positive integer (steps)"),
        ({"save": 500}, "save: expected a table, found 500"),
        ({"save": {"interval": 5, "first_step": 1}}, "save.first_step: expected true or false, found 1"),
        ({"save": {"interval": 5, "keep": {"latest": 0}}}, "save.keep.latest: expected a positive integer, found 0"),
        ({"save": {"interval": 5, "keep": {"latest": -1}}}, "save.keep.latest: expected a positive integer, found -1"),
        (
            {"save": {"interval": 5, "keep": {}}},
            "save.keep.latest: required where no other rule is set; to keep every checkpoint leave `keep` out",
        ),
        (
            {"save": {"interval": 5, "timeout_seconds": float("inf")}},
            "save.timeout_seconds: expected a positive number (seconds), found inf",
        ),
        (
            {"save": {"interval": 5, "timeout_seconds": 1 << 1024}},
            f"save.timeout_seconds: expected a positive number (seconds), found {1 << 1024}",
        ),
        (
            {"save": {"interval": 5, "timeout_seconds": float("nan")}},
            "save.timeout_seconds: expected a positive number (seconds), found nan",
        ),
        (
            {"save": {"interval": 5, "async_mode": "threads"}},
            'save.async_mode: expected one of "disabled", "thread", "process", found "threads"; did you mean "thread"?',
        ),
        ({"resume": {"step": -1}}, "resume.step: expected a step (0 or more; left out for the newest), found -1"),
        ({"resume": {"exclude": "rng"}}, 'resume.exclude: expected an array, such as ["rng"], found "rng"'),
        ({"folder": ""}, 'folder: expected a string that is not empty, found ""'),
        ({"folder": "  "}, 'folder: expected a string that is not empty, found "  "'),
        ({"folder": ["a"]}, "folder: expected a string that is not empty, found an array of 1"),
        ({"initial_load": [{}]}, "initial_load.0.path: required, expected a string that is not empty"),
        ({"initial_load": ["base"]}, 'initial_load.0: expected a table, found "base"'),
        (
            {"initial_load": [{"path": "a"}, {"path": "./a"}]},
            "initial_load.1.path: 'a' is named twice; each weight has one source",
        ),
        (
            {"export": {"format": "hf", "max_shard_bytes": 0}},
            'export.max_shard_bytes: expected a positive integer or one of "base", found 0',
        ),
        (
            {"export": [{"format": "hf"}, {"format": "hf"}]},
            "export.1: lands in 'exports/step-N', as export.0 does; give one another folder",
        ),
        (
            {"folder": "run/ckpt", "export": {"format": "hf", "folder": "run/ckpt/exports"}},
            "export.0.folder: 'run/ckpt/exports' is inside checkpoint folder 'run/ckpt'; name another",
        ),
    ],
)
def test_a_value_that_cannot_be_meant_is_answered(table: dict[str, Any], problem: str) -> None:
    """One line: the path, what was expected, what was found."""
    assert in_checkpoint(table) == [f"checkpoint.{problem}"]


def test_two_exports_may_share_a_folder_where_their_names_differ() -> None:
    """A merged model and its adapter stand side by side; a dcp export is below them, unless it is alone."""
    exports = [{"format": kind} for kind in ("peft", "dcp", "hf")]
    found = [export.lands_in() for export in from_dict(CheckpointConfig, {"export": exports}).export]
    assert found == ["exports/step-N-peft", "exports/dcp/step-N", "exports/step-N"]
    assert [e.lands_in() for e in CheckpointConfig(export=(ExportConfig("dcp"),)).export] == ["exports/step-N"]
    bucket = (ExportConfig("hf", folder="s3://box/run"), ExportConfig("dcp", folder="s3://box/run"))
    assert CheckpointConfig(export=bucket).export[1].lands_in() == "s3://box/run/dcp/step-N"


def test_a_closed_set_answers_a_typo() -> None:
    """An excluded component that does not exist is an error with a suggestion, not ignored."""
    (line,) = in_checkpoint({"resume": {"exclude": ["rng", "dataloder"]}})
    assert line.startswith("checkpoint.resume.exclude.1: expected one of ")
    assert line.endswith('found "dataloder"; did you mean "dataloader"?')


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ({"checkpoint": {"foldr": "x"}}, "checkpoint.foldr: unknown key; did you mean checkpoint.folder?"),
        ({"chekpoint": {"folder": "x"}}, "chekpoint: unknown key; did you mean checkpoint?"),
        ({"checkpoint": {"latest": 3}}, "checkpoint.latest: unknown key; did you mean checkpoint.save.keep.latest?"),
        ({"save": {"interval": 3}}, "save: unknown key; did you mean checkpoint.save?"),
        ({"max_shard_byte": 3}, "max_shard_byte: unknown key; did you mean checkpoint.export.max_shard_bytes?"),
        (
            {"checkpoint": {"path": "x"}},
            "checkpoint.path: unknown key; did you mean checkpoint.initial_load.path?",
        ),
        (
            {"training": {"steps": 3, "zzz": 1}},
            "training.zzz: unknown key; known here: steps, lr, betas, compile, data, axes",
        ),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_at_any_level(raw: dict[str, Any], problem: str) -> None:
    """A misspelled key, and a key in the wrong table, both lead to where it belongs."""
    assert problems(raw) == [problem]


@pytest.mark.parametrize("key", sorted(foreign_keys(CheckpointConfig)))
def test_torchtitan_keys_are_answered_with_their_spelling_here(key: str) -> None:
    """Every flat [checkpoint] key of torchtitan gets one line that says how to say it here."""
    (line,) = in_checkpoint({key: True})
    assert line.startswith(f"checkpoint.{key}: a torchtitan key; here: ")
    assert "\n" not in line


def test_torchtitan_spellings_given_as_answers_are_real() -> None:
    """Each key path that an answer names exists, so following it never leads to a second error."""
    known = set(_paths(Job, ""))
    words = {
        word.strip("[],;:()\"'")
        for answer in foreign_keys(CheckpointConfig).values()
        for word in answer.replace("=", " ").split()
    }
    named = {word for word in words if word.startswith("checkpoint.")}
    assert len(named) >= 8
    assert named <= known


def _paths(cls: Any, prefix: str) -> list[str]:
    tables = {
        "checkpoint": CheckpointConfig,
        "checkpoint.save": SaveConfig,
        "checkpoint.resume": ResumeConfig,
        "checkpoint.initial_load": InitialLoadConfig,
        "checkpoint.export": ExportConfig,
    }
    paths = [f"{prefix}{f.name}" for f in dataclasses.fields(cls)]
    return paths + [p for path in paths if path in tables for p in _paths(tables[path], f"{path}.")]


def test_all_faults_come_in_one_error() -> None:
    """Nobody has to run twice to learn of the second mistake: unknown keys, types, values and cross-field rules."""
    raw = {
        "training": {"steps": 1, "lr": 2.0},
        "checkpoint": {
            "enable": True,
            "save": {"interval": 0, "keep": {}, "typo": 1},
            "export": [{"format": "hf"}, {"format": "gguf"}],
        },
    }
    found = problems(raw)
    assert [line.split(":")[0] for line in found] == [
        "training.lr",
        "checkpoint.enable",
        "checkpoint.save.typo",
        "checkpoint.save.interval",
        "checkpoint.save.keep.latest",
        "checkpoint.export.1.format",
    ]


def test_code_is_held_to_the_same_rules_as_toml() -> None:
    """A config built in Python cannot be in a state that TOML could not say; lists settle into tuples."""
    with pytest.raises(ConfigError, match="interval: expected a positive integer"):
        SaveConfig(interval=0)
    with pytest.raises(ConfigError, match="latest: required"):
        KeepConfig()
    with pytest.raises(ConfigError, match="lands in"):
        CheckpointConfig(export=(ExportConfig("hf"), ExportConfig("hf")))
    settled = CheckpointConfig(initial_load=[InitialLoadConfig("a")])  # type: ignore[arg-type]
    assert settled.initial_load == (InitialLoadConfig("a"),)
    assert type(SaveConfig(5, timeout_seconds=3).timeout_seconds) is float


def test_a_field_of_no_toml_type_is_our_own_mistake() -> None:
    """A dataclass that strict TOML cannot fill fails at once, not at a user's."""

    @dataclass(frozen=True)
    class Odd:
        when: complex = 0j

    with pytest.raises(AssertionError, match="complex"):
        from_dict(Odd, {"when": 1})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[a]\nb = 1\nb = 2\n", "line 3: Cannot overwrite a value: b = 2"),
        ("[a]\nb = \n", "line 2: Invalid value: b ="),
        ("[a]\n[a]\n", "line 2: Cannot declare ('a',) twice: [a]"),
        ("a = 1\na.b = 2", "line 2: Cannot"),
    ],
)
def test_toml_faults_name_their_line(tmp_path: Path, text: str, problem: str) -> None:
    """Bad syntax and a key given twice are shown with the line they are on."""
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_toml(path)
    assert caught.value.source == str(path)
    assert caught.value.problems[0].startswith(problem)


def test_a_file_that_cannot_be_read_is_a_config_error(tmp_path: Path) -> None:
    """An absent file, a folder and bytes that are no text are told apart, and named."""
    with pytest.raises(ConfigError, match=r"absent.toml(.|\n)*No such file"):
        read_toml(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_toml(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b'a = "\xff"')
    with pytest.raises(ConfigError, match="byte 5 is not UTF-8"):
        read_toml(tmp_path / "binary.toml")


def test_overrides_set_keys_at_any_depth() -> None:
    """Values are TOML where they can be and strings where not; tables and elements on the way are made."""
    raw = {"checkpoint": {"save": {"interval": 500}}, "converters": [{"kind": "lora", "rank": 4}]}
    argv = [
        *("--checkpoint.save.interval", "10"),
        "--checkpoint.folder=out/run=1",
        *("--checkpoint.save.keep.latest", "2"),
        "--checkpoint.resume.exclude=['rng']",
        *("--checkpoint.initial_load.0.path", "assets/base"),
        *("--converters.0.rank", "8"),
        *("--converters.1.kind", "float8"),
        "--training.steps=5",
        *("--training.lr", "-1e-3"),
    ]
    merged = apply_overrides(raw, argv)
    assert merged == {
        "checkpoint": {
            "folder": "out/run=1",
            "save": {"interval": 10, "keep": {"latest": 2}},
            "resume": {"exclude": ["rng"]},
            "initial_load": [{"path": "assets/base"}],
        },
        "converters": [{"kind": "lora", "rank": 8}, {"kind": "float8"}],
        "training": {"steps": 5, "lr": -1e-3},
    }
    assert raw == {"checkpoint": {"save": {"interval": 500}}, "converters": [{"kind": "lora", "rank": 4}]}
    assert from_dict(Job, merged).converters == (Lora(8), Float8())


@given(st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False), st.text()))
def test_an_override_carries_any_value(value: bool | int | float | str) -> None:
    """Every value that TOML can write arrives as written, and text never becomes several keys or raises."""
    text = str(value).lower() if isinstance(value, (bool, float)) else str(value)
    merged = apply_overrides({}, [f"--a.b={text}"])
    assert list(merged) == ["a"]
    assert list(merged["a"]) == ["b"]
    if not isinstance(value, str):
        assert merged["a"]["b"] == value


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["train.toml"], "expected --table.key VALUE, found 'train.toml'"),
        (
            ["--checkpoint.save.first_step"],
            "--checkpoint.save.first_step: needs a value: --checkpoint.save.first_step VALUE",
        ),
        (["--checkpoint.folder", "--other", "1"], "--checkpoint.folder: needs a value"),
        (["--checkpoint..folder", "x"], "--checkpoint..folder: no such key"),
        (["--checkpoint.folder=a", "--checkpoint.folder=b"], "--checkpoint.folder: given twice"),
        (["--checkpoint.folder.x=1"], "--checkpoint.folder.x: checkpoint.folder is a value and has no keys"),
        (
            ["--converters.rank=1"],
            "--converters.rank: converters is an array: name an element, such as converters.0.rank",
        ),
        (["--converters.3.rank=1"], "--converters.3.rank: converters has 1 elements, so the next is converters.1"),
    ],
)
def test_a_flag_that_cannot_be_placed_is_answered(argv: list[str], problem: str) -> None:
    """A flag is never dropped."""
    raw = {"checkpoint": {"folder": "x"}, "converters": [{"kind": "lora"}]}
    with pytest.raises(ConfigError) as caught:
        apply_overrides(raw, argv)
    assert caught.value.problems[0].startswith(problem)


def test_faults_of_the_file_and_of_the_command_line_come_together(tmp_path: Path) -> None:
    """An unknown flag gets the same "did you mean" as an unknown key, in the same error as the file's faults."""
    path = tmp_path / "run.toml"
    path.write_text("[checkpoint]\nfoldr = 'x'\n")
    with pytest.raises(ConfigError) as caught:
        from_dict(Job, apply_overrides(read_toml(path), ["--checkpoint.save.intervall", "3"]), str(path))
    assert list(caught.value.problems) == [
        "checkpoint.foldr: unknown key; did you mean checkpoint.folder?",
        "checkpoint.save.intervall: unknown key; did you mean checkpoint.save.interval?",
        "checkpoint.save.interval: required, expected a positive integer (steps)",
    ]
    assert str(path) in str(caught.value)


json_values = st.recursive(
    st.one_of(st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.none()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
known_keys = st.sampled_from(
    ["folder", "save", "interval", "keep", "latest", "resume", "step", "exclude", "export", "format", "initial_load"]
)
trees = st.dictionaries(known_keys, st.dictionaries(known_keys, json_values) | json_values, max_size=4)


@given(trees)
@example({"save": {"\n": None, "": 1}})
@example({"export": [{"format": "hf", "folder": "\n"}, {"format": "dcp", "folder": "a\nb"}] * 2})
def test_any_table_is_either_a_valid_config_or_a_config_error(raw: dict[str, Any]) -> None:
    """No input makes any other exception, and what is accepted passes its own check again."""
    config: CheckpointConfig | None = None
    faults: list[str] = []
    try:
        config = from_dict(CheckpointConfig, raw)
    except ConfigError as error:
        faults += error.problems
    assert bool(faults) == (config is None)
    assert not [fault for fault in faults if "\n" in fault]
    if config is not None:
        validate(config)
        assert set(raw) <= {f.name for f in dataclasses.fields(CheckpointConfig)}


@dataclass(frozen=True)
class Named:
    """A required table."""

    name: NonEmpty


@dataclass(frozen=True)
class Outer:
    """A root with a required table."""

    inner: Named


def test_a_required_table_is_asked_for() -> None:
    """A missing table is named, not filled with something."""
    assert problems({}, Outer) == ["inner: required, expected a table"]
