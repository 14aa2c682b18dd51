"""Arms in real processes, on a tiny recipe."""

import os
import signal
import threading

import psutil
import pytest

from sgnb import benchmark
from sgnb.bench import BenchmarkError, BenchmarkStopped, compare
from sgnb.bench.arm import pace
from sgnb.bench.protocol import _Arm, _shower
from sgnb.events import EpochEnded, EpochStarted, RunEnded
from sgnb.recipes import load_recipe

TINY = [
    "dataset_params=synthetic",
    "+dataset_params.train_dataset_params.num_samples=64",
    "+dataset_params.val_dataset_params.num_samples=32",
    "arch_params.width=4",
    "training_hyperparams.torch_compile_options.backend=aot_eager",
]


@pytest.fixture
def recipe():
    return load_recipe("digits_dscnn", TINY)


def children():
    return [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]


def test_epochs_are_interleaved_never_two_at_a_time_in_alternating_order(recipe, tmp_path):
    lines = []
    comparison = compare(recipe, epochs=3, out_dir=tmp_path, progress=lines.append)
    spans = []
    for name, history in comparison.arms.items():
        starts = [event.time for event in history.events if isinstance(event, EpochEnded)]
        spans += [(end, name) for end in starts]
    order = [name for _, name in sorted(spans)]
    assert order == ["baseline", "compile", "compile", "baseline", "baseline", "compile"]
    assert comparison.arms["compile"].compiled
    assert not comparison.arms["baseline"].compiled
    assert comparison.arms["baseline"]["train_loss"] == pytest.approx(
        comparison.arms["compile"]["train_loss"], rel=1e-3
    )
    assert any(line == "compile: compiling the training graph…" for line in lines)
    assert any(line.startswith("baseline: epoch 3/3: ") for line in lines)
    assert (tmp_path / "report.html").exists()
    assert not list(tmp_path.glob("**/*.pth"))
    assert children() == []


def test_a_stop_ends_all_arms(recipe, tmp_path):
    seen = []
    with pytest.raises(BenchmarkStopped):
        compare(recipe, out_dir=tmp_path, progress=seen.append, should_stop=lambda: len(seen) > 2)
    assert children() == []


def test_an_arm_that_fails_is_quoted_and_leaves_nothing_behind(recipe, tmp_path):
    arms = {"baseline": [], "broken": ["training_hyperparams.metric_to_watch=Acuracy"]}
    with pytest.raises(BenchmarkError) as caught:
        compare(recipe, arms=arms, out_dir=tmp_path, progress=False)
    assert str(caught.value).startswith("the arm broken ended before it was measured: HyperparamsError: ")
    assert "did you mean Accuracy?" in str(caught.value)
    assert children() == []


def test_a_killed_arm_is_named(recipe, tmp_path):
    arm = _Arm("a", recipe, tmp_path / "a", _shower(False), lambda: False)
    try:
        arm.wait_for(EpochStarted, 1)
        os.kill(arm._process.pid, signal.SIGKILL)
        arm._process.wait()
        with pytest.raises(BenchmarkError, match="the arm a ended before it was measured"):
            arm.run_epoch(1)
    finally:
        arm.end()


@pytest.mark.parametrize(("after", "killed"), [("baseline", "compile"), ("compile", "baseline")])
def test_when_one_arm_is_killed_the_comparison_says_so_and_ends_the_other(recipe, tmp_path, after, killed):
    def kill(line):
        if line.startswith(f"{after}: epoch 1/"):
            process = next(p for p in children() if p.cmdline()[-1].endswith(killed))
            process.kill()

    with pytest.raises(BenchmarkError, match=f"^the arm {killed} ended before it was measured\nits last words:\n"):
        compare(recipe, epochs=2, out_dir=tmp_path, progress=kill)
    assert children() == []


def test_an_arm_whose_comparison_is_gone_ends_by_itself(recipe, tmp_path):
    arm = _Arm("a", recipe, tmp_path / "a", _shower(False), lambda: False)
    arm.wait_for(EpochStarted, 1)
    arm._process.stdin.close()
    arm._process.wait(timeout=60)
    assert "the comparison that paces this run has ended" in (tmp_path / "a" / "events.jsonl").read_text()


def test_an_earlier_measurement_is_not_overwritten(recipe, tmp_path):
    (tmp_path / "baseline").mkdir()
    (tmp_path / "baseline" / "events.jsonl").touch()
    with pytest.raises(FileExistsError, match="holds an earlier measurement; give another out_dir"):
        compare(recipe, out_dir=tmp_path, progress=False)


def test_the_command_without_a_compiler_finishes_and_says_that_nothing_was_compared(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    overrides = [override for override in TINY if "aot_eager" not in override]
    assert benchmark.main(["--config-name=digits_dscnn", "--epochs=2", f"--out={tmp_path}/out", *overrides]) == 0
    printed = capsys.readouterr().out
    assert (
        "Nothing was compared: the arm compile ran eagerly like the baseline. torch.compile needs a C++ compiler"
        in printed
    )
    assert "apt-get install g++" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config-name=digits_dscn"], "no recipe has the name 'digits_dscn'; did you mean digits_dscnn?"),
        (["--config-name=digits_dscnn", "training_hyperparams.emaa=1"], "no such key; did you mean ema?"),
        (
            ["--config-name=digits_dscnn", "--epochs=0"],
            "compare: expected two arms or more and one epoch or more, got 2 and 0",
        ),
    ],
)
def test_bad_arguments_of_the_command_are_explained(arguments, message, capsys):
    assert benchmark.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_an_arm_that_is_done_stays_until_the_others_are(monkeypatch):
    read, write = os.pipe()
    with os.fdopen(read) as stdin, os.fdopen(write, "w") as comparison:
        monkeypatch.setattr("sys.stdin", stdin)
        waiting = threading.Thread(target=pace, args=[RunEnded(status="finished", seconds=1.0)])
        waiting.start()
        waiting.join(timeout=0.2)
        assert waiting.is_alive()
        comparison.close()
        waiting.join(timeout=5)
        assert not waiting.is_alive()
