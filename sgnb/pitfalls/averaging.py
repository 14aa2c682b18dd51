"""Pitfalls of the moving average of the weights (EMA)."""

from __future__ import annotations

import math

from sgnb.hyperparams import EmaParams
from sgnb.pitfalls.facts import Facts
from sgnb.pitfalls.record import Pitfall

_PAGE = "https://github.com/Deci-AI/super-gradients/blob/master/documentation/source/ImprovingTrainingTime.md"
_LARGE_SHARE = 0.2  # Of the run. Above it, the average holds weights from the steep part of training.


def _with_compile(facts: Facts) -> str | None:
    hp = facts.training_hyperparams
    return "ema and torch_compile are both on" if hp.ema and hp.torch_compile else None


def _too_slow(facts: Facts) -> str | None:
    hp, updates = facts.training_hyperparams, facts.num_updates
    if not hp.ema or updates is None or hp.ema_params.decay_type == "threshold":
        return None
    half_life = _half_life(hp.ema_params)
    if half_life <= _LARGE_SHARE * updates:
        return None
    memory = f"a half-life of {half_life:,.0f} updates" if math.isfinite(half_life) else "no end of its memory"
    return f"decay {hp.ema_params.decay:g} ({hp.ema_params.decay_type}) has {memory}; the run makes {updates:,}"


def _half_life(params: EmaParams) -> float:
    """Updates after which a weight counts half, at the decay that the end of the run has."""
    decay = params.decay * (1 - math.exp(-params.beta)) if params.decay_type == "exp" else params.decay
    return math.log(2) / -math.log(decay) if 0 < decay < 1 else math.inf if decay >= 1 else 0.0


RULES = (
    Pitfall(
        code="EMA101",
        severity="information",
        title="EMA works with torch.compile here",
        field="ema",
        evidence=_with_compile,
        reason=(
            "Elsewhere the copy of a compiled model goes on running the live weights, so that the average is never "
            "validated. Here the averaged weights are swapped into the one compiled model for validation: no second "
            "graph, no conflict."
        ),
        source=_PAGE,
    ),
    Pitfall(
        code="EMA102",
        severity="warning",
        title="The average remembers too long for a run of this length",
        field="ema_params.decay",
        evidence=_too_slow,
        reason=(
            "Much of the average at the end is weights from early in training, so it is likely to validate worse than "
            "the live weights. decay_type threshold grows the decay with the number of updates."
        ),
        fix={"ema_params.decay_type": "threshold"},
        advice="Or lower ema_params.decay, or train longer.",
        source="https://github.com/huggingface/pytorch-image-models/blob/main/timm/utils/model_ema.py",
    ),
)
