import logging

import pytest

from sgnb.ui.guard import Guard, error_html


def fail(text: str) -> None:
    raise ValueError(text)


def test_an_error_of_a_callback_is_shown_logged_and_kept(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard()
    with caplog.at_level(logging.ERROR):
        guard(fail)("no <b>such</b> thing")
    assert [str(error) for error in guard.errors] == ["no <b>such</b> thing"]
    assert "<b>ValueError</b>" in guard.notice.value
    assert "no &lt;b&gt;such&lt;/b&gt; thing" in guard.notice.value
    assert "<b>such</b>" not in guard.notice.value
    assert guard.notice.layout.display is None
    assert "a callback of the panel failed" in caplog.text


def test_the_next_action_takes_the_notice_away() -> None:
    guard = Guard()
    guard(fail)("once")
    guard(lambda: None)()
    assert (guard.notice.value, guard.notice.layout.display) == ("", "none")


def test_what_failed_in_a_thread_stays_until_it_is_cleared() -> None:
    guard = Guard()
    guard(fail, user_action=False)("in the pump")
    guard(lambda: None)()
    assert "in the pump" in guard.notice.value
    guard.clear()
    assert guard.notice.value == ""


def test_an_error_is_announced_to_screen_readers() -> None:
    assert error_html(ValueError("x")).startswith('<div role="alert"')
