"""A bar that says what is being found out about a model, where that takes more than a moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tqdm.auto import tqdm
from transformers.utils.logging import is_progress_bar_enabled

#: Seconds before it is shown.
_DELAY = 2.0


class ProgressBar:
    """Is told how far something is. Without a bar of tqdm it shows nothing.

    Args:
        bar: what shows it.
    """

    def __init__(self, bar: tqdm | None = None) -> None:
        self._bar = bar

    def __call__(self, what: str, done: int) -> None:
        """Says what is looked at now, and how much more is done."""
        if self._bar is not None:
            self._bar.set_postfix_str(what, refresh=False)
            self._bar.update(done)

    def grow(self, by: int) -> None:
        """Says how much is to be done."""
        if self._bar is not None:
            self._bar.total = by


@contextmanager
def progress(description: str) -> Iterator[ProgressBar]:
    """A bar that is shown in a terminal or a notebook after two seconds.

    As all bars of loading a model it is switched off by `transformers.utils.logging.disable_progress_bar`.

    Args:
        description: what is done.
    """
    disable = None if is_progress_bar_enabled() else True
    with tqdm(total=0, desc=description, unit="point", delay=_DELAY, disable=disable, leave=False) as bar:
        yield ProgressBar(bar)
