"""Where two nested mappings differ."""

from __future__ import annotations

from enjoyln_cli.plan.schema import ABSENT, differences


def test_every_entry_that_differs_has_its_path() -> None:
    left = {"a": 1, "b": {"c": 2, "d": {"e": [3]}}, "same": {"x": {}}, "f": {"g": 4}, "h": {}}
    right = {"a": 1, "b": {"c": 5, "d": {"e": [6]}}, "same": {"x": {}}, "i": {"j": {"k": 7}}}
    assert list(differences(left, right)) == [
        (("b", "c"), 2, 5),
        (("b", "d", "e"), [3], [6]),
        (("f", "g"), 4, ABSENT),
        (("h",), {}, ABSENT),
        (("i", "j", "k"), ABSENT, 7),
    ]


def test_a_mapping_beside_a_value_is_one_difference() -> None:
    assert list(differences({"a": {"b": 1}}, {"a": 2})) == [(("a",), {"b": 1}, 2)]
    assert list(differences({"a": {}}, {"a": {"b": 1}})) == [(("a", "b"), ABSENT, 1)]
    assert list(differences({}, {})) == []
