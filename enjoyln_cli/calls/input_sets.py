"""Find the inputs of a transformers model, from its ``forward`` and its config.

The functions here decide which inputs belong together in one call, the most likely first. Inputs
are described by ``InputSpec``; tensors are made from these elsewhere (``calls``).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import product
from typing import Any

from enjoyln_cli.calls.input_makers import MAKERS
from enjoyln_cli.calls.input_spec import Inputs, InputSpec, ones, vocabulary
from enjoyln_cli.errors import UnsupportedModel


def accepted_by(model: Any) -> frozenset[str]:
    """The names of the arguments of ``forward``."""
    return frozenset(inspect.signature(model.forward).parameters)


def main_inputs(model: Any, rows: int, tokens: int) -> Iterator[Inputs]:
    """Alternative inputs for one call of ``model``, the most likely first.

    They contain the model's main inputs, all other arguments that ``forward`` requires, and one
    input of each other modality for which the config has a sub-config. Raises ``UnsupportedModel``
    if a required input is of an unknown kind.
    """
    accepted = accepted_by(model)
    main = getattr(model, "main_input_name", "input_ids")
    mains, required = [main] if isinstance(main, str) else list(main), _required(model)
    read = [name for name in mains if name in accepted or not required]
    if "input_ids" in accepted and accepted.isdisjoint(read) and MAKERS.keys() & {*read}:
        read = ["input_ids"]  # a submodel that has the main_input_name of the whole model
    needed = dict.fromkeys(read + required)
    others = [name for name in _PARTS if name not in needed and _has_part(model, name, accepted)]
    others += [name for name in accepted if name not in needed and _kin(model, name)]
    for more in dict.fromkeys((tuple(others), *((other,) for other in others), ())):
        for bundle in product(
            *(_input_sets(model, name, rows, tokens) for name in (*needed, *more))
        ):
            given: Inputs = {}
            for part in bundle:
                given |= part
            if "decoder_input_ids" in accepted:
                given["decoder_input_ids"] = InputSpec((rows, tokens), vocabulary(model.config))
            yield given


def one_modality(model: Any, given: Inputs, rows: int, tokens: int) -> Iterator[Inputs]:
    """The inputs of each modality alone, if ``given`` has several besides text."""
    kinds = [name for name in given if name in _PARTS and name != "input_ids"]
    for name in kinds if len(kinds) > 1 else ():
        input_sets = _input_sets(model, name, rows, tokens)
        yield next(inputs for inputs in input_sets if inputs.items() <= given.items())


def spoken_inputs(model: Any, rows: int, tokens: int) -> Iterator[Inputs]:
    """Audio inputs alone, for a text model whose config has a sub-config for audio."""
    if _has_part(model, "input_features", accepted_by(model)):
        yield from _input_sets(model, "input_features", rows, tokens)


def further_inputs(model: Any, given: Inputs, rows: int, tokens: int) -> Iterator[Inputs]:
    """Further optional inputs of ``forward``, one kind at a time, with all alternatives of each."""
    for name in ("pixel_values_videos", "input_boxes", "input_masks", "tile_fine_mask"):
        if name in accepted_by(model) and name not in given:
            yield from _input_sets(model, name, rows, tokens)


def _required(model: Any) -> list[str]:
    parameters = inspect.signature(model.forward).parameters.values()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]


def _input_sets(model: Any, name: str, rows: int, tokens: int) -> list[Inputs]:
    """Alternatives for the input ``name``, each with the inputs that belong to it."""
    accepted = accepted_by(model)
    if name not in MAKERS and (kin := _kin(model, name)):
        return _forms_of_kin(name, *kin, accepted, rows, tokens)
    if name in _COMPANIONS and name not in MAKERS:
        return [{}]  # included with another input
    if name not in MAKERS:
        raise UnsupportedModel(
            f"{type(model).__name__} takes {name}, which cannot be made up. "
            "Pass example inputs to analyze() in Python"
        )
    made = list(MAKERS[name](model.config, rows, tokens))
    found = [inputs for inputs in made if inputs.keys() <= accepted]
    if name not in accepted:  # forward passes its keyword arguments on
        found = [inputs for inputs in made if inputs.keys() == {name}]
    required = {n for n in _required(model) if n in _COMPANIONS and n not in MAKERS}
    with_all = [inputs for inputs in found if required <= inputs.keys()]
    return with_all if any(required & inputs.keys() for inputs in found) else found


def _kin(model: Any, name: str) -> tuple[str, Any] | None:
    """For an input of a second tower: the similar known input, and the config of that tower.

    Example: ``high_res_pixel_values`` are ``pixel_values`` for the tower that
    ``high_res_vision_config`` describes.
    """
    for known in ("pixel_values", "input_features", "input_ids"):
        kind = name.removesuffix(known)
        if kind.endswith("_") and kind != name:
            parts = (part for key, part in vars(model.config).items() if key.startswith(kind))
            part = next((part for part in parts if hasattr(part, "to_dict")), None)
            return (known, part) if part is not None and kind != "decoder_" else None
    return None


def _forms_of_kin(
    name: str, known: str, part: Any, accepted: frozenset[str], rows: int, tokens: int
) -> list[Inputs]:
    input_sets = [
        inputs[known] for inputs in MAKERS[known](part, rows, tokens) if inputs.keys() == {known}
    ]
    mask = name.replace("input_ids", "attention_mask")
    masked = {mask: ones(rows, tokens)} if mask != name and mask in accepted else {}
    return [{name: inputs, **masked} for inputs in input_sets]


def _has_part(model: Any, name: str, accepted: frozenset[str]) -> bool:
    configs = (model.config, getattr(model.config, "encoder", None))
    return name in accepted and any(hasattr(c, part) for c in configs for part in _PARTS[name])


_PARTS: dict[str, tuple[str, ...]] = {
    "input_ids": ("text_config",),
    "pixel_values": (
        "vision_config", "image_config", "vq_config", "vit_config", "image_size", "patch_size",
        "backbone_config",
    ),
    "input_features": (
        "audio_config", "audio_encoder_config", "encoder_config", "speech_config",
        "feature_projection_input_dim",
    ),
    "image_pixel_values": ("vision_config",),
    "audio_input_features": ("audio_config",),
}  # fmt: skip
_COMPANIONS = frozenset({
    "grid_thw", "image_grid_thw", "image_grid_hw", "pixel_attention_mask", "spatial_shapes",
    "image_sizes", "merge_sizes", "input_features_mask", "audio_mel_mask", "past_time_features",
    "past_observed_mask", "target_sizes", "image_merge_sizes", "future_time_features",
    "entity_position_ids", "prompt_pixel_values", "prompt_masks", "past_values_padding", "freq",
    "chunk_sample_lengths",
})  # fmt: skip

CHOOSING = frozenset({"use_cache", "return_dict", "output_attentions", "output_hidden_states"})
"""Switches that choose what is returned, by transformers' own convention."""
_CONVENTIONAL = CHOOSING | {
    "class_labels", "end_positions", "interpolate_pos_encoding", "labels", "logits_to_keep",
    "mask_labels", "mc_labels", "next_sentence_label", "output_router_logits", "return_loss",
    "sentence_order_label", "start_positions",
}  # fmt: skip
"""Inputs that do not change the other outputs of a transformers class: labels are used after the
outputs are computed, or shifted into the decoder's ids, and switches choose what is returned."""


def optional_inputs(model: Any) -> list[str]:
    """Inputs of ``forward`` that can change the computation: all but labels and known switches.

    This relies on the names of arguments, so it holds for transformers' own classes only; see
    ``plan.covered_calls`` for others.
    """
    accepted = inspect.signature(model.forward).parameters.values()
    return [
        parameter.name
        for parameter in accepted
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and parameter.name not in _CONVENTIONAL
    ]
