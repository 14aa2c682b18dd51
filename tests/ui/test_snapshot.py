import html
from collections.abc import Callable

from sgnb.bench import Comparison
from sgnb.events import CompileEnded, EpochEnded, RunEnded, RunStarted
from sgnb.history import History
from sgnb.recipes import Recipe
from sgnb.ui.snapshot import MAX_ROWS, epochs_html, export_text, results_html, snapshot_html


def test_a_snapshot_holds_settings_findings_timings_and_the_chart(
    recipe: Recipe, started: RunStarted, epoch_ended: Callable[..., EpochEnded]
) -> None:
    recipe = recipe.with_hyperparams(max_epochs=3)
    text = snapshot_html(
        recipe,
        [],
        {"run": History([started, epoch_ended(1), RunEnded(status="finished", seconds=2.0)])},
        status="finished",
    )
    assert "<td>max_epochs</td><td>3</td>" in text
    assert "<td>1.25</td>" in text
    assert "<svg" in text
    assert "Last run: finished" in text
    assert "<script" not in text


def test_a_snapshot_escapes_the_recipe(recipe: Recipe) -> None:
    evil = recipe.model_copy(update={"description": "<img src=x>"})
    assert "<img" not in snapshot_html(evil, [], {}, status="idle")


def test_before_the_first_epoch_there_is_nothing_to_show(started: RunStarted) -> None:
    assert results_html({"run": History([started])}) == ""


def test_a_long_run_shows_its_last_epochs_and_says_so(
    started: RunStarted, epoch_ended: Callable[..., EpochEnded]
) -> None:
    history = History([started, *(epoch_ended(epoch) for epoch in range(1, 501))])
    text = epochs_html(history)
    assert f"The last {MAX_ROWS} of 500 epochs" in text
    assert text.count("<tr>") == MAX_ROWS + 1


def test_a_long_run_stays_small(started: RunStarted, epoch_ended: Callable[..., EpochEnded]) -> None:
    history = History([started, *(epoch_ended(epoch) for epoch in range(1, 501))])
    assert len(results_html({"run": history})) < 200_000


def test_what_cannot_be_written_says_why() -> None:
    def write() -> str:
        raise ValueError("one\ntwo")

    assert export_text(write) == "# one\n# two"


def test_a_comparison_shows_its_verdict_and_the_numbers_behind_it(
    started: RunStarted, epoch_ended: Callable[..., EpochEnded]
) -> None:
    compiled = CompileEnded(graph="train", seconds=12.0, num_graphs=1, num_breaks=0, cache_hits=0, cache_misses=1)
    slow = [epoch_ended(epoch, seconds=1.0 + epoch / 100) for epoch in range(1, 6)]
    fast = [epoch_ended(epoch, seconds=0.5 + epoch / 100) for epoch in range(1, 6)]
    arms = {"baseline": History([started, *slow]), "compile": History([started, compiled, *fast])}
    comparison = Comparison(arms)
    text = results_html(arms, comparison)
    assert html.escape(comparison.verdict) in text
    assert f"<td>{comparison.improvement_percent():.1f}</td>" in text
    assert "<td>12</td><td>24</td>" in text  # Compile seconds, and half a second saved in each epoch.
    assert "<th>baseline s</th><th>compile s</th>" in text
