"""A model that is opened once, for all that is done with it: analysed, edited, loaded, compared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from enjoyln_cli.analysis.stored_class import class_of
from enjoyln_cli.analysis.stored_names import StoredClass
from enjoyln_cli.checkpoint.config import load_config, require_unfolded
from enjoyln_cli.checkpoint.open_options import OPENED_PLAINLY, OpenOptions
from enjoyln_cli.checkpoint.reader import Checkpoint, open_checkpoint
from enjoyln_cli.checkpoint.source import Source, open_source
from enjoyln_cli.models.classes import classes_for
from enjoyln_cli.models.load import class_in, load
from enjoyln_cli.models.offload import Offload
from enjoyln_cli.models.outputs import config_returning
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.rewrite.in_memory import centre_parameters

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class OpenedModel:
    """A model with its config and its stored tensors."""

    config: PretrainedConfig
    checkpoint: Checkpoint
    trust_remote_code: bool = False
    """Whether code that comes with the model may run."""
    model_class: str = ""
    """The class to load it as (see ``as_class``)."""

    @property
    def source(self) -> Source:
        """Where the model comes from."""
        return self.checkpoint.source

    @property
    def cls(self) -> Any:
        """The class ``model_class``, of the code that comes with the model or of transformers."""
        return class_in(self.source.path, self.model_class, self.config, self.trust_remote_code)

    @property
    def stored_class(self) -> StoredClass:
        """The class that the stored tensors belong to, with a model of it without weights.

        Raises ``BadCheckpoint`` if they fill no class.
        """
        return class_of(classes_for(self.config), self.config, self.checkpoint)

    def as_class(self, name: str) -> OpenedModel:
        """The same model, to be loaded as the class ``name``."""
        return replace(self, model_class=name)

    def returning(self, outputs: tuple[str, ...]) -> OpenedModel:
        """The same model with a config for which it returns ``outputs``."""
        return replace(self, config=config_returning(self.config, outputs))

    def load(
        self,
        dtype: torch.dtype,
        plan: Plan | None = None,
        offload: Offload | None = None,
        missing: set[str] | None = None,
    ) -> Any:
        """Load it in eval mode on the CPU, edited by ``plan`` (see ``models.load.load``)."""
        model = load(self.source.path, self.cls, self.config, dtype, offload, missing)
        if plan is not None:
            centre_parameters(model, plan)
        return model


def open_model(
    model: str,
    opening: OpenOptions = OPENED_PLAINLY,
    *,
    unfolded: bool = False,
    may_be_rotated: bool = False,
) -> OpenedModel:
    """Open ``model``, a directory or a Hub id, with its weights.

    Raises as ``open_source``, ``load_config`` and ``open_checkpoint`` do. With ``unfolded``, the
    result of a conversion is refused with ``AlreadyFolded``, except of a rotation if it
    ``may_be_rotated``. A model whose config is refused is refused before its weights are
    downloaded.
    """
    source = open_source(model, opening)
    config = load_config(source, opening.trust_remote_code)
    if unfolded:
        require_unfolded(config, source.model, may_be_rotated=may_be_rotated)
    if source.cached:
        from enjoyln_cli.checkpoint.download import snapshot  # imports huggingface_hub

        snapshot(model, replace(opening, revision=source.revision), weights=True)
    return OpenedModel(config, open_checkpoint(source), opening.trust_remote_code)
