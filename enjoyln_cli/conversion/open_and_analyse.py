"""Opens and analyses a model before anything is folded, and makes its report.

Decides what ``analyze`` accepts: a Hub id, a directory, a configuration or a live module. The
analysis reads the configuration, and in a directory the headers of the weight files: they say which
class is stored there.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from enjoyln_cli.analysis.suggest import suggestions
from enjoyln_cli.checkpoint.config import (
    load_config,
    require_in_transformers,
    require_no_code,
    require_unfolded,
)
from enjoyln_cli.checkpoint.open_options import OPENED_PLAINLY, OpenOptions
from enjoyln_cli.checkpoint.reader import Checkpoint, open_checkpoint
from enjoyln_cli.checkpoint.source import open_source
from enjoyln_cli.errors import BadCheckpoint, EnjoyLNError, UnsupportedModel
from enjoyln_cli.models.holders import holds_a_model, models_in
from enjoyln_cli.plan.fold_options import CENTRING_ONLY, FOLD_DEFAULTS, FoldOptions, Options
from enjoyln_cli.plan.option_field import keywords_of
from enjoyln_cli.report.model_report import ModelReport

if TYPE_CHECKING:
    from transformers import Pipeline, PretrainedConfig

    from enjoyln_cli.analysis.analyze import Analysis
    from enjoyln_cli.calls.calls import ExampleCalls


@dataclass(frozen=True)
class AnalysedModel:
    """The analysis of one model for ``enjoyln report``."""

    name: str
    config: PretrainedConfig
    analysis: Analysis
    options: Options = CENTRING_ONLY

    def report(self, paper: bool = False) -> ModelReport:
        """The report; on request with the norms that the paper's algorithm would convert."""
        return ModelReport(
            self.name,
            self.analysis.plan,
            self.analysis.paper if paper else None,
            self.analysis.gains(),
            suggestions(self.analysis, self.options),
        )


@keywords_of(opening=OpenOptions)
def analyze(
    model: str | Path | PretrainedConfig | torch.nn.Module | Pipeline,
    *example_inputs: Any,
    opening: OpenOptions,
    model_class: str | None = None,
    outputs: str | Sequence[str] = (),
    options: Options = CENTRING_ONLY,
    example_calls: ExampleCalls = (),
    **example_keywords: Any,
) -> Analysis:
    """Which LayerNorms of ``model`` can become RMSNorm, and why the others cannot.

    * ``model`` is a Hub id, a directory, a configuration, or any live module together with the
      inputs of one call. No weights are downloaded; of a directory, only the headers of its weight
      files are read. For a pipeline or a sentence-transformers model, the model inside is analysed.
    * ``example_calls`` are further calls that have to be proven, each as a pair ``(args, kwargs)``.
      A converted model whose code is not from transformers refuses calls that differ from these.
    * ``outputs`` are the fields of the model's output that have to stay the same, as names or
      patterns (``vision_model_output.pooler_output``, ``logits_*``); all of them by default.
    * ``options`` allow more changes than centring.

    Raises ``EnjoyLNError``. The other keywords:
    """
    from enjoyln_cli.analysis.analyze import analyze_config, analyze_module
    from enjoyln_cli.models.outputs import as_names

    outputs = as_names(outputs)
    if holds_a_model(model):
        model = _only_model_in(model)
    if isinstance(model, torch.nn.Module):
        return analyze_module(
            model,
            *example_inputs,
            outputs=outputs,
            options=options,
            example_calls=example_calls,
            **example_keywords,
        )
    if example_inputs or example_keywords:
        raise EnjoyLNError(
            "example inputs are for a torch.nn.Module in memory; pass example_calls for this"
        )
    config: Any = model
    checkpoint = None
    if isinstance(model, (str, Path)):
        config, checkpoint = _opened(str(model), opening)
    elif not opening.trust_remote_code:
        require_no_code(config, f"this {type(config).__name__}")
    return analyze_config(
        config,
        model_class=model_class,
        checkpoint=checkpoint,
        outputs=outputs,
        options=options,
        example_calls=example_calls,
    )


def _opened(model: str, opening: OpenOptions) -> tuple[PretrainedConfig, Checkpoint | None]:
    """The configuration of ``model``, and of a local directory the tensors in its files' headers.

    There is no checkpoint on the Hub, and for a directory whose weights are not there or cannot be
    read.
    """
    source = open_source(model, opening)
    config = load_config(source, opening.trust_remote_code)
    with suppress(BadCheckpoint, UnsupportedModel):
        return config, None if source.cached else open_checkpoint(source)
    return config, None


def _only_model_in(holder: Any) -> torch.nn.Module:
    models = models_in(holder)
    if len(models) > 1:
        names = ", ".join(type(model).__name__ for model in models)
        raise UnsupportedModel(
            f"{type(holder).__name__} holds {len(models)} models ({names}); pass one of them"
        )
    return models[0]


def open_and_analyse(
    name: str,
    opening: OpenOptions = OPENED_PLAINLY,
    folding: FoldOptions = FOLD_DEFAULTS,
    *,
    is_type: bool = False,
) -> AnalysedModel:
    """Analyse the model ``name``, or with ``is_type`` that model type's default configuration."""
    from enjoyln_cli.analysis.analyze import analyze_config

    checkpoint = None
    if is_type:
        config = default_config(name)
    else:
        config, checkpoint = _opened(name, opening)
        require_unfolded(config, name)
    analysis = analyze_config(
        config,
        model_class=folding.model_class,
        checkpoint=checkpoint,
        outputs=folding.outputs,
        options=folding.options,
    )
    return AnalysedModel(name, config, analysis, folding.options)


def default_config(model_type: str) -> PretrainedConfig:
    """The default configuration of ``model_type`` in transformers.

    Raises ``UnsupportedModel`` for an unknown type, and suggests similar names.
    """
    from transformers import CONFIG_MAPPING

    require_in_transformers(model_type)
    return CONFIG_MAPPING[model_type]()


def mappings_text(
    name: str,
    opening: OpenOptions,
    folding: FoldOptions,
    format_name: Literal["llm-compressor", "json"],
    *,
    is_type: bool = False,
) -> str:
    """Which layers read each norm of a model, as recipes of llm-compressor take it, or as JSON."""
    from enjoyln_cli.report.quantiser_mappings import llm_compressor_text, mappings_json

    fusing = Options(fold=False, rotate=True, merge="affine", untie=True)
    try:
        analysed = open_and_analyse(
            name, opening, replace(folding, options=fusing), is_type=is_type
        )
    except UnsupportedModel:  # tied weights stay tied
        fusing = replace(fusing, untie=False)
        analysed = open_and_analyse(
            name, opening, replace(folding, options=fusing), is_type=is_type
        )
    plan = analysed.analysis.plan
    if format_name == "json":
        return mappings_json(plan)
    return llm_compressor_text(plan, analysed.analysis.family.reference.model)
