"""Which outputs a class is used for, and which only come along with them.

A class with a head is used for what the head computes: logits, scores, boxes. Its hidden states,
and the outputs of its parts (``image_outputs.last_hidden_state``), are by-products. A base model is
used for its ``last_hidden_state``, unless it also returns logits or embeddings, as CLIP does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_STATES = re.compile(r"(.*_)?(hidden_states?|attentions)(_.*)?")
_RESULTS = re.compile(r".*(logits|embeds)(_.*)?")
_STATES_BESIDE_THE_LAST = re.compile(
    r"(encoder|image|vision|video|audio)_(last_)?hidden_states?|hidden_states|(.*_)?attentions"
)
_LAST = "last_hidden_state"


def by_products(fields: Iterable[str], has_head: bool) -> frozenset[str]:
    """The ``fields`` of a class's output that are not what the class is used for.

    ``fields`` are all fields but caches and losses, named as in ``models.outputs``. ``has_head``
    says whether the class is a base model with a head on it. Empty if it is unclear which fields
    the class is used for.
    """
    names = {field: [part for part in field.split(".") if not part.isdigit()] for field in fields}
    top = [parts[0] for parts in names.values() if len(parts) == 1]
    has_results = any(
        not _STATES.fullmatch(name) if has_head else _RESULTS.fullmatch(name) for name in top
    )
    if not has_results and _LAST not in top:
        return frozenset()
    states = _STATES if has_results else _STATES_BESIDE_THE_LAST
    return frozenset(
        field
        for field, parts in names.items()
        if len(parts) > 1 or (parts and states.fullmatch(parts[0]))
    )
