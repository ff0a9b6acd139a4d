"""How the matrices of a rotation are chosen on the user's data. Nothing slow is imported here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from enjoyln_cli.plan.option_field import InRange, measuring_option, option
from enjoyln_cli.quantisers.schemes import SIMULATED


@dataclass(frozen=True, kw_only=True)
class ChoiceOptions:
    """How the matrices of a rotation are chosen on the user's data."""

    search: Annotated[int, InRange(1)] | None = option(
        None,
        "Try N seeds with simulated rounding on your data, and use the best.",
        metavar="N",
    )
    learn: Annotated[int, InRange(1)] | None = option(
        None,
        "Learn the matrices on your data with simulated rounding, in this many steps.",
        metavar="STEPS",
    )
    scheme: str | None = option(
        None,
        "The rounding that --search and --learn simulate: bits of weights and inputs.",
        choices=tuple(SIMULATED),
    )
    device: str | None = measuring_option(
        None,
        "Where --search and --learn run: cpu, cuda or mps (default: a GPU if there is one).",
        metavar="DEVICE",
    )


NO_CHOICE = ChoiceOptions()
"""The seed alone chooses the matrices."""
