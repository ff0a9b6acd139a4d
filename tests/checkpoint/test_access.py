"""Access to the Hub: a token is passed to libraries, and never shown."""

from __future__ import annotations

import traceback

import pytest
from hub_server import TOKEN

from enjoyln_cli.checkpoint.access import (
    DEFAULT_ACCESS,
    HubAccess,
    access_keywords,
    require_token,
)
from enjoyln_cli.conversion.inspect import Opening
from enjoyln_cli.errors import ModelNotFound


def test_its_text_does_not_show_the_token() -> None:
    access = HubAccess(token=TOKEN, cache_dir="cache")
    holders = (access, Opening(access=access))
    for text in (*map(repr, holders), *map(str, holders), f"{access}", f"{[access]}"):
        assert TOKEN not in text and "cache" in text


def test_what_repeats_a_fold_has_neither_token_nor_cache() -> None:
    settings = Opening(
        access=HubAccess(token=TOKEN, cache_dir="cache"), outputs=("logits",)
    ).settings
    assert settings["outputs"] == ("logits",)
    assert not {"access", "token", "cache_dir", "revision"} & {*settings}


def test_libraries_receive_what_the_user_has_set() -> None:
    assert access_keywords(DEFAULT_ACCESS) == {"token": None, "cache_dir": None}
    found = access_keywords(HubAccess(token=TOKEN, cache_dir="cache"))
    assert found == {"token": TOKEN, "cache_dir": "cache"}


@pytest.mark.parametrize("token", ["", f"{TOKEN}\n", f"{TOKEN} {TOKEN}", f"{TOKEN}\u00e9"])
def test_an_invalid_token_is_refused_and_not_quoted(token: str) -> None:
    with pytest.raises(ModelNotFound, match="the --token (is empty|has characters)") as found:
        require_token(HubAccess(token=token))
    assert TOKEN not in "".join(traceback.format_exception_only(found.value))


@pytest.mark.parametrize("access", [DEFAULT_ACCESS, HubAccess(token=TOKEN)])
def test_a_possible_token_passes(access: HubAccess) -> None:
    require_token(access)
