"""What an engine does while nobody asks it for anything: it makes ready what the next ones would have to wait for.

On a GPU the first pass of each size takes longer than a dozen others. Which sizes are usual is known before anybody has
asked, so they come one by one, and whoever asks meanwhile waits for one of them at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from typing import cast

from understudy.core.events import EventSink, Fallback
from understudy.drafters.base import Drafter, PreparedDrafter
from understudy.runtime.runner import Runner


class Preparing:
    """Makes passes of a target, then of its drafters ready. When that fails it ends: they come when they are needed."""

    def __init__(self, runner: Runner, drafters: Items[Drafter], emit: EventSink) -> None:
        able = [cast(PreparedDrafter, drafter) for drafter in drafters if hasattr(drafter, "prepare")]
        self._passes = _of_all([runner.prepare, *(drafter.prepare for drafter in able)])
        self._emit = emit

    def one_more(self) -> bool:
        """Make one more pass ready; False if there is none. To be called while nothing is under way."""
        try:
            next(self._passes)
        except StopIteration:
            return False
        except Exception as error:  # what it had begun is over, and with it all that would have come
            self._emit(Fallback("passes", f"no more are made ready: {type(error).__name__}: {error}"))
            return False
        return True


def _of_all(makers: Items[Callable[[], Iterator[None]]]) -> Iterator[None]:
    for prepare in makers:
        yield from prepare()
