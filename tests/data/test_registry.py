"""Loaders by name, and their errors."""

import pytest

from sgnb.data import build_loader
from sgnb.data.registry import check_loader_params, find_dataloader
from sgnb.hyperparams import HyperparamsError


def test_a_loader_is_seeded_and_shuffles_for_training_only():
    def order(name, seed):
        loader = build_loader(
            find_dataloader(name, "where"), {}, {"batch_size": 32}, where="train", synthetic=True, seed=seed
        )
        return next(iter(loader))[1].tolist()

    assert order("digits_train", 1) == order("digits_train", 1) != order("digits_train", 2)
    assert order("digits_val", 1) == order("digits_val", 2) == [i % 10 for i in range(32)]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_sise": 3}, "dataset_params.train_dataloader_params.batch_sise: no such key; did you mean batch_size?"),
        ({"batch_size": 0}, "dataset_params.train_dataloader_params.batch_size: expected at least 1, got 0"),
        (
            {"persistent_workers": True},
            "dataset_params.train_dataloader_params.persistent_workers: needs num_workers of at least 1",
        ),
    ],
)
def test_wrong_parameters_are_named(values, message):
    with pytest.raises(HyperparamsError) as caught:
        check_loader_params(values, "train")
    assert str(caught.value) == message


def test_unknown_names_and_arguments_are_named():
    with pytest.raises(HyperparamsError) as caught:
        find_dataloader("digit_train", "train_dataloader")
    assert str(caught.value) == (
        "train_dataloader: expected one of digits_train, digits_val, got 'digit_train'; did you mean digits_train?"
    )
    with pytest.raises(
        HyperparamsError, match=r"^dataset_params\.train_dataset_params: digits_train does not take them: "
    ):
        build_loader(find_dataloader("digits_train", ""), {"root": "x"}, {}, where="train")
