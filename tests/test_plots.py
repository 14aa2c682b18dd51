"""Pictures of histories: valid, escaped, decimated."""

from xml.etree import ElementTree

from sgnb.plots import curve_svg, history_figure, timing_figure, timing_svg


def test_bars_have_a_description_and_a_title_each_and_are_valid_xml(a_history):
    svg = timing_svg({"baseline": a_history([1.0, 2.0]), "<b>": a_history([3.0])})
    root = ElementTree.fromstring(svg)
    titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles[0] == "Seconds of each epoch"
    assert "baseline, epoch 2, waiting for data: 0.200 s" in titles
    assert "<b>, epoch 1, training: 2.100 s" in titles
    assert "Median of an epoch: baseline 1.50 s, <b> 3.00 s." in svg.replace("&lt;", "<").replace("&gt;", ">")


def test_curves_leave_gaps_and_stay_small():
    values = [None if i % 7 == 0 else float("nan") if i % 11 == 0 else i / 3 for i in range(20_000)]
    svg = curve_svg({"train loss": values, "flat": [1.0]}, "Loss & more")
    ElementTree.fromstring(svg)
    assert len(svg) < 20_000
    assert "nan" not in svg.lower().replace("finance", "")


def test_nothing_yet_is_drawn_as_nothing_yet():
    ElementTree.fromstring(timing_svg({}))
    ElementTree.fromstring(curve_svg({}, "Loss"))


def test_figures_hold_the_columns(a_history):
    figure = timing_figure({"baseline": a_history([1.0, 2.0])})
    assert sum(trace.y[1] for trace in figure.data) == 2.0
    assert [trace.name for trace in history_figure(a_history([1.0])).data] == [
        "train_loss",
        "valid_loss",
        "valid/Accuracy",
    ]
