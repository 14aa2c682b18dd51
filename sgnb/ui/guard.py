"""One guard for every callback: an error of a callback is seen nowhere in a notebook, unless the panel shows it."""

from __future__ import annotations

import functools
import html
import logging
import traceback
from collections.abc import Callable
from typing import Any

import ipywidgets as widgets

logger = logging.getLogger(__name__)

_ERROR = "color:var(--jp-error-color1,#c62828)"


class Guard:
    """Wraps callbacks. What one raises is shown in `notice`, logged and kept in `errors`; the panel goes on."""

    def __init__(self) -> None:
        self.notice = widgets.HTML(layout=widgets.Layout(width="auto", display="none"))
        self.errors: list[Exception] = []
        self._stays = False

    def __call__(self, callback: Callable[..., Any], *, user_action: bool = True) -> Callable[..., None]:
        """Return `callback` guarded. A `user_action` takes an earlier notice away; that of a thread stays."""

        @functools.wraps(callback)
        def guarded(*args: Any, **kwargs: Any) -> None:
            if user_action and not self._stays:
                self._say("")
            try:
                callback(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - showing any error is what this is for.
                self.show(error, stays=not user_action)

        return guarded

    def clear(self) -> None:
        """Take the notice away."""
        self._stays = False
        self._say("")

    def show(self, error: Exception, *, stays: bool = False) -> None:
        """Show and log an error."""
        self._stays = stays
        self.errors.append(error)
        logger.error("a callback of the panel failed", exc_info=error)
        self._say(error_html(error))

    def _say(self, text: str) -> None:
        self.notice.value = text
        self.notice.layout.display = None if text else "none"


def error_html(error: Exception) -> str:
    """Return what the panel says of an error: its sentence, and where it happened for those who want to know."""
    where = html.escape("".join(traceback.format_exception(error)))
    return (
        f'<div role="alert" style="{_ERROR}"><b>{html.escape(type(error).__name__)}</b>: '
        f'<span style="white-space:pre-wrap">{html.escape(str(error))}</span>'
        f"<details><summary>Where it happened</summary>"
        f'<pre style="max-height:240px;overflow:auto">{where}</pre></details></div>'
    )
