"""A run as a process: start, follow, stop, kill, die, and be found again."""

import asyncio
import json
import time

import psutil
import pytest

from sgnb.events import CompileStarted, EpochEnded, RunEnded, RunStarted, StepEnded
from sgnb.recipes import load_recipe
from sgnb.run import Run


@pytest.fixture
def recipe(tmp_path):
    overrides = [
        "dataset_params=synthetic",
        "+dataset_params.train_dataset_params.num_samples=128",
        "+dataset_params.val_dataset_params.num_samples=32",
        "arch_params.width=4",
        "training_hyperparams.max_epochs=2",
        f"ckpt_root_dir={tmp_path}",
    ]
    return load_recipe("digits_dscnn", overrides)


@pytest.fixture
def endless(recipe):
    return recipe.with_hyperparams(max_epochs=100_000)


def until(condition, seconds=60):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not happen"
        time.sleep(0.05)


def training(run):
    return any(isinstance(event, EpochEnded) for event in run.history.events)


def test_a_run_trains_in_its_own_process_and_leaves_all_that_it_was(recipe, tmp_path):
    run = Run.start(recipe)
    assert run.status == "running"
    assert run.wait(timeout=120)["epoch"] == [1, 2]
    assert run.status == "finished"
    assert {path.name for path in run.run_dir.iterdir()} >= {
        "recipe.yaml", "process.json", "events.jsonl", "log.txt", "ckpt_latest.pth", "ckpt_best.pth",
    }  # fmt: skip
    events = run.poll()
    assert isinstance(events[0], RunStarted)
    assert run.poll() == []
    assert "epoch 2: " in run.log_tail()
    assert [found.run_dir for found in Run.find(tmp_path)] == [run.run_dir]


def test_a_run_can_be_awaited(recipe):
    async def in_a_cell():
        return await Run.start(recipe.with_hyperparams(max_epochs=1))

    assert asyncio.run(in_a_cell()).status == "finished"


def test_a_stop_from_another_object_ends_it_with_a_checkpoint(endless):
    run = Run.start(endless)
    try:
        until(lambda: training(run))
        Run(run.run_dir).stop()
        assert run.wait(timeout=30).status == "stopped"
        assert run.status == "stopped"
        assert (run.run_dir / "ckpt_latest.pth").exists()
    finally:
        run.kill()


def test_a_stop_is_heard_while_the_compiler_works(endless):
    run = Run.start(endless.with_hyperparams(torch_compile=True))
    try:
        until(lambda: any(isinstance(event, CompileStarted) for event in run.history.events))
        run.stop()
        history = run.wait(timeout=10)
        assert history.ended.reason == "stopped while compiling, before the first epoch"
        assert run.status == "stopped"
    finally:
        run.kill()


def test_a_killed_run_has_died_and_its_words_are_there(endless):
    run = Run.start(endless)
    until(lambda: training(run))
    run.kill()
    assert run.status == "died"
    assert "epoch 1: " in run.log_tail()


def test_a_run_that_cannot_begin_ends_as_failed_with_its_reason(recipe):
    run = Run.start(recipe.replace(architecture="dscn"))
    history = run.wait(timeout=60)
    assert run.status == "failed"
    assert isinstance(history.events[-1], RunEnded)
    assert history.events[-1].reason.endswith("architecture: expected one of dscnn, got 'dscn'; did you mean dscnn?")


def test_a_number_that_another_process_got_is_not_the_run(tmp_path):
    process = psutil.Process()
    (tmp_path / "process.json").write_text(json.dumps({"pid": process.pid, "created": process.create_time() - 100}))
    run = Run(tmp_path)
    assert run.status == "died"
    run.kill()  # This process is still here.


def test_a_directory_without_a_run_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no run; expected a directory that holds process\.json$"):
        Run(tmp_path)


def test_a_run_is_not_started_over_another_one(recipe, tmp_path):
    (tmp_path / "process.json").write_text("{}")
    with pytest.raises(FileExistsError, match="holds a run already; give another run_dir"):
        Run.start(recipe, tmp_path)


def test_waiting_has_a_limit(endless):
    run = Run.start(endless)
    try:
        with pytest.raises(TimeoutError, match=r"still running after 0\.5 s"):
            run.wait(timeout=0.5)
    finally:
        run.kill()


def test_a_comparison_is_a_run_with_a_directory_for_each_arm(recipe):
    hyperparams = {"torch_compile_options": {"backend": "aot_eager"}}
    run = Run.start_comparison(recipe.with_hyperparams(**hyperparams))
    run.wait(timeout=180)
    assert run.status == "finished", run.log_tail()
    assert (run.run_dir / "comparison.json").exists()
    assert (run.run_dir / "baseline" / "events.jsonl").exists()


def test_a_comparison_can_be_stopped(endless):
    run = Run.start_comparison(endless)
    try:
        until((run.run_dir / "baseline" / "events.jsonl").exists)
        run.stop()
        run.wait(timeout=30)
        assert run.status == "stopped"
    finally:
        run.kill()


def test_signs_of_life_are_few(recipe):
    history = Run.start(recipe.with_hyperparams(max_epochs=5)).wait(timeout=120)
    steps = [event for event in history.events if isinstance(event, StepEnded)]
    seconds = history.events[-1].time - history.events[0].time
    assert len(steps) <= 5 * seconds + 2 * 2 * 5


@pytest.mark.parametrize("moment", ["_process", "sleep"])
def test_ctrl_c_while_waiting_asks_for_a_stop_and_a_second_one_gives_up(tmp_path, monkeypatch, moment):
    process = psutil.Process()
    (tmp_path / "process.json").write_text(json.dumps({"pid": process.pid, "created": process.create_time()}))
    run, calls = Run(tmp_path), []

    def interrupted(*_):
        calls.append((tmp_path / "stop").exists())
        raise KeyboardInterrupt

    monkeypatch.setattr(*((run, "_process") if moment == "_process" else (time, "sleep")), interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.wait()
    assert calls == [False, True]
