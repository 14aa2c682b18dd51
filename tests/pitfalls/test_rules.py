"""Each rule has facts that trip it and facts that do not; all of them are quick, and their fixes agree."""

import dataclasses
import random
import re
import time

import pytest

from sgnb.hyperparams import TrainingHyperparams
from sgnb.pitfalls import RULES, Facts, apply_fix, judge

LAPTOP = {"device_type": "cpu", "cpu_bf16": False, "python": "3.11.7", "environment": {}}
SERVER = {"device_type": "cpu", "cpu_bf16": True, "python": "3.11.7", "environment": {}}
T4 = {
    "device_type": "cuda",
    "device_name": "Tesla T4",
    "device_capability": (7, 5),
    "device_bf16": False,
    "device_memory_gib": 14.6,
    "python": "3.12.1",
    "environment": {},
}
GTX = {**T4, "device_name": "NVIDIA GeForce GTX 1660 Ti", "device_memory_gib": 6.0}
H100 = {
    "device_type": "cuda",
    "device_name": "NVIDIA H100 80GB HBM3",
    "device_capability": (9, 0),
    "device_bf16": True,
    "device_memory_gib": 79.1,
    "python": "3.12.1",
    "environment": {},
}
MACHINES = {"unknown": {}, "laptop": LAPTOP, "server": SERVER, "T4": T4, "GTX 1660": GTX, "H100": H100}
NO_COMPILER = {**LAPTOP, "compiler_problem": "torch.compile needs a C++ compiler, and there is none on the PATH."}
ONE_LEFT = {"num_train_samples": 1793, "batch_size": 64, "drop_last": False, "num_train_batches": 29}


def facts(known=None, /, **hyperparams):
    return Facts(training_hyperparams=TrainingHyperparams.from_dict(hyperparams), **(known or {}))


def compiled(known=None, /, **hyperparams):
    return facts(known, torch_compile=True, **hyperparams)


def with_environment(known, **environment):
    return {**known, "environment": environment}


FULLGRAPH = {"torch_compile_options": {"fullgraph": True}}
DISABLED = with_environment(LAPTOP, TORCH_COMPILE_DISABLE="1")
EXAMPLES = {  # code: (facts that trip the rule, facts that do not)
    "AMP101": (compiled(H100), compiled(GTX)),
    "AMP102": (facts(T4), compiled(T4)),
    "AMP103": (facts(LAPTOP, mixed_precision=True), facts(SERVER, mixed_precision=True)),
    "AMP104": (
        facts(LAPTOP, mixed_precision=True, mixed_precision_dtype="bfloat16"),
        facts(SERVER, mixed_precision=True, mixed_precision_dtype="bfloat16"),
    ),
    "AMP105": (
        facts(SERVER, mixed_precision=True, mixed_precision_dtype="float16"),
        facts(SERVER, mixed_precision=False, mixed_precision_dtype="float16"),
    ),
    "AMP106": (
        facts(T4, mixed_precision=True, mixed_precision_dtype="bfloat16"),
        facts(H100, mixed_precision=True, mixed_precision_dtype="bfloat16"),
    ),
    "AMP107": (facts(GTX, mixed_precision=True), facts(T4, mixed_precision=True)),
    "TC101": (compiled(NO_COMPILER), compiled(NO_COMPILER, torch_compile_options={"backend": "eager"})),
    "TC102": (compiled(NO_COMPILER, **FULLGRAPH), compiled(NO_COMPILER)),
    "TC103": (
        compiled(torch_compile_options={"disable": True}),
        facts(torch_compile_options={"disable": True}),
    ),
    "TC104": (compiled(DISABLED), facts(DISABLED)),
    "TC105": (compiled(DISABLED, **FULLGRAPH), compiled(DISABLED)),
    "TC106": (compiled({"python": "3.15.0"}), compiled({"python": "3.14.2"})),
    "TC107": (
        compiled({"seconds_per_epoch": 1.0, "compile_seconds": 40.0}),
        compiled({"seconds_per_epoch": 10.0, "compile_seconds": 40.0}),
    ),
    "TC108": (compiled(max_epochs=100, max_train_batches=2), compiled(max_epochs=3)),
    "TC109": (
        compiled(torch_compile_mode="max-autotune", torch_compile_options={"backend": "aot_eager"}),
        compiled(torch_compile_mode="max-autotune"),
    ),
    "TC110": (
        facts(with_environment(T4, CUDA_LAUNCH_BLOCKING="1")),
        facts(with_environment(LAPTOP, CUDA_LAUNCH_BLOCKING="1")),
    ),
    "TC111": (compiled(T4), compiled(with_environment(T4, CUDA_LAUNCH_BLOCKING="1"))),
    "TC112": (compiled(ONE_LEFT), compiled({**ONE_LEFT, "drop_last": True})),
    "BN101": (
        facts({**ONE_LEFT, "num_batchnorm": 3, "num_batchnorm_1d": 1}),
        facts({**ONE_LEFT, "num_batchnorm": 3, "num_batchnorm_1d": 1}, max_train_batches=28),
    ),
    "BN102": (
        facts({**ONE_LEFT, "num_batchnorm": 3, "num_batchnorm_1d": 0}),
        facts({**ONE_LEFT, "num_batchnorm": 0, "num_batchnorm_1d": 0}),
    ),
    "EMA101": (compiled(ema=True), facts(ema=True)),
    "EMA102": (
        facts({"num_train_batches": 29}, ema=True),
        facts({"num_train_batches": 29}, ema=True, ema_params={"decay_type": "threshold"}),
    ),
    "DDP101": (facts(sync_bn=True), facts(sync_bn=False)),
    "DDP102": (compiled(sync_bn=True), facts(sync_bn=True)),
    "DDP103": (facts({"num_gpus": 8, "multi_gpu": "DDP"}), facts({"num_gpus": 1, "multi_gpu": "Off"})),
    "DDP104": (facts({"environment": {"WORLD_SIZE": "2"}}), facts({"environment": {"WORLD_SIZE": "1"}})),
    "MEM101": (compiled(T4), compiled(LAPTOP)),
    "MEM102": (
        compiled(T4, torch_compile_mode="reduce-overhead", batch_accumulate=2),
        compiled(LAPTOP, torch_compile_mode="reduce-overhead", batch_accumulate=2),
    ),
    "MEM103": (
        compiled(T4, torch_compile_options={"mode": "max-autotune"}, batch_accumulate=2),
        compiled(T4, torch_compile_options={"mode": "max-autotune-no-cudagraphs"}, batch_accumulate=2),
    ),
    "MEM104": (compiled(T4, torch_compile_mode="reduce-overhead"), compiled(T4)),
    "MEM105": (
        compiled(SERVER, torch_compile_mode="reduce-overhead"),
        facts(SERVER, torch_compile_mode="reduce-overhead"),
    ),
    "MEM106": (compiled(SERVER, torch_compile_mode="max-autotune"), compiled(T4, torch_compile_mode="max-autotune")),
}


def codes_of(findings):
    return [finding.code for finding in findings]


def test_every_rule_has_an_example_and_a_code_of_its_own():
    codes = [rule.code for rule in RULES]
    assert sorted(codes) == sorted(EXAMPLES)
    assert all(re.fullmatch(r"[A-Z]+\d{3}", code) for code in codes)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_a_rule_hits_and_misses(rule):
    hit, miss = EXAMPLES[rule.code]
    assert codes_of(judge(hit, [rule])) == [rule.code]
    assert judge(miss, [rule]) == ()


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.fix], ids=lambda rule: rule.code)
def test_a_fix_removes_its_finding(rule):
    hit, _ = EXAMPLES[rule.code]
    assert judge(fixed(hit, rule.fix), [rule]) == ()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_a_rule_is_whole(rule):
    assert rule.reason.endswith(".")
    assert rule.source.startswith("https://")
    assert not rule.title.endswith(".")
    assert rule.severity == "information" or rule.fix or rule.advice, "says what is wrong, and not what to do"
    if rule.field:
        assert rule.field.partition(".")[0] in TrainingHyperparams.model_fields


def fixed(known, fix):
    return dataclasses.replace(known, training_hyperparams=apply_fix(known.training_hyperparams, fix))


def random_hyperparams(rng):
    modes = ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
    mode = rng.choice(modes)
    return TrainingHyperparams.from_dict(
        {
            "mixed_precision": rng.random() < 0.5,
            "mixed_precision_dtype": rng.choice(["auto", "bfloat16", "float16"]),
            "torch_compile": rng.random() < 0.7,
            "torch_compile_loss": rng.random() < 0.3,
            "torch_compile_mode": mode,
            "torch_compile_options": {
                "mode": rng.choice([None, mode]),
                "fullgraph": rng.random() < 0.3,
                "disable": rng.random() < 0.2,
                "backend": rng.choice(["inductor", "inductor", "aot_eager"]),
            },
            "ema": rng.random() < 0.5,
            "ema_params": {
                "decay_type": rng.choice(["constant", "exp", "threshold"]),
                "decay": rng.choice([0.0, 0.9, 0.9999, 1.0]),
            },
            "sync_bn": rng.random() < 0.3,
            "batch_accumulate": rng.choice([1, 1, 3]),
            "max_epochs": rng.choice([1, 3, 100]),
            "max_train_batches": rng.choice([None, 5]),
        }
    )


def random_facts(rng):
    known = dict(rng.choice(list(MACHINES.values())))
    known["environment"] = rng.choice(
        [{}, {"TORCH_COMPILE_DISABLE": "1"}, {"CUDA_LAUNCH_BLOCKING": "1", "WORLD_SIZE": "2"}]
    )
    known["compiler_problem"] = rng.choice([None, None, "there is no compiler."])
    known.update(rng.choice([{}, ONE_LEFT, {**ONE_LEFT, "num_batchnorm": 3, "num_batchnorm_1d": 1}]))
    known.update(rng.choice([{}, {"seconds_per_epoch": 1.0, "compile_seconds": 40.0}]))
    return Facts(training_hyperparams=random_hyperparams(rng), **known)


def test_applying_all_fixes_ends_and_leaves_no_finding_with_a_fix():
    rng = random.Random(0)
    for _ in range(2000):
        known = random_facts(rng)
        for _ in range(4):
            fixes = [finding.fix for finding in judge(known) if finding.fix]
            for fix in fixes:
                known = fixed(known, fix)
            if not fixes:
                break
        assert not [finding.code for finding in judge(known) if finding.fix], known


def test_one_round_of_fixes_is_enough_whatever_their_order_unless_one_fix_brings_out_another():
    for machine in MACHINES.values():
        known = compiled(machine, ema=True, sync_bn=True, torch_compile_mode="reduce-overhead", batch_accumulate=2)
        fixes = [finding.fix for finding in judge(known) if finding.fix]
        results = []
        for order in (fixes, fixes[::-1]):
            result = known
            for fix in order:
                result = fixed(result, fix)
            results.append(result)
        assert results[0] == results[1]
        assert not [finding for finding in judge(results[0]) if finding.fix]


@pytest.mark.parametrize("machine", MACHINES)
def test_the_defaults_bring_no_warning_on_any_machine(machine):
    assert [finding for finding in judge(facts(MACHINES[machine])) if finding.severity != "information"] == []


def test_what_is_not_known_is_not_judged():
    assert codes_of(judge(compiled(mixed_precision=True, mixed_precision_dtype="float16"))) == []


def test_errors_come_first():
    found = judge(compiled(T4, ema=True, torch_compile_mode="reduce-overhead", batch_accumulate=2))
    assert codes_of(found) == ["MEM102", "AMP101", "TC111", "EMA101"]


def test_all_rules_together_take_less_than_five_milliseconds():
    known = compiled({**T4, **ONE_LEFT}, ema=True, sync_bn=True, torch_compile_mode="reduce-overhead")
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        judge(known)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.005
