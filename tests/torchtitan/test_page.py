"""docs/use-in-torchtitan.md runs inside torchtitan, and its table has every setting; so has README.md's."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from tests.torchtitan.runs import config, distributed
from titan_ckpt.config import from_dict
from titan_ckpt.errors import ConfigError
from titan_ckpt.integrations.torchtitan.settings import SETTINGS
from titan_ckpt.training.config import RunConfig

PAGES = Path(__file__).parents[2]
PAGE = (PAGES / "docs" / "use-in-torchtitan.md").read_text()


@distributed(1)
def _page(assets: Path, folder: Path) -> None:
    assert config(assets, folder).checkpoint.enable  # the shim for CPU is in place
    folder.mkdir(exist_ok=True)
    (folder / "assets").symlink_to(assets)
    os.chdir(folder)
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert {language for language, _ in fenced} == {"python"}  # none is only shown
    exec(compile("\n".join(text for _, text in fenced), "use-in-torchtitan.md", "exec"), {})


def test_the_page_runs(assets: Path, tmp_path: Path) -> None:
    """A reader who copies the page's blocks in order gets what the page says."""
    _page(assets, tmp_path)


CASES = re.findall(r"\w+", """
checkpointer_package_import_path optimizer_and_checkpointer_import_order legacy_import_path
trainer_uses_checkpoint_interface_with_concrete_default save_load_restores_state
save_and_purge_keeps_last_k_checkpoints nonzero_rank_does_not_purge_or_save
load_returns_false_when_no_checkpoint_folder explicit_load_step_raises_when_checkpoint_folder_missing
load_finds_latest_and_calls_dcp_load initial_load_path_used_when_folder_has_no_valid_checkpoints
initial_load_path_ignored_when_folder_has_valid_checkpoints explicit_load_step_raises_when_checkpoint_step_missing
interval_respects_interval last_save_model_only_and_initial_load_model_only
async_save_with_pinned_mem_assigns_staging_future async_save_calls_maybe_wait_for_saving
enable_first_step_checkpoint non_persist_buffer_not_saved load_only_prevents_saving verify_prefix
maybe_wait_for_staging_when_checkpoint_disabled maybe_wait_for_saving_when_checkpoint_disabled
legacy_config_only_adds_dcp_specific_fields valid_default_config sanity_and_range_checks path_normalization
dependency_assertions remote_hf_rejected mode_normalization warnings returns_max_valid_step
missing_folder_returns_negative_one satisfies_the_protocol distinguishes_directories_from_files
listdir_returns_entry_names remove_deletes_a_populated_directory reaches_remote_uris_through_fsspec
defined_on_the_base_not_the_dcp_manager rank_zero_with_retention_and_an_existing_folder_purges
retention_disabled_does_not_purge nonzero_rank_does_not_purge absent_folder_does_not_purge survives_failed_delete
plain_param_cached_and_reflects_updates hook_tensor_storage_stable_and_refreshed
""")  # fmt: skip
"""The cases of torchtitan's tests/unit_tests/test_checkpoint.py, of the release that constraints.txt names."""


def test_the_page_answers_every_case_of_torchtitans_own_tests() -> None:
    """Each is in the table, as the same or as different with its reason."""
    rows = [line for line in PAGE.partition("torchtitan's own tests")[2].splitlines() if line.startswith("| `")]
    answers = {name: row.split("|")[2].strip() for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert [name for name in CASES if not answers.get(name, "").startswith(("same", "different:"))] == []


def test_the_page_names_every_setting() -> None:
    """No setting is missing from the table on the page."""
    table = PAGE.partition("## What each setting means")[2].partition("\n## ")[0]
    assert [name for name in SETTINGS if f"`{name}`" not in table] == []


def test_the_readme_names_every_key_of_torchtitan() -> None:
    """Its first way in says what becomes of each."""
    table = (PAGES / "README.md").read_text().partition("### Inside torchtitan")[2].partition("\n### ")[0]
    theirs = {field.name for field in dataclasses.fields(CheckpointManager.Config)}
    assert {*re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE)))} == theirs


def test_a_run_file_answers_every_table_of_torchtitan() -> None:
    """Each is a table or a key of ours, or an unknown one of which the error says what is in its place."""
    for name in (field.name for field in dataclasses.fields(Trainer.Config)):
        problems = ""
        try:
            from_dict(RunConfig, {"output_folder": "x", "model": {"flavor": "8B"}, name: {}})
        except ConfigError as error:
            problems = str(error)
        assert f"{name}: unknown key" not in problems or "torchtitan" in problems, problems


def test_the_page_for_newcomers_names_settings_of_torchtitan() -> None:
    """Each exists in the release that constraints.txt names."""
    page = (PAGES / "docs" / "coming-from.md").read_text()
    (rows,) = re.findall(r"^\| torchtitan \| run file \|\n\|---\|---\|\n((?:\|.*\n)+)", page, flags=re.MULTILINE)
    named = re.findall(r"`([a-z_]+(?:\.[a-z_]+)*)`", "\n".join(row.split(" | ")[0] for row in rows.splitlines()))
    config = llama3_debugmodel()
    unknown: list[str] = []
    for name in named:
        value: Any = config
        for part in name.split("."):
            value = getattr(value, part, unknown)
        if value is unknown and name not in ("lr", "betas", "eps", "weight_decay"):
            unknown.append(name)
    assert len(named) > 30
    assert unknown == []
