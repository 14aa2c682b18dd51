"""Pitfalls of several processes: this version trains in one."""

from __future__ import annotations

from sgnb.pitfalls.facts import Facts
from sgnb.pitfalls.record import Pitfall

_PAGE = "https://github.com/Deci-AI/super-gradients/blob/master/documentation/source/ImprovingTrainingTime.md"


def _sync_bn_alone(facts: Facts) -> str | None:
    hp = facts.training_hyperparams
    return "sync_bn is on, and the run has one process" if hp.sync_bn and not hp.torch_compile else None


def _sync_bn_with_compile(facts: Facts) -> str | None:
    hp = facts.training_hyperparams
    return (
        "sync_bn and torch_compile are both on, and the run has one process"
        if hp.sync_bn and hp.torch_compile
        else None
    )


def _several_gpus(facts: Facts) -> str | None:
    asked = [f"num_gpus is {facts.num_gpus}"] if facts.num_gpus is not None and facts.num_gpus > 1 else []
    asked += ["multi_gpu is DDP"] if facts.multi_gpu == "DDP" else []
    return ", ".join(asked) or None


def _several_processes(facts: Facts) -> str | None:
    value = (facts.environment or {}).get("WORLD_SIZE", "")
    return f"WORLD_SIZE is {value} in the environment" if value.isdigit() and int(value) > 1 else None


RULES = (
    Pitfall(
        code="DDP101",
        severity="information",
        title="SyncBN has nothing to synchronise in one process",
        field="sync_bn",
        evidence=_sync_bn_alone,
        reason=(
            "It shares BatchNorm statistics between processes. With one process the BatchNorm layers stay as they are."
        ),
        fix={"sync_bn": False},
        source="https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html",
    ),
    Pitfall(
        code="DDP102",
        severity="information",
        title="SyncBN does not break the compiled graph here",
        field="sync_bn",
        evidence=_sync_bn_with_compile,
        reason=(
            "Elsewhere each SyncBatchNorm layer breaks the graph and takes the gain of torch.compile away. This "
            "version trains in one process, where there is nothing to synchronise: the BatchNorm layers stay, and the "
            "graph stays whole."
        ),
        fix={"sync_bn": False},
        source=_PAGE,
    ),
    Pitfall(
        code="DDP103",
        severity="error",
        title="This version trains in one process on one device",
        field="",
        evidence=_several_gpus,
        reason="The recipe asks for several processes, and the run refuses to start instead of ignoring it.",
        advice="Set num_gpus=1 and multi_gpu=Off in the recipe.",
        source="https://docs.pytorch.org/docs/stable/notes/ddp.html",
    ),
    Pitfall(
        code="DDP104",
        severity="error",
        title="Each process that torchrun started would train a model of its own",
        field="",
        evidence=_several_processes,
        reason=(
            "This version does not exchange gradients: the processes would do the same work, and overwrite each "
            "other's files."
        ),
        advice="Start the command with python instead of torchrun.",
        source="https://docs.pytorch.org/docs/stable/elastic/run.html",
    ),
)
