"""What folded norms hand on to their readers, as lines of a recipe: written, read, and compared.

A line stands for one norm or for that of every layer, and says what moves where, or why it stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from enjoyln_cli.errors import RecipeError
from enjoyln_cli.plan.plan import Merge, Named, Reader, Unmerged
from enjoyln_cli.recipe import validation

NOT_ASKED = "the recipe does not merge it"
BY_RECIPE = "the recipe keeps it"


@dataclass(frozen=True)
class MergeLine:
    """One norm whose parameters move into its readers, or that of every layer; or one that stays.

    All but its own name may lie at ``{i-1}`` in the words why it stays.
    """

    norm: str
    merge: Merge | None
    reason: str = ""
    culprit: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """All parameters and tensors."""
        if self.merge is None:
            return ()
        named = (*self.merge.names, *(reader.weight for reader in self.merge.readers))
        return tuple(name for one in named for name in (one.parameter, one.tensor))

    def renamed(self, name: Callable[[str], str]) -> MergeLine:
        """The same with other names."""
        merge = self.merge
        if merge is not None:

            def again(named: Named) -> Named:
                return Named(name(named.parameter), name(named.tensor))

            readers = tuple(
                Reader(again(r.weight), r.dim, r.bias and again(r.bias)) for r in merge.readers
            )
            own = name(merge.norm), name(merge.weight), name(merge.bias)
            merge = Merge(*own, readers, merge.offset)
        return MergeLine(name(self.norm), merge, name(self.reason), name(self.culprit))


def lines_of(merged: Iterable[Merge], unmerged: Iterable[Unmerged]) -> list[MergeLine]:
    """A line for every norm."""
    lines = [MergeLine(one.norm, one) for one in merged]
    return lines + [MergeLine(one.norm, None, one.reason, one.culprit) for one in unmerged]


def asked_of(
    merged: Sequence[Merge],
    unmerged: Sequence[Unmerged],
    asked: Mapping[str, MergeLine],
    folded: Iterable[str],
    where: str,
) -> tuple[tuple[Merge, ...], tuple[Unmerged, ...]]:
    """Of the proven ones those that a recipe asks for, and what it keeps, of the ``folded`` norms.

    Raises ``RecipeError`` where it asks for anything else.
    """
    proven, folded = {one.norm: one for one in merged}, set(folded)
    known = {one.norm: one for one in unmerged}
    for norm, line in asked.items():
        if line.merge is None:
            if norm not in proven and norm not in known:
                raise RecipeError(f"{where}: keeps {norm} unmerged, which is not merged anyway")
            continue
        if norm not in proven:
            reason = f": {known[norm].reason}" if norm in known else "; see --merge"
            raise RecipeError(
                f"{where}: merges {norm}, which is not part of the proof{reason}; write keep for it"
            )
        if line.merge != proven[norm]:
            words = in_words(line), in_words(MergeLine(norm, proven[norm]))
            raise RecipeError(f"{where}: {norm}: {words[0]}, and the proof {words[1]}; take that")
        if norm not in folded:
            raise RecipeError(
                f"{where}: merges {norm}, which it does not fold; write keep for it under merge, "
                "too"
            )
    found = tuple(one for one in merged if one.norm in asked and asked[one.norm].merge is not None)
    kept = [one for one in unmerged if one.norm in folded]
    for norm in (name for name in proven if name in folded and name not in {m.norm for m in found}):
        if norm in asked:
            kept.append(Unmerged(norm, asked[norm].reason or BY_RECIPE, asked[norm].culprit))
        else:
            kept.append(Unmerged(norm, NOT_ASKED))
    return found, tuple(kept)


def in_words(line: MergeLine) -> str:
    """What happens to the norm."""
    one = line.merge
    if one is None:
        return "keeps what it multiplies by and adds"
    moving = " and ".join(["its weight"] * bool(one.weight) + ["its bias"] * bool(one.bias))
    into = ", ".join(
        f"{reader.weight.tensor} (dimension {reader.dim})"
        + (f" and {reader.bias.tensor}" if reader.bias else "")
        for reader in one.readers
    )
    return f"merges {moving} into {into}" + " as 1 + weight" * bool(one.offset)


def written(line: MergeLine) -> Any:
    """The line as it stands in a recipe, under the name of the norm."""
    one = line.merge
    if one is None:
        if not line.reason:
            return "keep"
        return {"keep": line.reason} | ({"culprit": line.culprit} if line.culprit else {})
    data: dict[str, Any] = {"weight": one.weight} if one.weight else {}
    data |= {"one_plus": True} if one.offset else {}
    data |= {"bias": one.bias} if one.bias else {}
    return data | {"into": [_reader_data(reader) for reader in one.readers]}


def _reader_data(reader: Reader) -> dict[str, Any]:
    data = _named_data("weight", reader.weight) | {"dim": reader.dim}
    return data | (_named_data("bias", reader.bias) if reader.bias else {})


def _named_data(key: str, named: Named) -> dict[str, Any]:
    other = {} if named.parameter == named.tensor else {f"{key}_parameter": named.parameter}
    return {key: named.tensor} | other


def read(name: str, value: Any, at: str) -> MergeLine:
    """What ``written`` gives, as it comes from a file. Raises ``RecipeError``."""
    validation.name(name, at)
    if value == "keep":
        return MergeLine(name, None)
    if isinstance(value, Mapping) and "keep" in value:
        data = validation.mapping(value, at, ("keep",), ("culprit",))
        culprit = validation.text(data.get("culprit", ""), f"{at}.culprit")
        return MergeLine(name, None, validation.text(data["keep"], f"{at}.keep"), culprit)
    data = validation.mapping(value, at, ("into",), ("weight", "one_plus", "bias"))
    if not {"weight", "bias"} & data.keys():
        raise RecipeError(f"{at}: says neither weight nor bias, so nothing moves; write keep")
    if "one_plus" in data and (data["one_plus"] is not True or "weight" not in data):
        raise RecipeError(
            f"{at}.one_plus: {validation.shown(data['one_plus'])}; "
            "only true has a meaning, with weight"
        )
    weight, bias = (
        validation.name(data[key], f"{at}.{key}") if key in data else ""
        for key in ("weight", "bias")
    )
    readers = validation.items(data["into"], f"{at}.into", _reader)
    if not readers or any(bool(reader.bias) != bool(bias) for reader in readers):
        raise RecipeError(
            f"{at}.into: names no linear layer, or not a bias for each where one moves"
        )
    merge = Merge(name, weight, bias, readers, 1.0 if "one_plus" in data else 0.0)
    return MergeLine(name, merge)


def _reader(value: Any, at: str) -> Reader:
    data = validation.mapping(
        value, at, ("weight", "dim"), ("weight_parameter", "bias", "bias_parameter")
    )
    weight = _named(data, "weight", at)
    dim = validation.number(data["dim"], f"{at}.dim", 0, 1)
    if "bias_parameter" in data and "bias" not in data:
        raise RecipeError(f"{at}: bias_parameter stands beside bias; add it")
    return Reader(weight, dim, _named(data, "bias", at) if "bias" in data else None)


def _named(data: Mapping[str, Any], key: str, at: str) -> Named:
    tensor = validation.name(data[key], f"{at}.{key}")
    return Named(
        validation.name(data.get(f"{key}_parameter", tensor), f"{at}.{key}_parameter"), tensor
    )


def _tensors(line: MergeLine) -> Iterable[str]:
    """The stored ones that change, or that something is multiplied by on its way."""
    if line.merge is not None:
        yield from (named.tensor for named in line.merge.names)
        yield from (reader.weight.tensor for reader in line.merge.readers)


def _require_fit(
    one: Merge, reader: Reader, shapes: Mapping[str, Sequence[int]], where: str
) -> None:
    matrix, size = tuple(shapes[reader.weight.tensor]), tuple(shapes[one.weight or one.bias])
    bias = tuple(shapes[reader.bias.tensor]) if reader.bias else None
    fits = len(matrix) == 2 and size == (matrix[reader.dim],)
    if not fits or (bias is not None and bias != (matrix[1 - reader.dim],)):
        raise RecipeError(
            f"{where}: {one.norm} of shape {list(size)} is not read along dimension {reader.dim} "
            f"of {reader.weight.tensor}, of shape {list(matrix)}"
            + (f", with a bias of shape {list(bias)}" if bias is not None else "")
        )


def recorded(
    lines: Iterable[MergeLine], shapes: Mapping[str, Sequence[int]], where: str
) -> tuple[tuple[Merge, ...], tuple[Unmerged, ...]]:
    """What a fold has merged and what not; ``shapes`` are those of the result.

    Raises ``RecipeError`` for a tensor that is not stored, or that does not fit the others.
    """
    lines = tuple(lines)
    for name in (name for line in lines for name in _tensors(line)):
        if name not in shapes:
            raise RecipeError(f"{where}: no stored tensor is named {name}")
    merged = tuple(line.merge for line in lines if line.merge)
    for one in merged:
        for reader in one.readers:
            _require_fit(one, reader, shapes, where)
    kept = (line for line in lines if not line.merge)
    return merged, tuple(Unmerged(one.norm, one.reason, one.culprit) for one in kept)
