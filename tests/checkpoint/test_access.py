"""Access to the Hub: a token is passed to libraries, and never shown."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
from hub_repositories import TOKEN

from enjoyln_cli.checkpoint.open_options import (
    OPENED_PLAINLY,
    OpenOptions,
    access_keywords,
    require_token,
)
from enjoyln_cli.checkpoint.source import Source
from enjoyln_cli.errors import ModelNotFound
from enjoyln_cli.plan.fold_options import FoldOptions
from enjoyln_cli.publish import card


def test_its_text_does_not_show_the_token() -> None:
    access = OpenOptions(token=TOKEN, cache_dir="cache")
    for text in (repr(access), str(access), f"{access}", f"{[access]}"):
        assert TOKEN not in text and "cache" in text


def test_what_repeats_a_fold_has_neither_token_nor_cache() -> None:
    opening = OpenOptions(token=TOKEN, cache_dir="cache", revision="main", trust_remote_code=True)
    options = (opening, FoldOptions(outputs=("logits",)))
    found = card.command(Source("org/model", Path("x"), "c0ffee"), Path("out"), options)
    assert found == (
        "enjoyln fold org/model -o out --trust-remote-code --outputs logits --revision c0ffee"
    )


def test_libraries_receive_what_the_user_has_set() -> None:
    assert access_keywords(OPENED_PLAINLY) == {"token": None, "cache_dir": None}
    found = access_keywords(OpenOptions(token=TOKEN, cache_dir="cache"))
    assert found == {"token": TOKEN, "cache_dir": "cache"}


@pytest.mark.parametrize("token", ["", f"{TOKEN}\n", f"{TOKEN} {TOKEN}", f"{TOKEN}\u00e9"])
def test_an_invalid_token_is_refused_and_not_quoted(token: str) -> None:
    with pytest.raises(ModelNotFound, match="the --token (is empty|has characters)") as found:
        require_token(OpenOptions(token=token))
    assert TOKEN not in "".join(traceback.format_exception_only(found.value))


@pytest.mark.parametrize("access", [OPENED_PLAINLY, OpenOptions(token=TOKEN)])
def test_a_possible_token_passes(access: OpenOptions) -> None:
    require_token(access)
