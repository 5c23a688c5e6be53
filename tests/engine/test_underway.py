"""What is told of a pass that has landed."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tests.engine.engines import new_engine
from understudy.assembly import Target
from understudy.control.cost import Load
from understudy.core.events import Cycle, Event
from understudy.core.request import Request, SamplingParams
from understudy.drafters.ngram import NgramDrafter
from understudy.engine.disturbance import Disturbance
from understudy.engine.proposal import DraftingTime
from understudy.engine.underway import Underway


@pytest.mark.parametrize(("ready_s", "draft_s"), [(0.0, 1.0), (1.5, 1.0), (3.0, 2.0), (9.0, 4.0)])
def test_a_draft_takes_until_its_last_guess_is_there(ready_s: float, draft_s: float) -> None:
    """Begun at 1 s, handed over at 2 s, landed at 5 s: a guess that nobody waited for was there by then."""
    load = Load(rows=3, keys=40, reads=120)
    flight = cast(Any, None)
    drafting = DraftingTime(ready_s=ready_s)
    underway = Underway([], [], [], [], flight, "why", load, load, 1.0, drafting, launched_s=2.0, num_firsts=0)
    cycle = underway.cycle([], None, 5.0 - max(2.0, min(ready_s, 5.0)), landed_s=5.0, sample_s=0.5)
    assert cycle.draft_s == draft_s
    assert cycle.total_s == 4.5, "no second of it is missing"
    assert (cycle.context, cycle.num_rows) == (40, 3)


def test_words_go_out_before_a_pass_is_told_of_and_nothing_stays_untold(llama: Target) -> None:
    """Who waits for a first word does not wait for the books; who asks how things stand is told of everything."""
    events: list[Event] = []
    engine = new_engine(llama, drafters=[NgramDrafter()], emit=events.append)
    engine._disturbance = Disturbance(None)  # whoever else has the cores, this step counts

    def num_told() -> int:
        return sum(isinstance(event, Cycle) for event in events)

    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    engine.submit(Request(request_id="r", prompt_ids=(5, 6, 7, 8), sampling=sampling))
    (first,) = engine.step()
    assert (len(first.token_ids), num_told()) == (1, 0)
    assert engine.explain().num_steps == num_told() == 1, "asked, it tells"
    engine.step()
    assert num_told() == 1
    num_steps = 2
    while engine.has_work:
        engine.step()
        num_steps += 1
    assert num_told() == num_steps, "an engine that rests has told of its last step, too"


def test_a_pass_is_told_of_where_all_that_ran_was_aborted(llama: Target) -> None:
    """`LLM.stream` ends requests without another step."""
    events: list[Event] = []
    engine = new_engine(llama, emit=events.append)
    engine.submit(Request(request_id="r", prompt_ids=(5, 6, 7, 8), sampling=SamplingParams(max_tokens=4)))
    engine.step()
    assert not events
    engine.abort("r")
    (output,) = engine.end_aborted()
    assert output.finish_reason == "abort"
    assert sum(isinstance(event, Cycle) for event in events) == 1
