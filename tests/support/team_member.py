"""One process of several that fold together: ``team_member.py SOURCE OUT [NAME=VALUE ...]``.

``die=1`` kills it when it has written something; ``dtype`` and ``resume`` are the fold's.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from fold_cases import EDITS, plan_for
from stored_files import opened

from enjoyln_cli.errors import EnjoyLNError
from enjoyln_cli.rewrite import processes
from enjoyln_cli.rewrite.directory import WriteOptions, fold_checkpoint


def main(source: Path, out: Path, *texts: str) -> None:
    options = dict(text.split("=") for text in texts)

    def progress(written: int) -> None:
        if "die" in options:
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint = opened(source)
    shapes = {n: torch.empty(s.shape, device="meta") for n, s in checkpoint.tensors.items()}
    with processes.join_group() as us:
        result = fold_checkpoint(
            checkpoint,
            plan_for(shapes, EDITS),
            out,
            recipe_text="a: recipe\n",
            options=WriteOptions(
                dtype=getattr(torch, options["dtype"]) if "dtype" in options else None,
                resume="resume" in options,
            ),
            progress=progress,
            team=us,
        )
    if not us.rank:
        print(f"resumed {result.resumed}")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
    except EnjoyLNError as error:
        print(f"error: {error}")
        sys.exit(1)
