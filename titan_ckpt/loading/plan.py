"""The plan of a load, decided before anything is read: pure, printable, the same on every rank.

Owns the precedence of sources. Reads nothing; the caller passes the facts about the directory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from titan_ckpt.config import CheckpointConfig, InitialLoadConfig
from titan_ckpt.directory.manifest import Kind
from titan_ckpt.errors import CheckpointNotFoundError
from titan_ckpt.stores.store import Place
from titan_ckpt.types import Format


@dataclass(frozen=True, slots=True)
class ResumeStep:
    """The facts about a committed step of the run's own folder that planning needs."""

    step: int
    kind: Kind
    path: Place


@dataclass(frozen=True, slots=True)
class LoadSource:
    """One folder to read model weights from."""

    path: Place
    format: Format
    cast: bool = False
    revision: str | None = None
    adapter: bool = False
    """The folder holds converter-owned keys only."""
    merge: bool = False
    """The folder is an adapter to be merged into the base."""
    initialize: tuple[str, ...] = ()
    """Patterns of the model's tensors that are not loaded from it."""
    ignore: tuple[str, ...] = ()
    """Patterns of its tensors that are not used."""
    base_only: bool = False
    """Tensors of converters in the folder are passed by, because an adapter-only step has newer ones."""
    prefix: str | None = None
    """Prefix of the model's names in a DCP folder; None: found from the names."""

    def __str__(self) -> str:
        what = "adapter" if self.adapter else "adapter to be merged" if self.merge else "weights"
        return f"{what} from {self.path} ({self.format}{', cast' if self.cast else ''})"


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The sources of weights and, when resuming, of training state."""

    resume: ResumeStep | None = None
    sources: tuple[LoadSource, ...] = ()
    exclude: frozenset[str] = frozenset()
    external: bool = False
    """Weights come from outside."""

    @property
    def title(self) -> str:
        """Return what is loaded, in a few words."""
        if self.resume:
            return f"step {self.resume.step}"
        return "the initial sources" if self.sources or self.external else "initial values"

    @property
    def has_new_weights(self) -> bool:
        """Return whether the weights of a resume are those of the initial sources."""
        return self.resume is not None and "model" in self.exclude and bool(self.sources)

    def __str__(self) -> str:
        afresh = "start from step 0: no checkpoint, no initial source"
        starts = "initial load" if self.sources or self.external else afresh
        head = f"resume step {self.resume.step}" if self.resume else starts
        lines = [head, *(f"  {i}. {source}" for i, source in enumerate(self.sources, 1))]
        if self.external:
            lines.append("  weights from outside")
        if self.exclude:
            lines.append(f"  not loaded: {', '.join(sorted(self.exclude))}")
        return "\n".join(lines)


def resolve(
    config: CheckpointConfig,
    step: ResumeStep | None,
    describe: Callable[[InitialLoadConfig], tuple[Place, Format, bool]],
) -> LoadPlan:
    """Return the plan. A committed step wins over initial sources; an adapter-only step also needs its base.

    If a resume excludes the model, its weights come from the initial sources, as in a new run.

    `describe` returns the place of an initial source, its format, and whether it is an adapter.
    Raises: CheckpointNotFoundError for a step whose weights are not on disk.
    """
    exclude = frozenset(config.resume.exclude) | config.left_out()
    if config.external:
        return LoadPlan(step, (), exclude, external=True)
    if step is not None and step.kind == "external" and "model" not in exclude:
        raise CheckpointNotFoundError(
            f'{step.path} holds no model weights: its run took them from outside. Leave "model" out of '
            "checkpoint.components and give the manager external_weights, or choose another folder"
        )
    initial = []
    if step is None or step.kind == "adapter" or "model" in exclude:
        for source in config.initial_load:
            path, format_, adapter = describe(source)
            merge = source.load == "merge"
            initial.append(
                LoadSource(
                    path, format_, source.cast, source.revision, adapter and not merge, merge,
                    source.initialize, source.ignore, prefix=source.prefix,
                )
            )  # fmt: skip
    if step is None:
        return LoadPlan(None, tuple(initial), config.left_out())
    if "model" in exclude:
        return LoadPlan(step, tuple(initial), exclude)
    own = LoadSource(step.path, "native", adapter=step.kind == "adapter")
    bases = tuple(replace(source, base_only=True) for source in initial if not source.adapter)
    if step.kind == "adapter" and not bases:
        raise CheckpointNotFoundError(
            f"{step.path} holds only adapter weights, and no base is configured: name the base it was trained on in "
            "[[checkpoint.initial_load]]"
        )
    return LoadPlan(step, (*bases, own), exclude)
