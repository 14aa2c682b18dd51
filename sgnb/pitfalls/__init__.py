"""Pitfalls of a run, told before it starts: rules as data, judged on facts. Only gathering facts imports torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sgnb.pitfalls import averaging, batches, compilation, memory, precision, processes, record
from sgnb.pitfalls.facts import Facts, gather_facts
from sgnb.pitfalls.record import Finding, Findings, Pitfall, Severity, apply_fix, fix_text

__all__ = [
    "RULES",
    "Facts",
    "Finding",
    "Findings",
    "Pitfall",
    "Severity",
    "apply_fix",
    "check",
    "fix_text",
    "gather_facts",
    "judge",
]

RULES: tuple[Pitfall, ...] = (
    *precision.RULES,
    *compilation.RULES,
    *batches.RULES,
    *averaging.RULES,
    *processes.RULES,
    *memory.RULES,
)


def judge(facts: Facts, rules: Iterable[Pitfall] = RULES) -> tuple[Finding, ...]:
    """Return what `rules` find in `facts`, the worst first. Pure: the same facts give the same findings."""
    return record.judge(facts, rules)


def check(subject: Any) -> Findings:
    """Return the pitfalls of a recipe (or of hyperparameters) on this machine, before it runs.

    The model is not built and no data is read; `judge(gather_facts(..., model=, train_loader=))` knows more.

    Raises:
        HyperparamsError: when the hyperparameters are not acceptable.
    """
    from sgnb.training.machine import describe_machine

    return Findings(judge(gather_facts(subject, machine=describe_machine())))
