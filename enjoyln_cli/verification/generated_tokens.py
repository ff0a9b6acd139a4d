"""Tokens that a result generates with its cache, as users run it, beside the original's tokens.

Both continue the same inputs greedily, by ``generate`` of transformers. After the first token that
differs, the rest of a row has no meaning and counts as different.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch

from enjoyln_cli.calls.input_sets import accepted_by
from enjoyln_cli.comparison.batches import ROWS_AT_ONCE, Batch, positions
from enjoyln_cli.comparison.run import run
from enjoyln_cli.models.load import silent
from enjoyln_cli.text import counted

MOST_INPUTS, MOST_TOKENS = 20, 32
"""Inputs that are continued, and tokens that each gets."""
MOST_DECODED = 48
"""Most tokens behind an encoder."""
IDS, MASK, DECODER = "input_ids", "attention_mask", "decoder_"
COUNTED = {"position_ids", "token_type_ids"}
"""Inputs that ``generate`` makes by itself."""
TEXT = {IDS, MASK, *COUNTED}
"""The inputs of a model that reads nothing but text."""
TIE = 1e-4
"""Two logits are taken for equal that differ by this part of the range of all logits."""


@dataclass(frozen=True)
class Agreement:
    """How many generated tokens equal the original's."""

    inputs: int
    tokens: int
    """What the original generates for all inputs."""
    same: int

    def __str__(self) -> str:
        of = f"{self.same} of {counted(self.tokens, 'generated token')}"
        return f"{of} as the original ({counted(self.inputs, 'input')})"

    @property
    def lost(self) -> float:
        """The part of the tokens that differ from the original's."""
        return 1 - self.same / max(1, self.tokens)

    def passes(self, recorded: Mapping[str, Any] | None, times: float) -> bool:
        """Whether about as many tokens are the same as in the ``recorded`` agreement.

        ``times`` as many may be lost, and two standard deviations more: on other inputs or another
        processor, a row may end early by chance. Without a record, none may be lost.
        """
        if not recorded:
            return self.same == self.tokens
        before = Agreement(**recorded)
        part = (before.lost * before.inputs + 1) / (before.inputs + 2)
        chance = 2 * sqrt(part * (1 - part) / self.inputs)
        return self.lost <= times * before.lost + chance


@dataclass(frozen=True)
class Prompts:
    """Inputs to continue, and what the original generates for them."""

    batches: list[Batch]
    """Each has some rows of equal sizes."""
    most: list[int]
    """How many tokens each batch may get."""
    wanted: list[torch.Tensor]
    """The rows of each batch, with the tokens that the original has generated."""


def continued(model: Any, batches: Sequence[Batch], is_decoded: bool = False) -> Prompts:
    """The inputs of ``batches`` with what ``model`` generates for them.

    Each batch has one row. Behind an encoder, all tokens of the decoder are generated; with
    ``is_decoded``, the batches have these tokens already (see ``decoded``). Of a text the second
    half is generated, and of a text with pictures what comes after the text.
    """
    room = positions(model.config.get_text_config(decoder=True))
    prompts, most = [], []
    by_length = defaultdict(list)
    for batch in batches[:MOST_INPUTS]:
        if model.config.is_encoder_decoder:
            prompts.append({n: v for n, v in batch.items() if not n.startswith(DECODER)})
            most.append(min(MOST_DECODED, room))
        elif batch.keys() <= TEXT:
            by_length[batch[IDS].shape[1]].append(batch[IDS])
        else:
            prompts.append(batch)
            most.append(max(1, min(MOST_TOKENS, room - batch[IDS].shape[1])))
    for length, rows in by_length.items():
        ids = torch.cat(rows)[:, : max(1, length // 2)]
        mask = {MASK: torch.ones_like(ids)} if MASK in accepted_by(model) else {}
        prompts.append({IDS: ids, **mask})
        most.append(max(1, min(MOST_TOKENS, length - ids.shape[1])))
    if is_decoded and model.config.is_encoder_decoder:
        return Prompts(prompts, most, [batch[f"{DECODER}{IDS}"] for batch in batches[:MOST_INPUTS]])
    wanted = [_generated(model, *each) for each in zip(prompts, most, strict=True)]
    return Prompts(prompts, most, wanted)


def decoded(model: Any, rows: Sequence[Batch]) -> Iterator[dict[int, torch.Tensor]]:
    """The tokens that the decoder of ``model`` generates for the inputs of its encoder.

    Each of ``rows`` is a batch of one row. Rows of equal shapes are decoded together, and their
    tokens come together, by the numbers of the rows.
    """
    most = min(MOST_DECODED, positions(model.config.get_text_config(decoder=True)))
    read, alike = accepted_by(model.get_encoder()), defaultdict(list)
    for at, row in enumerate(rows):
        shapes = tuple((name, value.shape) for name, value in row.items())
        alike[shapes if row.keys() <= read else at].append(at)
    for members in alike.values():
        for first in range(0, len(members), ROWS_AT_ONCE):
            some = members[first : first + ROWS_AT_ONCE]
            found = _decoded_together(model, [rows[at] for at in some], most)
            yield {at: _ended(model, row)[None] for at, row in zip(some, found, strict=True)}


def _decoded_together(model: Any, rows: Sequence[Batch], most: int) -> torch.Tensor:
    """The tokens for some rows of equal shapes: several rows hold inputs of the encoder alone.

    The encoder reads each row by itself, as it does in later calls (see ``encoded_once``).
    """
    if len(rows) == 1:
        return _generated(model, rows[0], most)
    with torch.no_grad(), silent():
        encoded = [model.get_encoder()(**row) for row in rows]
    states = torch.cat([one.last_hidden_state for one in encoded])
    together = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    outputs = type(encoded[0])(last_hidden_state=states)
    return _generated(model, together, most, encoder_outputs=outputs)


def _ended(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """A row of a decoder's tokens without the padding behind its end."""
    ends = model.generation_config.eos_token_id
    if ends is None:
        return tokens
    found = torch.isin(tokens[1:], torch.tensor(ends)).nonzero()  # the first may be an end itself
    return tokens[: int(found[0]) + 2] if len(found) else tokens


def agreement(model: Any, prompts: Prompts, original: Any = None) -> Agreement:
    """How many tokens ``model`` generates as the original does.

    If the ``original`` is given, another token that it takes for as probable ends no row.
    """
    inputs = tokens = same = 0
    for batch, most, wanted in zip(prompts.batches, prompts.most, prompts.wanted, strict=True):
        found = _generated(model, batch, most)
        first = batch[IDS].shape[1] if not model.config.is_encoder_decoder else 1
        for row, (got, expected) in enumerate(zip(found, wanted, strict=True)):
            inputs, tokens = inputs + 1, tokens + len(expected) - first
            size = min(len(got), len(expected))
            differing = (got[:size] != expected[:size]).nonzero()
            at = int(differing[0]) if len(differing) else size
            if original is not None and at < len(expected) and at < len(got):
                one = {name: value[row : row + 1] for name, value in batch.items()}
                if _is_tie(original, one, expected[:at], [int(got[at]), int(expected[at])]):
                    at = len(expected)
            same += at - first
    return Agreement(inputs, tokens, same)


def _generated(model: Any, batch: Batch, most: int, **more: Any) -> torch.Tensor:
    """Rows of tokens, which begin with the prompt, or with the tokens that start a decoder.

    ``more`` are other arguments of ``generate``.
    """
    from transformers import GenerationMixin

    given = {
        name: value.to(model.dtype) if value.is_floating_point() else value
        for name, value in batch.items()
    }
    with torch.no_grad(), silent():
        found: torch.Tensor = GenerationMixin.generate(
            model, **given, **more, do_sample=False, num_beams=1, max_new_tokens=most
        )
    return found.cpu()


def _is_tie(original: Any, batch: Batch, known: torch.Tensor, tokens: list[int]) -> bool:
    """Whether two ``tokens`` are equally probable after the ``known`` tokens of a row."""
    name = f"{DECODER}{IDS}" if original.config.is_encoder_decoder else IDS
    call = {n: v for n, v in batch.items() if n not in COUNTED} | {name: known[None]}
    if name == IDS and MASK in call:
        call[MASK] = torch.ones_like(call[IDS])
    logits = run(original, [call])[0]["logits"][0, -1]
    chosen = logits[tokens]
    return float(abs(chosen[0] - chosen[1])) <= TIE * float(logits.max() - logits.min())
