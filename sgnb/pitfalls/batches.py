"""Pitfalls of batch sizes: a batch of one sample."""

from __future__ import annotations

from sgnb.pitfalls.facts import Facts
from sgnb.pitfalls.record import Pitfall


def _one_sample(facts: Facts) -> str | None:
    if facts.last_batch_size != 1:
        return None
    if facts.batch_size == 1:
        return "batch size 1"
    return f"{facts.num_train_samples} samples in batches of {facts.batch_size}, so the last batch has 1"


def _graph_of_its_own(facts: Facts) -> str | None:
    tail = _one_sample(facts) if facts.batch_size != 1 else None
    return tail if facts.training_hyperparams.torch_compile else None


def _batchnorm_fails(facts: Facts) -> str | None:
    tail = _one_sample(facts)
    return f"{tail}; {_layers(facts.num_batchnorm_1d, 'BatchNorm1d')}" if tail and facts.num_batchnorm_1d else None


def _batchnorm_guesses(facts: Facts) -> str | None:
    tail = _one_sample(facts)
    if not tail or not facts.num_batchnorm or facts.num_batchnorm_1d:
        return None
    return f"{tail}; {_layers(facts.num_batchnorm, 'BatchNorm')}"


def _layers(count: int | None, name: str) -> str:
    return f"{count} {name} layer{'' if count == 1 else 's'}"


_DROP_LAST = "Set drop_last=True in the training loader, or choose another batch size."

RULES = (
    Pitfall(
        code="BN101",
        severity="error",
        title="BatchNorm1d fails on a training batch of one sample",
        field="",
        evidence=_batchnorm_fails,
        reason="It needs more than one value per channel to estimate a variance, and raises an error without.",
        advice=_DROP_LAST,
        source="https://docs.pytorch.org/docs/stable/generated/torch.nn.BatchNorm1d.html",
    ),
    Pitfall(
        code="BN102",
        severity="warning",
        title="BatchNorm normalises a training batch of one sample",
        field="",
        evidence=_batchnorm_guesses,
        reason=(
            "The statistics of a single sample are a poor estimate and enter the running averages; where a layer sees "
            "one value per channel, as after global pooling, torch raises an error."
        ),
        advice=_DROP_LAST,
        source="https://docs.pytorch.org/docs/stable/generated/torch.nn.BatchNorm2d.html",
    ),
    Pitfall(
        code="TC112",
        severity="information",
        title="A last batch of one sample is compiled by itself",
        field="torch_compile",
        evidence=_graph_of_its_own,
        reason=(
            "The compiler treats sizes 0 and 1 as special cases, so this batch costs one more graph; other sizes share "
            "one."
        ),
        advice=_DROP_LAST,
        source="https://docs.pytorch.org/docs/stable/torch.compiler_dynamic_shapes.html",
    ),
)
