from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from sgnb.hyperparams import EmaParams, HyperparamsError, Problem, TrainingHyperparams

MODES = "'default', 'lite', 'reduce-overhead', 'max-autotune-no-cudagraphs', 'max-autotune'"
SCHEDULES = "'StepLRScheduler', 'PolyLRScheduler', 'CosineLRScheduler', 'ExponentialLRScheduler', 'FunctionLRScheduler'"


def report(values: Any) -> list[str]:
    """Return the lines of the error that `values` raise, without the prefix that all have."""
    with pytest.raises(HyperparamsError) as caught:
        TrainingHyperparams.from_dict(values)
    return [line.removeprefix("training_hyperparams.") for line in str(caught.value).splitlines()]


def test_an_empty_mapping_is_a_complete_record() -> None:
    hp = TrainingHyperparams.from_dict({})
    assert hp == TrainingHyperparams.from_dict(None) == TrainingHyperparams()
    assert hp.changed() == {}
    assert hp.to_yaml() == "{}\n"


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"torch_compil": True}, "torch_compil: no such key; did you mean torch_compile?"),
        ({"TORCH_COMPILE": True}, "TORCH_COMPILE: no such key; did you mean torch_compile?"),
        ({"bogus": True}, "bogus: no such key"),
        ({"mixed_precision": 1}, "mixed_precision: expected True or False, got 1"),
        ({"mixed_precision": "True"}, "mixed_precision: expected True or False, got 'True'"),
        ({"max_epochs": "5"}, "max_epochs: expected a whole number, got '5' (a text; write 5 without quotes)"),
        ({"max_epochs": 5.5}, "max_epochs: expected a whole number, got 5.5"),
        ({"max_epochs": True}, "max_epochs: expected a whole number, got True"),
        ({"max_epochs": 0}, "max_epochs: expected at least 1, got 0"),
        ({"initial_lr": 0}, "initial_lr: expected more than 0 or a mapping, got 0"),
        ({"initial_lr": "fast"}, "initial_lr: expected a number or a mapping, got 'fast'"),
        ({"initial_lr": float("nan")}, "initial_lr: expected a finite number or a mapping, got nan"),
        ({"initial_lr": 1e400}, "initial_lr: expected a finite number or a mapping, got inf"),
        ({"initial_lr": "1e400"}, "initial_lr: expected a finite number or a mapping, got inf"),
        ({"initial_lr": {"default": 0.1, "x": -1}}, "initial_lr.x: expected at least 0, got -1"),
        ({"initial_lr": {"x": 0.1}}, "initial_lr: a mapping needs the key default, got {'x': 0.1}"),
        ({"initial_lr": None}, "initial_lr: expected a number, got None"),
        ({"cosine_final_lr_ratio": 2}, "cosine_final_lr_ratio: expected at most 1, got 2"),
        ({"clip_grad_norm": float("inf")}, "clip_grad_norm: expected a finite number, got inf"),
        ({"optimizer_params": {"lr": float("nan")}}, "optimizer_params.lr: expected a finite number, got nan"),
        (
            {"optimizer_params": {"betas": (0.9, -1e400)}},
            "optimizer_params.betas.1: expected a finite number, got -inf",
        ),
        ({"optimizer_params": {1: 2}}, "optimizer_params.1: expected a text, got 1"),
        ({"ema_params": {"dacay": 0.5}}, "ema_params.dacay: no such key; did you mean decay?"),
        ({"ema_params": 3}, "ema_params: expected a mapping, got 3"),
        ({"torch_compile_options": {"fullgraph": 1}}, "torch_compile_options.fullgraph: expected True or False, got 1"),
        (
            {"torch_compile_mode": "default | reduce-overhead"},
            f"torch_compile_mode: expected one of {MODES}, got 'default | reduce-overhead'"
            " (write one of the alternatives, not all of them)",
        ),
        (
            {"torch_compile_mode": "max_autotune"},
            f"torch_compile_mode: expected one of {MODES}, got 'max_autotune'; did you mean max-autotune?",
        ),
        (
            {"lr_mode": "CosineScheduler"},
            f"lr_mode: expected one of {SCHEDULES} or a mapping, got 'CosineScheduler'"
            "; did you mean CosineLRScheduler?",
        ),
        ({"lr_updates": "x"}, "lr_updates: expected a list, got 'x'"),
        ({"lr_updates": [1, -2]}, "lr_updates.1: expected at least 0, got -2"),
        (
            {"optimizer": "sgd"},
            "optimizer: expected one of SGD, Adam, AdamW, RMSprop, RMSpropTF, Lamb, Lion, got 'sgd'; did you mean SGD?",
        ),
        ({"optimizer": 3, "initial_lr": None}, "optimizer: expected a name, a class or an instance, got 3"),
        ({"loss": {"a": {}, "b": {}}}, "loss: expected one loss, got {'a': {}, 'b': {}}"),
        ({"loss": 3}, "loss: expected a name, {name: {arguments}} or a module, got 3"),
        ({"run_id": "a/b", "resume": True}, "run_id: expected a plain file name, got 'a/b'"),
        ({"run_id": "RUN_1"}, "run_id: names a run to resume, but resume is False"),
        ({"resume": True, "resume_path": "x"}, "resume_path: and resume exclude each other: give one"),
        (
            {"max_epochs": 3, "lr_warmup_epochs": 2, "lr_cooldown_epochs": 1},
            "lr_warmup_epochs: expected warm-up and cool-down to be shorter than max_epochs (3), got 3",
        ),
        ({"lr_mode": "exp"}, "lr_decay_factor: is required by ExponentialLRScheduler"),
        (
            {"lr_mode": "step", "lr_decay_factor": 0.1},
            "lr_updates: StepLRScheduler needs one of lr_updates and step_lr_update_freq",
        ),
        (
            {"lr_mode": "function"},
            "lr_schedule_function: belongs to lr_mode FunctionLRScheduler, which needs it",
        ),
        (
            {"lr_warmup_steps": 5},
            "lr_warmup_steps: goes with warmup_mode LinearBatchLRWarmup, and that mode needs it",
        ),
        (
            {"torch_compile_regions": "auto"},
            "torch_compile_regions: auto compiles parts of the model, but torch_compile is False",
        ),
        (
            {"lr_mode": {"StepLR": {"step_size": 1}, "ExponentialLR": {}}},
            "lr_mode: expected {torch scheduler: {arguments}}, got {'StepLR': {'step_size': 1}, 'ExponentialLR': {}}",
        ),
        (
            {"lr_mode": {"StepLR": {"step_size": 1}}, "lr_cooldown_epochs": 1},
            "lr_mode: a torch scheduler has no cool-down; leave lr_cooldown_epochs out",
        ),
        (
            {"finetune": True, "initial_lr": {"default": 0.1}},
            "finetune: asks the model for its rates, so initial_lr must be a number",
        ),
        (
            {"warmup_initial_lr": {"head": 0.1}},
            "warmup_initial_lr: a mapping needs the key default, got {'head': 0.1}",
        ),
        (
            {"max_epochs": 3, "save_ckpt_epoch_list": [2, 4]},
            "save_ckpt_epoch_list: expected epochs up to max_epochs (3), got [2, 4]",
        ),
        (
            {"average_best_models": True, "save_model": False},
            "average_best_models: writes checkpoints, but save_model is False",
        ),
        (
            {"torch_compile_mode": "default", "torch_compile_options": {"mode": "max-autotune"}},
            "torch_compile_options.mode: is 'max-autotune' but torch_compile_mode is 'default'; give one of them",
        ),
        (
            {"torch_compile_mode": "max-autotune", "torch_compile_options": {"options": {"a": 1}}},
            "torch_compile_options.options: cannot be given together with a mode; torch.compile takes one of them",
        ),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else None,
)
def test_one_wrong_value_makes_one_line(values: dict[str, Any], line: str) -> None:
    assert report(values) == [line]


def test_all_problems_are_reported_together() -> None:
    values = {
        "max_epochs": "5",
        "initial_lr": -1,
        "bogus": 1,
        "lr_warmup_epochs": 20,
        "torch_compile_options": {"modee": 1},
        "optimizer_params": {"lr": float("nan")},
    }
    assert sorted(report(values)) == [
        "bogus: no such key",
        "initial_lr: expected more than 0 or a mapping, got -1",
        "lr_warmup_epochs: expected warm-up and cool-down to be shorter than max_epochs (10), got 20",
        "max_epochs: expected a whole number, got '5' (a text; write 5 without quotes)",
        "optimizer_params.lr: expected a finite number, got nan",
        "torch_compile_options.modee: no such key; did you mean mode?",
    ]


def test_a_long_wrong_value_is_cut_in_the_report() -> None:
    assert report({"initial_lr": 10**400}) == [
        f"initial_lr: expected a number or a mapping, got 1{'0' * 119}…",
    ]


@pytest.mark.parametrize("values", [[1], "torch_compile", 3])
def test_anything_but_a_mapping_is_refused(values: object) -> None:
    with pytest.raises(HyperparamsError) as caught:
        TrainingHyperparams.from_dict(values)  # type: ignore[arg-type]
    assert caught.value.problems == (
        Problem(where="training_hyperparams", message=f"expected a mapping, got {values!r}"),
    )


def test_keys_that_are_no_texts_are_refused() -> None:
    with pytest.raises(HyperparamsError) as caught:
        TrainingHyperparams.from_dict({1: 2})  # type: ignore[dict-item]
    assert str(caught.value) == "training_hyperparams: expected texts as keys, got 1"


def test_older_names_of_schedules_still_work() -> None:
    assert TrainingHyperparams(lr_mode="poly").lr_mode == "PolyLRScheduler"


def test_numbers_may_be_yaml_texts_or_numpy_scalars() -> None:
    hp = TrainingHyperparams(initial_lr="1e-3", max_epochs=np.int64(3), clip_grad_norm=np.float64(0.5))
    assert (hp.initial_lr, hp.max_epochs, hp.clip_grad_norm) == (0.001, 3, 0.5)
    assert type(hp.max_epochs) is int


def test_records_share_no_mutable_values() -> None:
    given = {"betas": [0.9, 0.99]}
    first, second = TrainingHyperparams(optimizer_params=given), TrainingHyperparams(optimizer_params=given)
    given["betas"].append(3.0)
    first.changed()["optimizer_params"]["betas"].clear()
    assert first.optimizer_params == second.optimizer_params == {"betas": [0.9, 0.99]}
    TrainingHyperparams().optimizer_params["lr"] = 3
    assert TrainingHyperparams().optimizer_params == {}


def test_a_record_is_frozen() -> None:
    hp = TrainingHyperparams()
    with pytest.raises(ValidationError, match="Instance is frozen"):
        hp.max_epochs = 3


def test_replace_validates_the_whole_record() -> None:
    hp = TrainingHyperparams(max_epochs=5, ema_params={"decay": 0.9})
    assert hp.replace(lr_warmup_epochs=4).changed() == {
        "max_epochs": 5,
        "ema_params": {"decay": 0.9},
        "lr_warmup_epochs": 4,
    }
    assert hp.replace(ema_params=EmaParams()).changed() == {"max_epochs": 5}
    assert hp.changed() == {"max_epochs": 5, "ema_params": {"decay": 0.9}}
    with pytest.raises(HyperparamsError) as caught:
        hp.replace(lr_warmup_epochs=5)
    assert str(caught.value) == (
        "training_hyperparams.lr_warmup_epochs: expected warm-up and cool-down to be shorter than max_epochs (5), got 5"
    )


@pytest.mark.parametrize("key", ["training_hyperparams", "training_params"])
def test_yaml_may_be_flat_or_stand_under_either_name(key: str) -> None:
    expected = TrainingHyperparams(mixed_precision=True)
    assert TrainingHyperparams.from_yaml("mixed_precision: True") == expected
    assert TrainingHyperparams.from_yaml(f"{key}:\n  mixed_precision: True") == expected
    assert TrainingHyperparams.from_yaml(f"{key}:") == TrainingHyperparams.from_yaml("") == TrainingHyperparams()


def test_a_broken_yaml_file_is_named_with_its_line(tmp_path: Any) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text("ema: True\nema_params: [")
    with pytest.raises(HyperparamsError) as caught:
        TrainingHyperparams.from_yaml(file)
    assert str(caught.value) == (
        f"{file}: expected YAML; line 2, column 14: expected the node content, but found '<stream end>'"
    )


def test_an_object_does_not_go_into_yaml() -> None:
    hp = TrainingHyperparams(loss=len)
    with pytest.raises(HyperparamsError) as caught:
        hp.to_yaml()
    assert str(caught.value) == (
        "training_hyperparams.loss: <built-in function len> is a Python object, which YAML cannot hold;"
        " use a name instead"
    )


SAMPLES: dict[str, list[Any]] = {
    "mixed_precision_dtype": ["auto", "bfloat16", "float16"],
    "torch_compile_mode": ["default", "reduce-overhead", "max-autotune"],
    "torch_compile_options": [{}, {"fullgraph": True}, {"dynamic": False, "backend": "eager"}],
    "ema_params": [{}, {"decay": 0.5, "decay_type": "constant"}, {"beta": 3}],
    "optimizer": ["SGD", "AdamW"],
    "optimizer_params": [{}, {"betas": (0.9, 0.99), "eps": 1e-8}, {"momentum": np.float32(0.5), "nesterov": True}],
    "loss": ["CrossEntropyLoss"],
    "criterion_params": [{}, {"label_smoothing": 0.1}, {"weight": [1, 2.5, None]}],
    "initial_lr": [0.1, 1, 3e-4, {"default": 1, "backbone.": 0}],
    "clip_grad_norm": [None, 1, 0.5],
    "lr_mode": ["CosineLRScheduler", "PolyLRScheduler"],
    "lr_schedule_function": [None],
    "lr_updates": [[], [3, 5]],
    "step_lr_update_freq": [None, 2.5],
    "lr_decay_factor": [None, 0.1],
    "lr_warmup_steps": [0],
    "warmup_mode": ["LinearEpochLRWarmup"],
    "max_epochs": [10, 300],
    "train_metrics_list": [None, [], ["Accuracy"]],
    "valid_metrics_list": [None, ["Accuracy", {"Top5": {"k": 3}}]],
    "metric_to_watch": [None, "loss", "1e-3", "yes", "äö: #"],
    "ckpt_best_name": ["ckpt_best.pth", "a-b.pt"],
    "run_id": [None],
    "resume_path": [None],
    "matmul_precision": [None, "ieee", "tf32"],
    "torch_compile_regions": ["off"],
    "on_out_of_memory": ["raise", "halve"],
    "finetune": [False],
    "warmup_initial_lr": [None, 0.0, {"default": 0.1, "head": 0.0}],
    "loss_logging_items_names": [None, ["a", "off"]],
    "early_stopping_patience": [None, 3],
    "save_ckpt_epoch_list": [[], [1, 10]],
    "average_best_models": [False],
    "ckpt_name": ["ckpt_latest.pth", "ckpt_epoch_3.pth"],
}


def _sample(name: str, chance: random.Random) -> Any:
    default = TrainingHyperparams.model_fields[name].get_default(call_default_factory=True, validated_data={})
    if name in SAMPLES:
        return chance.choice(SAMPLES[name])
    if default is None or isinstance(default, bool):
        return chance.choice([True, False]) if isinstance(default, bool) or name.startswith("greater") else None
    return chance.choice([1, 3]) if isinstance(default, int) else chance.random()


@pytest.mark.parametrize("seed", range(40))
def test_yaml_gives_back_an_equal_record(seed: int) -> None:
    chance = random.Random(seed)
    names = [name for name in TrainingHyperparams.model_fields if chance.random() < 0.6]
    hp = TrainingHyperparams.from_dict({name: _sample(name, chance) for name in names})
    again = TrainingHyperparams.from_yaml(hp.to_yaml())
    assert again == hp
    assert again.to_yaml() == hp.to_yaml()
    assert again.changed() == hp.changed()
    assert TrainingHyperparams.from_dict(hp.changed()) == hp
