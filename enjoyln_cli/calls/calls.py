"""Choose the calls of a model that a proof has to cover.

A proof only covers traced paths. So every class is called as it is used in practice: a prefill and
a decoding step with the cache, in one graph, and more calls with the optional inputs that it
accepts.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from enjoyln_cli.calls.input_makers import MAKERS
from enjoyln_cli.calls.input_sets import (
    CHOOSING,
    accepted_by,
    further_inputs,
    main_inputs,
    one_modality,
    optional_inputs,
    spoken_inputs,
)
from enjoyln_cli.calls.input_spec import (
    Inputs,
    InputSpec,
    hidden_size,
    image_size,
    ones,
    patch_size,
    positions,
    whole_numbers,
    with_parts,
)
from enjoyln_cli.errors import EnjoyLNError, UnsupportedModel
from enjoyln_cli.models.classes import dtype_of
from enjoyln_cli.models.meta_device import meta_weights, without_weights
from enjoyln_cli.models.outputs import tensors_in
from enjoyln_cli.plan.cache_argument import cache_argument
from enjoyln_cli.plan.trusted_code import is_stock

BATCH, TOKENS = 2, 7
MAX_ELEMENTS = 1 << 30
"""Maximum elements of an example input. Inputs of today's models have at most a hundredth of it."""


@dataclass(frozen=True)
class Call:
    """One way to call a model: ``steps`` run in order, each with the cache of the step before."""

    label: str
    steps: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...]
    flags: dict[str, Any] = field(default_factory=dict)
    required: bool = True
    cache: Any = None
    """The ``past_key_values`` of the first step: an empty cache, or ``None``."""
    training: bool = False
    """Whether the model is in training mode."""


ExampleCalls = Sequence[tuple[Sequence[Any], Mapping[str, Any]]]
"""Example calls from the user: positional arguments and keyword arguments of each."""


def calls_like(examples: ExampleCalls) -> list[Call]:
    """The user's example calls as ``Call`` objects.

    Raises ``EnjoyLNError`` if a call is malformed.
    """
    found = []
    for number, example in enumerate(examples, 1):
        pair = isinstance(example, tuple | list) and len(example) == 2
        if not (pair and isinstance(example[0], tuple | list) and isinstance(example[1], Mapping)):
            raise EnjoyLNError(
                f"example_calls: number {number} is not a pair of positional arguments and "
                "keywords; write it as ((x,), {'mask': mask})"
            )
        args, kwargs = example
        found.append(Call(f"example call {number}", ((tuple(args), dict(kwargs)),)))
    return found


def ways_to_call(model: Any) -> Iterator[list[Call]]:
    """Alternatives for the calls that a proof has to cover, the most likely inputs first.

    A classifier without a padding token accepts only one row at a time, so calls with a single row
    come last. Raises ``UnsupportedModel`` if no example inputs can be derived from the config.
    """
    try:
        for rows in (BATCH, 1):
            for given in input_sets(model, rows, TOKENS):
                main, optional = main_call(model, given), list(_optional_calls(model, given, rows))
                yield [main, *optional]
                if len(main.steps) > 1:  # the second step may fail in a model with its own cache
                    yield [replace(main, label="one step", steps=main.steps[:1]), *optional]
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # from an unusual config
        raise UnsupportedModel(
            f"no example inputs for {type(model).__name__} can be derived from its config "
            f"({error}); pass example inputs to analyze() in Python"
        ) from error


def input_sets(model: Any, rows: int, tokens: int) -> Iterator[Inputs]:
    """Alternative inputs for ``model``, the most likely first, with ``tokens`` tokens of text."""
    return (_with_placeholders(model, given) for given in main_inputs(model, rows, tokens))


def _with_placeholders(model: Any, given: Inputs) -> Inputs:
    """``given`` with a placeholder token for each image, video or audio feature.

    Multimodal models replace these tokens by the features that ``get_image_features`` returns.
    """
    if "input_ids" not in given:
        return given
    leading: tuple[int, ...] = ()
    rows, tokens = given["input_ids"].shape[:2]
    for kind in ("image", "video", "audio"):
        token = _placeholder(model, kind)
        if token is not None:
            leading += (token,) * _features(model, kind, token, given, rows)
    if not leading:
        return given
    length = tokens + len(leading) if len(leading) > 1 else tokens
    ids = replace(given["input_ids"], shape=(rows, length), leading=leading)
    places, accepted = InputSpec(ids.shape, 1, (1,) * len(leading)), accepted_by(model)
    named = ("image_embeds_position_mask", "mm_token_type_ids")
    added = {name: places for name in named if name in accepted}
    if "position_ids" in given:
        added["position_ids"] = positions(rows, length)
    return given | {"input_ids": ids} | added


def _placeholder(model: Any, kind: str) -> int | None:
    """The placeholder token for features of one modality; ``None`` if the config names no token."""
    owners = with_parts([model.config])
    ids = (getattr(c, f"{kind}_token_{end}", None) for c in owners for end in ("id", "index"))
    marked = 0 if f"{kind}_embeds_position_mask" in accepted_by(model) else None
    return next((value for value in ids if isinstance(value, int)), marked)


_COUNT_IN_ERROR = re.compile(
    r"do not match, tokens: \d+, features:? (\d+)|value tensor of shape \[(\d+)"
)
"""The number of features in error messages of models, and of torch, about placeholder tokens."""
_INPUT_OF = {"image": "pixel_values", "video": "pixel_values_videos", "audio": "input_features"}


def _features(model: Any, kind: str, token: int, given: Inputs, rows: int) -> int:
    """How many feature vectors the inputs of one modality become in each row of tokens."""
    bare = without_weights(model)
    owners = list(bare.modules())[::-1]  # innermost first: outer modules only pass arguments on
    found_by = (getattr(owner, f"get_{kind}_features", None) for owner in owners)
    encode = next((method for method in found_by if method is not None), None)
    own = {name: spec for name, spec in given.items() if name.startswith(f"{kind}_")}
    if encode is None and own.keys().isdisjoint(MAKERS):
        # such models put the features in place of one token, or the config has their number
        return int(getattr(model.config, "latent_query_num", 1)) if _INPUT_OF[kind] in given else 0
    by_error = encode is None  # with one placeholder, the model's error says how many it needs
    if encode is None:
        encode = bare.forward
        given = own | {"input_ids": InputSpec((rows, 1), token + 1, (token,))}
    parameters = inspect.signature(encode).parameters
    names = given.keys() & parameters.keys()
    if not names:
        return 0
    unknown = (n for n, p in parameters.items() if p.default is p.empty and p.kind <= 1)
    examples: dict[str, Any] = dict.fromkeys(unknown)
    examples |= {name: example(model, given[name]) for name in names}
    try:
        with torch.no_grad(), meta_weights():
            found = encode(**examples)
    except Exception as error:  # most often because the model needs other inputs
        count = _COUNT_IN_ERROR.search(str(error))
        return int(count[count.lastindex or 0]) // rows if count else 0
    if by_error:
        return 1
    pooled = getattr(found, "pooler_output", None)
    if pooled is None and (deep := getattr(found, "deepstack_features", None)):
        pooled = deep[0]  # every layer has the same number
    vectors = tensors_in(found if pooled is None else pooled)
    grid = given["image_grid_thw"].leading[1:] if "image_grid_thw" in given else None
    shapes = [  # some models return channels first
        vector.shape[::-1] if vector.shape[1:] == grid else vector.shape for vector in vectors
    ]
    return sum(math.prod(shape[:-1]) for shape in shapes) // rows


def main_call(model: Any, given: Inputs) -> Call:
    """One call with ``given``, or a prefill and a decoding step if the model keeps a cache."""
    reads_text = "input_ids" in given or "decoder_input_ids" in given
    if not (reads_text and keeps_cache(model)):
        kinds = {"input_ids": "tokens", "pixel_values": "images", "input_features": "audio"}
        label = next((kinds[name] for name in given if name in kinds), next(iter(given)))
        return Call(label, (_step(model, given, 0),))
    following = dict(given)
    advancing = "decoder_input_ids" if "decoder_input_ids" in given else "input_ids"
    rows, seen, *books = given[advancing].shape
    following[advancing] = InputSpec((rows, 1, *books), given[advancing].below)
    if advancing == "input_ids":  # images and audio are read in the first step only
        following = {n: s for n, s in following.items() if n == "input_ids" or "encoder_" in n}
    steps = (_step(model, given, 0), _step(model, following, seen))
    # without an argument of its own for it, such a class hands the flag to its encoder as well
    by_config = "use_cache" not in accepted_by(model) and "decoder_input_ids" in given
    flags = {} if by_config and is_stock(model) else {"use_cache": True}
    return Call("prefill and decode", steps, flags)


def keeps_cache(model: Any) -> bool:
    """Whether a call can return a cache that the next call takes."""
    parameters = inspect.signature(model.forward).parameters
    any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    takes = cache_argument(model.forward) is not None
    return takes and ("use_cache" in parameters or any_keyword)


def _step(model: Any, given: Inputs, seen: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of one call, with an attention mask if the model takes a mask.

    The mask covers the tokens of this call and, in a decoder-only model, ``seen`` earlier tokens.
    """
    inputs = {name: example(model, spec) for name, spec in given.items()}
    if "input_ids" in given and "attention_mask" in accepted_by(model) - given.keys():
        rows, tokens = given["input_ids"].shape[:2]
        before = 0 if "decoder_input_ids" in given else seen
        inputs["attention_mask"] = example(model, ones(rows, tokens + before))
    return (), inputs


def example(model: nn.Module, spec: InputSpec) -> torch.Tensor:
    """An input with seeded random values; floats have the dtype of ``model``.

    Raises ``UnsupportedModel`` if the input would be too large.
    """
    if math.prod(spec.shape) > MAX_ELEMENTS:
        raise UnsupportedModel(
            f"{type(model).__name__} needs an input of shape {list(spec.shape)}, which is too "
            "large for an example; correct the sizes in the config"
        )
    if spec.below is None:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(spec.shape, generator=generator).to(dtype_of(model))
    return whole_numbers(spec)


def activations(model: nn.Module, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor in place of activations that another model computed; it has no values."""
    return torch.zeros(shape, dtype=dtype_of(model), device="meta")


def _optional_calls(model: Any, given: Inputs, rows: int) -> Iterator[Call]:
    read = next((name for name in ("decoder_input_ids", "input_ids") if name in given), None)
    if read and "encoder_outputs" in accepted_by(model):
        yield from _decoder_alone(model, read, given[read], rows)
    if "input_ids" in given:
        if given.keys() - {"input_ids", "decoder_input_ids", "mm_token_type_ids"}:
            alone: Inputs = {"input_ids": InputSpec((rows, TOKENS), given["input_ids"].below)}
            if "decoder_input_ids" in given:
                alone["decoder_input_ids"] = given["decoder_input_ids"]
            yield replace(main_call(model, alone), label="text alone", required=False)
        for inputs in one_modality(model, given, rows, TOKENS):
            call = main_call(model, _beside_text(model, given, inputs, rows))
            yield replace(call, label=f"{next(iter(inputs))} alone", required=False)
        yield from _optional_text(model, given, rows)
        yield from _cross_attention(model, given, rows)
        yield from _spoken(model, given)
    if "pixel_values" in given:
        yield from _further(model, given, rows)
    if set(given) == {"pixel_values"} and len(given["pixel_values"].shape) == 4:
        yield from _optional_images(model, given["pixel_values"])
    yield from _switched(model, given)


def _spoken(model: Any, given: Inputs) -> Iterator[Call]:
    """Calls with audio instead of text, if a model takes either of the two."""
    for inputs in spoken_inputs(model, *given["input_ids"].shape[:2]):
        if inputs.keys().isdisjoint(given):
            with_decoder = {n: s for n, s in given.items() if n == "decoder_input_ids"}
            call = main_call(model, inputs | with_decoder)
            yield replace(call, label=f"{next(iter(inputs))} alone", required=False)


def _further(model: Any, given: Inputs, rows: int) -> Iterator[Call]:
    """Calls with a video instead of images, and with prompts for a segmentation of the images."""
    for more in further_inputs(model, given, rows, TOKENS):
        video = "pixel_values_videos" in more
        if video and "input_ids" not in given:
            continue
        inputs = more if video else given | more
        call = main_call(model, _beside_text(model, given, inputs, rows))
        yield replace(call, label=f"with {next(iter(more))}", required=False)


def _beside_text(model: Any, given: Inputs, inputs: Inputs, rows: int) -> Inputs:
    """``inputs`` with text if ``given`` has any, and with placeholder tokens for ``inputs``."""
    if "input_ids" not in given:
        return inputs
    text = replace(given["input_ids"], shape=(rows, TOKENS), leading=())
    return _with_placeholders(model, inputs | {"input_ids": text})


def _switched(model: Any, given: Inputs) -> Iterator[Call]:
    """One call for each boolean argument of ``forward``, with the opposite of its default."""
    defaults = {n: p.default for n, p in inspect.signature(model.forward).parameters.items()}
    names = [n for n in optional_inputs(model) if not n.startswith(("output_", "return_"))]
    if not is_stock(model):  # argument names say nothing about custom code
        names = [name for name in defaults if name not in CHOOSING]
    for name in names:
        if isinstance(default := defaults[name], bool):
            call = main_call(model, given)
            flags = call.flags | {name: not default}
            yield replace(call, label=f"{name}={not default}", flags=flags, required=False)


def _decoder_alone(model: Any, read: str, ids: InputSpec, rows: int) -> Iterator[Call]:
    """Calls with ``encoder_outputs``, as in ``generate``, which runs the encoder once before."""
    encoded = {"encoder_outputs": (activations(model, _encoded(model, rows).shape),)}
    steps = tuple(
        ((), {read: example(model, InputSpec((rows, tokens), ids.below)), **encoded})
        for tokens in (TOKENS, 1)
    )
    caches = keeps_cache(model)
    flags = {"use_cache": True} if caches else {}
    yield Call("decoder alone", steps if caches else steps[:1], flags, required=False)


def _optional_text(model: Any, given: Inputs, rows: int) -> Iterator[Call]:
    accepted = accepted_by(model)
    ids = example(model, InputSpec((rows, given["input_ids"].shape[1]), 2))
    optional = [name for name in ("token_type_ids", "position_ids") if name in accepted]
    inputs: dict[str, Any] = {**_step(model, given, 0)[1], **dict.fromkeys(optional, ids)}
    table = input_embeddings(model)
    if "inputs_embeds" in accepted and table is not None:
        width = int(getattr(table, "embedding_dim", table.weight.shape[-1]))
        inputs["inputs_embeds"] = activations(model, (*ids.shape, width))
        inputs.pop("input_ids")
    elif not optional:
        return
    flags = {"use_cache": False} if keeps_cache(model) else {}
    yield Call("optional inputs", (((), inputs),), flags, required=False)


def _cross_attention(model: Any, given: Inputs, rows: int) -> Iterator[Call]:
    """Calls as a decoder with cross-attention to the output of a separate encoder."""
    accepted = accepted_by(model)
    if "encoder_hidden_states" in accepted:
        inputs = {"input_ids": given["input_ids"], "encoder_hidden_states": _encoded(model, rows)}
        if "encoder_attention_mask" in accepted:
            inputs["encoder_attention_mask"] = ones(rows, TOKENS)
        yield replace(main_call(model, inputs), label="cross attention", required=False)


def _encoded(model: Any, rows: int) -> InputSpec:
    """The output of an encoder for the decoder of ``model``."""
    config = model.config.get_text_config(decoder=True)
    width = getattr(config, "cross_attention_hidden_size", None) or hidden_size(config)
    return InputSpec((rows, TOKENS, width))


def input_embeddings(model: Any) -> Any:
    """The token embedding of ``model``; ``None`` if ``get_input_embeddings`` has none."""
    try:
        table = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        return None
    return table if isinstance(getattr(table, "weight", None), torch.Tensor) else None


def _optional_images(model: Any, pixels: InputSpec) -> Iterator[Call]:
    accepted, plain = accepted_by(model), {"pixel_values": example(model, pixels)}
    rows, channels = pixels.shape[:2]
    height, width = image_size(model.config)
    patch = patch_size(model.config)
    patches = (height // patch[0]) * (width // patch[1])
    if "bool_masked_pos" in accepted:
        masked = torch.zeros(rows, patches, dtype=torch.bool)
        yield Call(
            "masked positions", (((), {**plain, "bool_masked_pos": masked}),), required=False
        )
    if "attention_mask" in accepted:
        registers = getattr(model.config, "num_register_tokens", 0)
        # Beside the patches: a class token, none, a second token for distillation, or registers.
        for others in dict.fromkeys((1, 0, 2, 1 + registers)):
            # A mask of ones is ignored, whatever its length; a mask with a zero is not.
            shape = rows, patches + others
            mask = example(model, InputSpec(shape, 2, (1,) * (shape[1] - 1), last=0))
            inputs = {**plain, "attention_mask": mask}
            yield Call("attention mask", (((), inputs),), required=False)
    if "interpolate_pos_encoding" in accepted:
        larger = example(model, InputSpec((rows, channels, height + patch[0], width + patch[1])))
        flags = {"interpolate_pos_encoding": True}
        yield Call("other image size", (((), {"pixel_values": larger}),), flags, required=False)
