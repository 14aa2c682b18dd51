"""What is found is shown as text, as HTML and as JSON, and can be mended."""

import html
import json

import pytest

from sgnb.hyperparams import HyperparamsError, TrainingHyperparams
from sgnb.pitfalls import Facts, Finding, Findings, apply_fix, check, fix_text, judge

T4 = {"device_type": "cuda", "device_name": "Tesla T4", "device_capability": (7, 5), "device_memory_gib": 14.6}


def findings(known=None, **hyperparams):
    return Findings(judge(Facts(training_hyperparams=TrainingHyperparams.from_dict(hyperparams), **(known or {}))))


def test_a_finding_says_what_why_where_and_what_to_do():
    found = findings(
        T4, torch_compile=True, mixed_precision=True, torch_compile_mode="reduce-overhead", batch_accumulate=2
    )
    assert str(found.errors) == (
        "1 error.\n"
        "\n"
        "error MEM102, torch_compile_mode: reduce-overhead and batch_accumulate do not go together\n"
        "  CUDA graphs reuse the memory of the step before, where the gradients that are being summed still lie: torch "
        "raises 'accessing tensor output of CUDAGraphs that has been overwritten'. Cloning and marking steps do not "
        "help.\n"
        "  Seen here: mode reduce-overhead and batch_accumulate 2 on a GPU.\n"
        "  Fix: training_hyperparams.torch_compile_mode=default training_hyperparams.torch_compile_options.mode=null\n"
        "  Source: https://github.com/pytorch/pytorch/issues/169545"
    )


def test_a_finding_without_a_fix_gives_an_instruction():
    known = {"num_train_samples": 65, "batch_size": 64, "drop_last": False, "num_batchnorm": 2, "num_batchnorm_1d": 1}
    assert str(findings(known)) == (
        "1 error.\n"
        "\n"
        "error BN101: BatchNorm1d fails on a training batch of one sample\n"
        "  It needs more than one value per channel to estimate a variance, and raises an error without.\n"
        "  Seen here: 65 samples in batches of 64, so the last batch has 1; 1 BatchNorm1d layer.\n"
        "  Set drop_last=True in the training loader, or choose another batch size.\n"
        "  Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.BatchNorm1d.html"
    )


def test_the_evidence_of_the_average_is_in_numbers():
    (found,) = findings({"num_train_batches": 29}, ema=True)
    assert found.evidence == "decay 0.9999 (exp) has a half-life of 6,910 updates; the run makes 290"


def test_the_evidence_of_a_run_that_cannot_win_is_in_seconds():
    found = findings({"seconds_per_epoch": 1.5, "compile_seconds": 40.0}, torch_compile=True)
    assert [finding.evidence for finding in found] == ["compilation took 40.0 s; 10 epochs of 1.50 s are 15.0 s"]


def test_nothing_found_is_said_as_well():
    assert str(findings()) == "No pitfalls found."
    assert findings()._repr_html_() == '<div role="status"><p>No pitfalls found.</p></div>'


def test_findings_are_a_sequence():
    found = findings(torch_compile=True, ema=True, sync_bn=True)
    assert [finding.code for finding in found] == ["EMA101", "DDP102"]
    assert isinstance(found[:1], Findings)
    assert found[:1].summary() == "1 information."
    assert (len(found.errors), len(found.warnings)) == (0, 0)


def test_html_is_escaped_and_announced():
    evil = "<script>alert('x')</script>"
    names = ("title", "field", "reason", "evidence", "advice", "source")
    finding = Finding(code="X1", severity="error", fix={"a": evil}, **dict.fromkeys(names, evil))
    page = Findings([finding])._repr_html_()
    assert page.startswith('<div role="status">')
    assert "<script" not in page
    assert html.escape(evil) in page


def test_json_holds_the_fields_of_each_finding():
    (found,) = json.loads(findings(sync_bn=True).to_json())
    assert found["code"] == "DDP101"
    assert found["fix"] == {"sync_bn": False}
    assert set(found) == {"code", "severity", "title", "field", "reason", "evidence", "fix", "advice", "source"}


def test_a_fix_of_a_nested_value_keeps_its_neighbours():
    before = TrainingHyperparams.from_dict({"torch_compile_options": {"disable": True, "fullgraph": True}})
    after = apply_fix(before, {"torch_compile_options.disable": False})
    assert after.changed() == {"torch_compile_options": {"fullgraph": True}}


def test_a_fix_is_validated_as_a_whole():
    with pytest.raises(HyperparamsError) as caught:
        apply_fix(TrainingHyperparams(), {"emma": True, "max_epochs": 0})
    assert str(caught.value) == (
        "training_hyperparams.max_epochs: expected at least 1, got 0\n"
        "training_hyperparams.emma: no such key; did you mean ema?"
    )


def test_a_fix_is_written_as_overrides():
    assert fix_text({"ema": True, "ema_params.decay_type": "threshold"}) == (
        "training_hyperparams.ema=True training_hyperparams.ema_params.decay_type=threshold"
    )


def test_check_looks_at_this_machine(monkeypatch):
    monkeypatch.setattr("sgnb.training.machine.describe_machine", lambda: {"devices": [], "cpu_bf16": False})
    assert [finding.code for finding in check({"mixed_precision": True})] == ["AMP103"]
