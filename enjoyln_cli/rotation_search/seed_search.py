"""Choose the best of several seeds of a rotation on the user's data."""

from __future__ import annotations

from dataclasses import replace

from enjoyln_cli.clock import Countdown, Progress
from enjoyln_cli.events import Event
from enjoyln_cli.quantisation.candidates import ORIGINAL
from enjoyln_cli.rotation_search.trials import MatrixChoice, Trials
from enjoyln_cli.text import counted


def search_seeds(tried: Trials, seeds: int, event: Event, on_progress: Progress) -> MatrixChoice:
    """Compare the matrices of the first ``seeds`` seeds, and choose the best."""
    event("stage", f"trying {counted(seeds, 'seed')} with simulated {tried.scheme}")
    start, countdown = tried.job.plan, Countdown(seeds + 1, on_progress)
    rotation_groups = tuple(replace(group, given=None) for group in start.rotation_groups)
    plans = {
        f"seed {seed}": replace(start, seed=seed, rotation_groups=rotation_groups)
        for seed in range(seeds)
    }
    compared = {}
    for name, plan in {ORIGINAL: None, **plans}.items():
        compared[name] = tried.measure(plan, tried.calibration)
        countdown.count()
    chosen = min(plans, key=lambda name: compared[name].cost)
    measured = {
        name: tried.measure(plan, tried.held_out)
        for name, plan in {ORIGINAL: None, chosen: plans[chosen]}.items()
    }
    return tried.choice(chosen, plans[chosen], compared, measured)
