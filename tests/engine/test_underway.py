"""What is told of a pass that has landed."""

from __future__ import annotations

from typing import Any, cast

import pytest

from understudy.control.cost import Load
from understudy.engine.proposal import DraftingTime
from understudy.engine.underway import Underway


@pytest.mark.parametrize(("ready_s", "draft_s"), [(0.0, 1.0), (1.5, 1.0), (3.0, 2.0), (9.0, 4.0)])
def test_a_draft_takes_until_its_last_guess_is_there(ready_s: float, draft_s: float) -> None:
    """Begun at 1 s, handed over at 2 s, landed at 5 s: a guess that nobody waited for was there by then."""
    load = Load(rows=3, keys=40, reads=120)
    flight = cast(Any, None)
    drafting = DraftingTime(ready_s=ready_s)
    underway = Underway([], [], [], [], flight, "why", load, load, 1.0, drafting, launched_s=2.0, num_firsts=0)
    cycle = underway.cycle([], None, 5.0 - max(2.0, min(ready_s, 5.0)), landed_s=5.0, told_s=5.5)
    assert cycle.draft_s == draft_s
    assert cycle.total_s == 4.5, "no second of it is missing"
    assert (cycle.context, cycle.num_rows) == (40, 3)
