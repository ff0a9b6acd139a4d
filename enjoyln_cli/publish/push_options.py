"""How a result is uploaded. Nothing slow is imported here."""

from __future__ import annotations

from dataclasses import dataclass

from enjoyln_cli.checkpoint.open_options import OpenOptions
from enjoyln_cli.plan.option_field import hub_option, option


@dataclass(frozen=True, kw_only=True)
class PushOptions:
    """How a result is uploaded."""

    private: bool | None = hub_option(
        None,
        "Visibility of a new repository (default: public).",
        flags=("--private/--no-private",),
    )
    create_pr: bool = hub_option(False, "Push as a pull request.")
    commit_message: str | None = hub_option(None, "First line of the commit.", metavar="TEXT")
    revision: str | None = hub_option(None, "Branch to push to; created if missing.", metavar="REV")
    token: str | None = hub_option(None, "Hub token that may write.", metavar="TOKEN", repr=False)
    force: bool = option(False, "Push although OUT is not verified; the model card says so.")

    @property
    def opening(self) -> OpenOptions:
        """How the Hub is asked."""
        return OpenOptions(token=self.token)
