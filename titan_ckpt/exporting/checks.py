"""Checks of a run's exports: before training that all can be made, after a load that folders and weights agree.

Decides nothing about an export: exporter.py does, and its own refusals are raised here, early.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from titan_ckpt.config import ExportConfig
from titan_ckpt.disk import posix
from titan_ckpt.errors import ConverterError, ExportError, ExportSettingError, counted, listed
from titan_ckpt.exporting.exporter import Exporter, quantizer_of
from titan_ckpt.formats.huggingface.peft import PeftFormat
from titan_ckpt.formats.huggingface.reader import TIED
from titan_ckpt.formats.publish.run import FolderExport
from titan_ckpt.geometry.chunks import TensorInfo
from titan_ckpt.stores.store import split_url
from titan_ckpt.types import PlacesTensors

logger = logging.getLogger(__name__)


def check_exports(exporter: Exporter, configs: Sequence[ExportConfig]) -> None:
    """Check before training that every export can be made. Collective.

    Raises: ExportSettingError listing every export that cannot be made; KeyMapError for names without a file key.
    """
    if not configs:
        return
    # a pipeline stage may have no converter-owned keys
    owned = exporter.coordinator.anywhere("export-owned", exporter.model.owned_state_dict)
    exporter.coordinator.together("export-check", lambda: _check(exporter, configs, owned))
    if any(config.container == "peft" for config in configs):
        _check_placement(exporter)


def _check_placement(exporter: Exporter) -> None:
    """Check that other tools will find a place for every tensor of an adapter. Collective: stages hold parts."""
    converter, key_map = exporter.model.converter, exporter.transforms.key_map

    def shapes() -> dict[str, list[int]]:
        groups = exporter.transforms.to_file(exporter.model.owned_state_dict(), converter, None)
        return {key: list(info.shape) for group in groups for key, info in group.infos.items()}

    of_ranks = exporter.coordinator.gather_results("export-shapes", shapes)

    def check() -> None:
        adapter = None if converter is None else converter.state_dict_adapter()
        assert adapter is not None, "_check comes first"
        everywhere = {key: shape for of_rank in of_ranks for key, shape in of_rank.items()}
        infos = {key: TensorInfo(tuple(shape), torch.float32) for key, shape in everywhere.items()}
        faults = PeftFormat(adapter.file_config(key_map)).faults(infos)
        if isinstance(adapter, PlacesTensors):
            faults = adapter.misplaced(key_map, everywhere, exporter.transforms.hf_config) or faults
        if faults:
            raise ExportError(
                f"checkpoint.export: peft: {'; '.join(faults)}. Leave these modules out of target_modules, or "
                'export merged weights (format = "hf")'
            )

    exporter.coordinator.on_rank_0("export-placement", check)


def check_folders(exporter: Exporter, configs: Sequence[ExportConfig], *, fresh: bool) -> None:
    """Check after a load that weights, config.json and base agree, as an export itself does. Collective.

    A bucket is asked whether this run may write, read, list and delete there.

    `fresh`: the run begins at step 0. Exports of its own that it made before it was ended without a committed step are
    set aside; any others that are there are logged.
    Raises: ExportError; KeyMapError; OSError.
    """
    for made in map(exporter.made, configs):
        exporter.coordinator.on_rank_0("export-place", made.check)
    if fresh and configs:

        def steps_there() -> list[str]:
            exporter.start_over(configs)
            return [str(exporter.folder(c, step)) for c in configs for step in exporter.made(c).steps_there(c)]

        there = exporter.coordinator.on_rank_0("export-before", steps_there)
        if there and exporter.coordinator.rank == 0:
            logger.warning(
                "%s is there from before this run, which will not export over it: move it away, or choose another "
                "folder",
                listed(there, ", ", " "),
            )
    if configs and (back := exporter.went_back_to) is not None:
        exporter.coordinator.on_rank_0("export-branch", partial(exporter.refuse_foreign_branch, configs, back))
    for config in (config for config in configs if config.container == "hf"):

        def export_of_base(config: ExportConfig = config) -> FolderExport:
            return exporter.huggingface(config, exporter.model.state_dict("base"))

        exporter.coordinator.together("export-folder", export_of_base).check(exporter.coordinator)


def _check(exporter: Exporter, configs: Sequence[ExportConfig], owned: bool) -> None:
    problems = []
    converter = exporter.model.converter
    state = exporter.model.state("full")
    whole = {*exporter.model.memory(), *state.made}
    inside = [fqn for fqn in state.tensors if fqn not in whole]
    for config in configs:
        if config.container != "peft" and inside:
            problems.append(
                f"{config.format}: weights that are made of other tensors, such as {inside[0]}, are not for other "
                "programs; export the model before quantizing it, or its adapter alone (peft)"
            )
            continue
        if config.container == "hf" and exporter.transforms.hf_config is None:
            problems.append(
                "hf: the model has no table to Hugging Face names; give the manager "
                "sd_transforms=StateDictTransforms(key_map=..., hf_config=...), or, of a model of transformers, "
                "StateDictTransforms.from_transformers(model) before converters change it"
            )
        if config.container == "peft" and not (
            owned and converter is not None and converter.state_dict_adapter() is not None
        ):
            problems.append('peft: no converter owns adapter weights; add [[converters]] kind = "lora"')
        if config.container == "peft" and (trained := exporter.model.trained_base()):
            problems.append(
                f"peft: {counted(len(trained), 'parameter of the base is', 'parameters of the base are')} trained "
                f"too, such as {trained[0]}, and an adapter does not hold them; freeze them, or export merged weights "
                '(format = "hf")'
            )
        base = exporter.model.state_dict("base") if config.format == "torchtitan_weights" else {}
        if lacking := sorted(base.keys() - exporter.transforms.names_in_torchtitan(base).keys()):
            problems.append(
                f"torchtitan_weights: there are no names of torchtitan for {listed(lacking)}; the manager takes them "
                "from sd_transforms=StateDictTransforms(torchtitan=...)"
            )
        if split_url(config.folder) is None and (why := posix.why_no_folder(exporter.base_folder / config.folder)):
            problems.append(f"folder: {why}")
        if config.assets is not None and not Path(config.assets).is_dir():
            problems.append(f"assets: {config.assets} is no folder")
        if config.follows_base and exporter.source() is None:
            problems.append(
                'dtype = "original" and max_shard_bytes = "base" are the base\'s: name its Hugging Face folder, and no '
                "second one, in [[checkpoint.initial_load]]"
            )
        elif config.quantized:
            problems += _quantizing_problems(exporter, config)
    if problems:
        raise ExportSettingError("checkpoint.export cannot be made: " + "; ".join(problems))
    if any(config.container == "hf" for config in configs):
        exporter.transforms.to_file(exporter.model.state_dict("base"), None, None)


def _quantizing_problems(exporter: Exporter, config: ExportConfig) -> Iterator[str]:
    """Yield the reasons why the quantized export cannot be made, without computing a value."""
    try:
        quantizer = quantizer_of(exporter.model.converter)
        if quantizer is None:
            yield 'quantized: no converter quantizes weights; add [[converters]] kind = "qat" or "float8"'
            return
        base = exporter.model.state("base")
        stored = exporter.huggingface(config, base.tensors).groups
    except (ConverterError, ExportError) as error:
        yield f"quantized: {error}"
        return
    hidden = [fqn for own in base.own for fqn in own.hidden if quantizer.claims(fqn)]
    if hidden:
        yield (
            f"quantized: the model's own state_dict() stores {listed(hidden, ', ')} in another form, and the "
            "scheme quantizes weights as they are trained; leave them out of the converter"
        )
    claimed = sum(quantizer.claims(fqn) for group in stored for fqn in group.fqns)
    if claimed and not any(group.quantized for group in stored):
        yield f"quantized: none of its {claimed} weights has a shape that the scheme can store"
    tied = (exporter.transforms.hf_config or {}).get("tie_word_embeddings")
    if tied and any(TIED[1] in group.quantized for group in stored):
        yield (
            f"quantized: the output matrix is tied to {TIED[1]}, which is quantized, and was trained as it is; "
            "leave embeddings out of the converter, or untie them"
        )
