"""Any causal language model of the transformers library, trained under its own parameter names, and any other model.

Owns what LanguageModel adds to such a model: logits from tokens, initial values and buffers on demand, the list of
layers, the key table. The optional extra transformers is imported when a model is built. No code is specific
to one model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import nn

from titan_ckpt.errors import ConfigError
from titan_ckpt.geometry.keymap import KeyMap
from titan_ckpt.models.config import read_config_json, written_config
from titan_ckpt.models.hf_keys import find_key_map
from titan_ckpt.models.language_model import LanguageModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_LOADED = "_is_hf_initialized"
"""transformers' mark on tensors and modules whose values must be kept. Source: `initialization.py`."""


_EXCHANGES = (
    "model: {} exchanges modules in its first forward with sequences of {} tokens, so a resumed run would differ. Set "
    "in config.json what it changes to (BigBird: attention_type), or take another data.sequence_length"
)

_NO_CAUSAL = (
    "{} is no causal language model, which titan-ckpt train needs. Train it in transformers' Trainer "
    "(titan_ckpt.integrations.transformers.attach) or in a loop of your own: CheckpointManager loads, saves and "
    "exports any model of transformers as it is"
)


def build(source: str | Path | Mapping[str, Any], dtype: torch.dtype = torch.float32) -> HuggingFaceModel:
    """Return the model of a Hugging Face folder, or of the contents of a config.json, without the folder's weights.

    Under `torch.device("meta")` it has no values until `to_empty` and a load or `init_weights`; otherwise they are
    random. quantization_config is ignored: the weights are those of the plain model, in `dtype`. Nothing is downloaded
    and no code of the folder is run.
    Raises: ConfigError if transformers is not installed, or has no causal language model for this config.
    """
    config = transformers_config(source)
    return adopt(_made(_causal_class(config, source), config, source, dtype))


def build_named(source: str | Path | Mapping[str, Any]) -> PreTrainedModel:
    """Return the model of the class that a config names in `architectures`, whatever its task is, without weights.

    A config that names no class of transformers gives the causal language model. Raises: as `build`.
    """
    config = transformers_config(source)
    model: PreTrainedModel = _made(_named_class(config) or _causal_class(config, source), config, source, torch.float32)
    return model


def open_pretrained(folder: str | Path) -> PreTrainedModel:
    """Return the causal language model of a folder as transformers itself opens it, in float32. Raises: as `build`."""
    kind = _causal_class(transformers_config(folder), folder)
    model: PreTrainedModel = kind.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model


def names_another_class(source: str | Path | Mapping[str, Any]) -> bool:
    """Return whether `build_named` makes a model of another class than `build`. Raises: ConfigError for no config."""
    config = transformers_config(source)
    named = _named_class(config)
    with suppress(ConfigError):
        return named not in (None, _causal_class(config, source))
    return named is not None


def adopt(model: PreTrainedModel) -> HuggingFaceModel:
    """Turn a transformers model into a HuggingFaceModel in place, by swapping its class as FSDP2 does."""
    table = find_key_map(model)
    text = model.config.get_text_config()
    # the class keeps its name and module, because transformers recognises its own models by them
    base: Any = type(model)
    model.__class__ = type(base.__name__, (HuggingFaceModel, base), {"__module__": base.__module__})
    adopted = cast("HuggingFaceModel", model)
    adopted.table = table
    adopted.layers_fqn = _find_layers(adopted)
    adopted.architecture = type(model).__name__
    adopted.vocab_size = text.vocab_size
    adopted.max_seq_len = getattr(text, "max_position_embeddings", None)
    return adopted


class HuggingFaceModel(LanguageModel):
    """Base class that `adopt` puts before a model's own class, which has the members declared under TYPE_CHECKING."""

    table: KeyMap
    layers_fqn: str
    architecture: str
    has_run: bool = False

    if TYPE_CHECKING:
        config: PretrainedConfig

        def initialize_weights(self) -> None: ...

        def tie_weights(self) -> None: ...

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Shape: (batch, seq) token ids in, (batch, seq, vocab) logits out.

        Raises: ConfigError in the first call, if the model exchanges modules in it: a resume could not repeat that.
        """
        before = None if self.has_run else [*self.modules()]
        logits: torch.Tensor = super().forward(input_ids=tokens, use_cache=False).logits
        if before is not None and before != [*self.modules()]:
            raise ConfigError([_EXCHANGES.format(self.architecture, tokens.shape[-1])])
        self.has_run = True
        return logits

    @property
    def layers(self) -> nn.Module:  # type: ignore[override]  # set, it would be registered under a second name
        """Return the model's own list of blocks."""
        return self.get_submodule(self.layers_fqn)

    def init_weights(self) -> None:
        """Fill every parameter in place from the current generator, as transformers does, and recompute the buffers."""
        self.tie_weights()
        self._initialize(loaded=())

    def reset_buffers(self) -> None:
        """Recompute the buffers that no checkpoint holds, on their device."""
        temporary = {id(buffer) for buffer in _temporary_buffers(self).values()}
        values = (*self.parameters(), *self.buffers())
        self._initialize(loaded=[value for value in values if id(value) not in temporary])

    def _initialize(self, loaded: Collection[torch.Tensor]) -> None:
        """Let transformers fill everything except `loaded`, then restore the marks that existed before."""
        owners = [*self.modules(), *self.parameters(), *self.buffers()]
        before = [(owner, owner.__dict__.pop(_LOADED)) for owner in owners if _LOADED in owner.__dict__]
        try:
            for value in loaded:
                setattr(value, _LOADED, True)
            self.initialize_weights()
        finally:
            for owner in owners:
                owner.__dict__.pop(_LOADED, None)
            for owner, mark in before:
                setattr(owner, _LOADED, mark)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Move or cast like any module, but keep ties, and keep non-persistent buffers exact.

        Rotary frequencies in bfloat16 would change every logit; buffers that come from meta are garbage until they are
        recomputed.
        """
        before = _temporary_buffers(self)
        was_meta = any(value.is_meta for value in (*self.parameters(), *self.buffers()))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for fqn, buffer in before.items():
            if (moved := self.get_buffer(fqn)).dtype != buffer.dtype:
                owner, _, name = fqn.rpartition(".")
                setattr(self.get_submodule(owner), name, buffer.to(moved.device))
        if was_meta and not any(value.is_meta for value in (*self.parameters(), *self.buffers())):
            self.tie_weights()
            self.reset_buffers()
        return self

    def key_map(self) -> KeyMap:
        """Return the table between these names and the folder's names; most are equal."""
        return self.table

    def hf_config(self) -> dict[str, Any]:
        return written_config(self.config, self.architecture)


def transformers_config(source: str | Path | Mapping[str, Any]) -> PretrainedConfig:
    """Return transformers' config object for a folder, or for the contents of a config.json. Raises: ConfigError."""
    try:
        from huggingface_hub.errors import StrictDataclassError
        from transformers import CONFIG_MAPPING, AutoConfig, __version__
    except ImportError as error:
        raise ConfigError([f'model: transformers is not installed ({error}); pip install "titan-ckpt[hf]"']) from error
    where = _place(source)
    raw = dict(source) if isinstance(source, Mapping) else read_config_json(source)
    raw.pop("quantization_config", None)
    if raw.get("model_type") not in CONFIG_MAPPING:
        raise ConfigError([f"model_type: transformers {__version__} has no {raw.get('model_type')!r}"], where)
    try:
        config: PretrainedConfig = AutoConfig.for_model(raw.pop("model_type"), **raw)
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        raise ConfigError([f"transformers cannot read it: {' '.join(str(error).split())}"], where) from error
    return config


def _place(source: str | Path | Mapping[str, Any]) -> str:
    return "config" if isinstance(source, Mapping) else str(source)


def _made(kind: Any, config: PretrainedConfig, source: str | Path | Mapping[str, Any], dtype: torch.dtype) -> Any:
    if kind.config_class is config.sub_configs.get("text_config"):  # the text model in a composite one
        config = config.get_text_config()
    try:
        return kind._from_config(config, dtype=dtype)  # noqa: SLF001 - as the Auto classes do
    except ValueError as error:
        problem = f"model_type: {config.model_type!r}: {str(error).splitlines()[0]}"
        raise ConfigError([problem], _place(source)) from error


def _causal_class(config: PretrainedConfig, source: str | Path | Mapping[str, Any]) -> Any:
    """Return the class that turns tokens into logits: transformers' own choice, or the one that the config names.

    The second is that of a model which also reads images or sounds, or of a part of one. Raises: ConfigError.
    """
    import transformers

    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        known: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        kinds = known if isinstance(known, (list, tuple)) else [known]
        return next((kind for kind in kinds if kind.__name__ in (config.architectures or ())), kinds[0])
    named = _named_class(config)
    ends = ("ForCausalLM", "ForConditionalGeneration")
    is_of_text = named is not None and named.main_input_name == "input_ids" and named.__name__.endswith(ends)
    if not is_of_text or getattr(config, "is_encoder_decoder", False):
        what = "this config" if named is None else named.__name__
        raise ConfigError([f"model_type: {config.model_type!r}: {_NO_CAUSAL.format(what)}"], _place(source))
    return named


def _named_class(config: PretrainedConfig) -> Any:
    """Return the first class of transformers that a config names and that takes such a config; None without one."""
    import transformers

    for name in config.architectures or ():
        named = getattr(transformers, name, None)
        if isinstance(named, type) and getattr(named, "config_class", None) is type(config):
            return named
    return None


def _find_layers(model: nn.Module) -> str:
    """Return the fqn of the ModuleList with the most parameters. Raises: ConfigError if the model has none."""
    lists = {fqn: module for fqn, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    sizes: dict[str, int] = {fqn: sum(p.numel() for p in module.parameters()) for fqn, module in lists.items()}
    if not sizes:
        raise ConfigError([f"{type(model).__name__} has no list of layers, so it cannot be sharded layer by layer"])
    return max(sizes, key=sizes.__getitem__)


def _temporary_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the floating-point buffers that no checkpoint holds, by fqn."""
    kept = model.state_dict().keys()
    return {fqn: buffer for fqn, buffer in model.named_buffers() if fqn not in kept and buffer.is_floating_point()}
