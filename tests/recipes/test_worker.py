"""The inside of a run's process."""

from sgnb.events import EVENTS_FILE, EventWriter, RunEnded, read_events
from sgnb.recipes.worker import train_in


def test_a_recipe_that_cannot_be_read_leaves_an_end(tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text("architecture: dscnn\n")
    assert train_in(tmp_path) == 1
    (end,) = read_events(tmp_path / EVENTS_FILE)[0]
    assert isinstance(end, RunEnded)
    assert end.reason == "HyperparamsError: train_dataloader: is required, and is missing"
    assert "Traceback" in capsys.readouterr().err


def test_an_end_that_the_trainer_wrote_is_the_only_one(tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        "architecture: dscnn\ntrain_dataloader: digits_train\narch_params: {width: 2}\n"
        "dataset_params: {synthetic: true, train_dataset_params: {num_samples: 64}}\n"
        "training_hyperparams: {max_epochs: 1, silent_mode: true, train_metrics_list: [BinaryAccuracy]}\n"
    )
    assert train_in(tmp_path) == 1
    ends = [event for event in read_events(tmp_path / EVENTS_FILE)[0] if isinstance(event, RunEnded)]
    assert [end.status for end in ends] == ["failed"]


def test_half_a_line_of_a_killed_process_does_not_spoil_the_file(tmp_path):
    (tmp_path / EVENTS_FILE).write_text('{"event": "RunEn')
    writer = EventWriter(tmp_path / EVENTS_FILE)
    writer(RunEnded(status="failed", seconds=1.0))
    writer.close()
    assert (tmp_path / EVENTS_FILE).read_text().count("\n") == 2
