"""Figures of a comparison against ones computed by hand and from the saved rows."""

import csv
import math
import random
import statistics

import pytest

from sgnb.bench import Comparison

BASELINE = [10.0, 10.2, 9.9, 10.1, 10.3]


@pytest.fixture
def compare_with(a_history):
    def compare(seconds, **values):
        return Comparison({"baseline": a_history(BASELINE), "compile": a_history(seconds, **values)})

    return compare


def test_the_improvement_is_the_pages_formula_on_medians(compare_with):
    comparison = compare_with([8.0, 8.1, 7.9, 8.2, 12.0], compile_seconds=30.0)
    assert comparison.improvement_percent() == pytest.approx(100 * (10.1 - 8.1) / 10.1)


def test_the_interval_is_students_t_on_the_log_ratios(compare_with):
    seconds = [8.0, 8.1, 7.9, 8.2, 8.3]
    logs = [math.log(s / b) for s, b in zip(seconds, BASELINE, strict=True)]
    half = 2.7764451 * statistics.stdev(logs) / math.sqrt(5)  # t of 4 degrees of freedom, from a printed table.
    low, high = compare_with(seconds).interval()
    assert low == pytest.approx(100 * (1 - math.exp(statistics.fmean(logs) + half)))
    assert high == pytest.approx(100 * (1 - math.exp(statistics.fmean(logs) - half)))


def test_a_gain_names_percent_interval_compile_time_and_break_even(compare_with):
    comparison = compare_with([8.0, 8.2, 7.9, 8.1, 8.3], compile_seconds=29.0)
    assert comparison.break_even_epochs() == pytest.approx(14.5)
    assert comparison.verdict == (
        "An epoch of compile took 19.8 % less time: 8.10 s against 10.10 s, the medians of 5 epochs "
        "(95 % interval 19.4 to 20.2 %). Compiling took 29.0 s (cold cache), which is repaid after 15 epochs."
    )


def test_a_loss_is_called_one_and_is_never_repaid(compare_with):
    comparison = compare_with([value * 1.1 for value in BASELINE], compile_seconds=30.0, cache=(2, 0))
    assert comparison.break_even_epochs() is None
    assert comparison.verdict.startswith("An epoch of compile took 10.0 % more time: ")
    assert comparison.verdict.endswith("Compiling took 30.0 s (warm cache), which is never repaid.")


def test_noise_is_called_noise(compare_with):
    comparison = compare_with([10.4, 9.8, 10.2, 9.9, 10.3])
    assert comparison.within_noise()
    assert comparison.verdict.startswith(
        "Within noise: compile took 10.20 s against 10.10 s, the medians of 5 epochs (1.0 % more; 95 % interval -"
    )


def test_one_epoch_says_nothing(a_history):
    comparison = Comparison({"baseline": a_history([1.0]), "compile": a_history([0.5])})
    assert comparison.interval() is None
    assert comparison.within_noise()
    assert (
        comparison.verdict
        == "Nothing can be said of compile after 1 epoch: 0.50 s against 1.00 s, the medians of 1 epochs."
    )


def test_an_arm_that_fell_back_compared_nothing(compare_with):
    comparison = compare_with([5.0] * 5, failed="there is no C++ compiler.")
    assert comparison.verdict == (
        "Nothing was compared: the arm compile ran eagerly like the baseline. there is no C++ compiler."
    )


@pytest.mark.parametrize("loss", [0.6, float("nan")])
def test_losses_that_differ_are_said(compare_with, loss):
    assert "Mind that the last training losses differ by" in compare_with([8.0] * 5, loss=loss).verdict


def test_no_gain_is_reported_where_there_is_none_in_nineteen_of_twenty(a_history):
    rng = random.Random(0)
    noisy = [[rng.gauss(10, 0.3) for _ in range(5)] for _ in range(800)]
    pairs = [Comparison({"a": a_history(x), "b": a_history(y)}) for x, y in zip(noisy[::2], noisy[1::2], strict=True)]
    share = sum(not pair.within_noise("b") for pair in pairs) / len(pairs)
    assert 0.02 < share < 0.08  # 5 %, give or take two and a half standard errors of 400 repeats.


def test_every_figure_can_be_recomputed_from_the_saved_rows(compare_with, tmp_path):
    comparison = compare_with([8.0, 8.2, 7.9, 8.1, 8.3], compile_seconds=30.0)
    report = comparison.save(tmp_path)
    rows = list(csv.DictReader((tmp_path / "rows.csv").read_text().splitlines()))
    by_arm = {arm: [float(r["epoch_seconds"]) for r in rows if r["arm"] == arm] for arm in ("baseline", "compile")}
    medians = {arm: statistics.median(values) for arm, values in by_arm.items()}
    improvement = 100 * (medians["baseline"] - medians["compile"]) / medians["baseline"]
    assert f"improvement: compile {improvement:.1f} %" in comparison.table()
    loaded = Comparison.load(tmp_path)
    assert loaded.rows() == comparison.rows()
    assert loaded.verdict == comparison.verdict
    page = report.read_text()
    assert "<svg" in page
    assert "a &lt;fast&gt; one" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page


def test_loading_what_is_not_there_says_what_was_expected(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no comparison; expected a directory that holds comparison\.json$"):
        Comparison.load(tmp_path)


def test_it_shows_itself_in_a_notebook(compare_with):
    comparison = compare_with([8.0] * 5)
    assert "<table>" in comparison._repr_html_()
    assert len(comparison.figure().data) == 6
