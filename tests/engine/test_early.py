"""A draft model begins to read before it is asked: the same words, whatever happens between the two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.engine.drawing_device import DRAFT, TARGET, Device, Passes, on_device
from tests.engine.engines import FixedCost, free_rows, steps
from understudy.assembly import Target, build_engine, make_drafter
from understudy.config import EngineConfig
from understudy.control.cost import CostModel, Load
from understudy.control.planning import Worth
from understudy.core.draft import EMPTY
from understudy.core.events import Event, Fallback, Preempted
from understudy.core.request import Request, SamplingParams, Speculation
from understudy.core.switches import Switches
from understudy.drafters.base import Budget, Context
from understudy.drafters.model_ahead import AheadModelDrafter
from understudy.engine.engine import Engine
from understudy.engine.proposal import DraftingTime

NUM_WORDS = 30
PROMPTS = [tuple(5 + (7 * start + place) % 250 for place in range(6 + 9 * start)) for start in range(4)]
FORCED = Speculation(forced=True, max_depth=3)


@dataclass
class Scene:
    """A device, an engine on it, and what the drafter was told."""

    engine: Engine
    device: Device
    drafter: AheadModelDrafter
    events: list[Event]
    begun: list[list[int]] = field(default_factory=list)
    asked: list[list[int]] = field(default_factory=list)

    def submit(self, numbers: Sequence[int], speculation: Speculation = FORCED, temperature: float = 0.0) -> None:
        for number in numbers:
            sampling = SamplingParams(temperature=temperature, max_tokens=NUM_WORDS, seed=number, ignore_eos=True)
            prompt = PROMPTS[number]
            self.engine.submit(
                Request(request_id=str(number), prompt_ids=prompt, sampling=sampling, speculation=speculation)
            )

    def words(self, numbers: Sequence[int], **settings: Any) -> dict[str, list[int]]:
        """What these texts say together."""
        self.submit(numbers, **settings)
        return self.rest()

    def rest(self) -> dict[str, list[int]]:
        """Step until all has ended."""
        said: dict[str, list[int]] = {}
        for outputs in steps(self.engine):
            for output in outputs:
                said.setdefault(output.request_id, []).extend(output.token_ids)
        self.engine.check()
        return said


Maker = Callable[..., Scene]


@pytest.fixture
def make(llama: Target, monkeypatch: pytest.MonkeyPatch) -> Maker:
    def scene(
        *,
        drafts: bool = True,
        draft_blocks: int = 64,
        draft_cost: CostModel | None = None,
        **settings: Any,
    ) -> Scene:
        device = Device(is_wrong=lambda position: position % 5 == 0)
        target = on_device(llama, monkeypatch, device)
        events: list[Event] = []
        config = EngineConfig.from_mapping({"num_threads": 1, "kv_tokens": 64 * 32} | settings)
        device.number = DRAFT
        drafter = make_drafter(
            "model", target, num_blocks=draft_blocks, draft_cost=draft_cost or FixedCost({1: 1e-4, 64: 1e-4})
        )
        assert isinstance(drafter, AheadModelDrafter)
        device.number = TARGET
        drafters = [drafter] if drafts else []
        engine = build_engine(target, config, drafters=drafters, cost=free_rows(), emit=events.append)
        made = Scene(engine, device, drafter, events)
        begin, propose = drafter.begin, drafter.propose

        def noted_begin(contexts: Sequence[Context]) -> bool:
            made.begun.append([context.sequence_id for context in contexts])
            return begin(contexts)

        def noted_propose(contexts: Sequence[Context], budgets: Sequence[Budget]) -> Any:
            made.asked.append([context.sequence_id for context in contexts])
            return propose(contexts, budgets)

        drafter.begin, drafter.propose = noted_begin, noted_propose  # type: ignore[method-assign]
        return made

    return scene


def plain(make: Maker, numbers: Sequence[int], temperature: float = 0.0) -> dict[str, list[int]]:
    """What each text says alone, without a draft."""
    said: dict[str, list[int]] = {}
    for number in numbers:
        said |= make(drafts=False).words([number], temperature=temperature)
    return said


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("numbers", [(2,), (0, 1, 2, 3)])
def test_the_same_words(make: Maker, numbers: tuple[int, ...], temperature: float) -> None:
    for speculation in (FORCED, Speculation()):
        scene = make()
        assert scene.words(numbers, temperature=temperature, speculation=speculation) == plain(
            make, numbers, temperature
        )
        assert scene.begun, "nothing began early"
        assert not [event for event in scene.events if isinstance(event, Fallback)]


def test_the_passes_that_were_begun_are_the_first_of_the_draft(make: Maker) -> None:
    """A cycle has as many passes of the draft as guesses, and the first two of them come before it is asked."""
    scene = make()
    scene.submit([2])
    for _ in range(4):
        scene.engine.step()
    del scene.device.launches[:]
    counts: list[int] = []
    propose = scene.drafter.propose

    def counting(contexts: Sequence[Context], budgets: Sequence[Budget]) -> Any:
        counts.append(len(scene.device.launches))
        return propose(contexts, budgets)

    scene.drafter.propose = counting  # type: ignore[method-assign]
    scene.engine.step()
    assert counts == [2]
    assert [number for number, _ in scene.device.launches] == [DRAFT, DRAFT, DRAFT, TARGET]


def test_nobody_is_begun_with_deeper_than_last_time(make: Maker) -> None:
    scene = make()
    scene.submit([2], speculation=Speculation(forced=True, max_depth=1))
    for _ in range(4):
        scene.engine.step()
    del scene.device.launches[:]
    scene.engine.step()
    assert len(scene.begun) >= 2
    assert len([launch for launch in scene.device.launches if launch[0] == DRAFT]) == 1


def test_nobody_is_begun_with_deeper_because_another_was(make: Maker) -> None:
    scene = make()
    for number, depth in ((1, 1), (2, 4)):
        scene.submit([number], speculation=Speculation(forced=True, max_depth=depth))
    for _ in range(4):
        scene.engine.step()
    scene.engine.abort("2")
    for _ in range(2):
        scene.engine.step()
    del scene.device.launches[:]
    scene.engine.step()
    assert scene.begun[-1] == [scene.engine._live["1"][0].sequence_id]
    assert [number for number, _ in scene.device.launches] == [DRAFT, TARGET]


def test_texts_that_are_begun_with_together_may_differ_in_depth(make: Maker) -> None:
    """One of them is cut off, and the other goes on behind what was begun."""
    depths = {"1": 1, "2": 4}
    scene = make()
    for number, depth in ((1, 1), (2, 4)):
        scene.submit([number], speculation=Speculation(forced=True, max_depth=depth))
    drafted: dict[str, set[int]] = {"1": set(), "2": set()}
    observe = scene.engine._drafting.observe

    def noted(sequence: Any, proposal: Any, *args: Any) -> None:
        drafted[sequence.request.request_id].add(proposal.bought.depth)
        observe(sequence, proposal, *args)

    scene.engine._drafting.observe = noted  # type: ignore[method-assign]
    said = scene.rest()
    assert said == plain(make, (1, 2))
    assert {number: max(found) for number, found in drafted.items()} == depths


def test_a_text_that_joins_is_read_beside_the_guesses_of_the_others(make: Maker) -> None:
    scene = make()
    scene.submit([0, 1])
    said: dict[str, list[int]] = {}
    for number in range(6):
        for output in scene.engine.step():
            said.setdefault(output.request_id, []).extend(output.token_ids)
        if number == 3:
            scene.submit([3])
    for name, words in scene.rest().items():
        said.setdefault(name, []).extend(words)
    assert said == plain(make, [0, 1, 3])
    assert any(len(begun) < len(asked) for begun, asked in zip(scene.begun, scene.asked, strict=False))


def test_too_few_blocks_for_all(make: Maker) -> None:
    """Texts that were begun with are put off, and come back."""
    scene = make(kv_tokens=96, max_context=96, prefix_cache=False)
    assert scene.words([1, 2]) == plain(make, [1, 2])
    assert [event for event in scene.events if isinstance(event, Preempted)]
    assert [0, 1] in scene.begun
    assert any(len(asked) < len(begun) for begun, asked in zip(scene.begun, scene.asked[1:], strict=False))


@pytest.mark.parametrize("draft_blocks", [1, 3, 5])
def test_the_cache_of_the_draft_is_full(make: Maker, draft_blocks: int) -> None:
    assert make(draft_blocks=draft_blocks).words(range(4)) == plain(make, range(4))


def test_an_abort_of_a_text_that_was_begun_with(make: Maker) -> None:
    expected = plain(make, [0, 1])
    scene = make()
    scene.submit([0, 1])
    said: list[int] = []
    for number, outputs in enumerate(steps(scene.engine)):
        said += [token for output in outputs if output.request_id == "1" for token in output.token_ids]
        if number == 4:
            assert scene.begun[-1] == [0, 1]
            scene.engine.abort("0")
    assert said == expected["1"]
    assert scene.begun[-1] == [1]
    scene.engine.check()
    assert not scene.engine.num_live_requests


def test_switched_off_nothing_begins_and_nothing_is_verified(make: Maker) -> None:
    expected = plain(make, [0, 1])
    scene = make()
    scene.submit([0, 1])
    said: dict[str, list[int]] = {"0": [], "1": []}
    for number, outputs in enumerate(steps(scene.engine)):
        for output in outputs:
            said[output.request_id].extend(output.token_ids)
        if number == 4:
            scene.engine.switch(Switches(enabled=False))
            begun, asked, num_launched = len(scene.begun), len(scene.asked), len(scene.device.launches)
    assert said == expected
    assert (len(scene.begun), len(scene.asked)) == (begun, asked)
    after = scene.device.launches[num_launched:]
    assert all(number == TARGET and num_rows <= 2 for number, num_rows in after)


def test_one_that_fails_when_it_begins_is_left_out_and_switched_off(make: Maker) -> None:
    scene = make()

    def failing(contexts: Sequence[Context]) -> bool:
        scene.begun.append([context.sequence_id for context in contexts])
        raise RuntimeError("lost its device")

    scene.drafter.begin = failing  # type: ignore[method-assign]
    assert scene.words([0, 1]) == plain(make, [0, 1])
    reasons = [event.reason for event in scene.events if isinstance(event, Fallback)]
    assert [reason for reason in reasons if "lost its device" in reason] == reasons[:3]
    assert reasons[3:] == ["switched off after 3 failures in a row"]
    assert len(scene.begun) == 3
    assert len(scene.asked) == 1, "it was asked in the step before it failed"


def test_what_was_begun_in_vain_is_reading(make: Maker) -> None:
    """The pass behind it is not blamed, the ledgers are told, and it does not begin again before it is asked."""
    scene = make(draft_cost=FixedCost({1: 1e3, 64: 1e3}))
    scene.submit([2])
    for _ in range(3):
        scene.engine.step()
    drafting = scene.engine._drafting
    (sequence,) = scene.engine._live["2"]
    drafting.early.begin([sequence], drafting.switches)
    time = drafting.early.settle(DraftingTime())
    assert time.ready_s == scene.drafter.ready_s
    (reading,) = time.readings
    assert list(reading.sequences) == [sequence]
    assert reading.seconds == pytest.approx(2e3, rel=0.01), "two passes"
    num_begun = len(scene.begun)
    drafting.early.begin([sequence], drafting.switches)
    assert len(scene.begun) == num_begun


def test_what_is_read_for_a_proof_is_owed_by_nobody(make: Maker) -> None:
    scene = make(draft_cost=FixedCost({1: 1e-9, 64: 1e-9}))  # so that all that it takes is reading
    scene.words([0, 1, 2])
    scene.words([3], speculation=Speculation(max_depth=0))
    assert all(known.debt_s == 0.0 for known in scene.engine.explain().classes)


def test_what_is_read_in_a_step_that_does_not_count_is_owed_by_nobody(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first pass of a size takes a hundred times as long: no later step is to pay for that."""
    scene = make(draft_cost=FixedCost({1: 1e-9, 64: 1e-9}))
    with monkeypatch.context() as patch:
        patch.setattr(Passes, "num_firsts", property(lambda passes: len(scene.device.launches)))
        scene.words([2, 3], speculation=Speculation())
        assert scene.asked, "it was read"
    scene.words([0], speculation=Speculation(max_depth=0))
    assert all(known.debt_s == 0.0 for known in scene.engine.explain().classes)


def test_what_the_device_waited_for_before_it_was_asked_is_told(make: Maker) -> None:
    """Plainly the next pass begins before the last one has landed, so all since then is the time of drafting."""
    scene = make()
    drafting, told = scene.engine._drafting, []
    propose = drafting.propose

    def noted(*args: Any, idle_since_s: float | None, **settings: Any) -> Any:
        told.append((idle_since_s, scene.engine._landed_s))
        return propose(*args, idle_since_s=idle_since_s, **settings)

    drafting.propose = noted  # type: ignore[method-assign]
    scene.words([2])
    assert told[0][0] is None, "nothing was under way"
    assert all(since_s == landed_s for since_s, landed_s in told[1:])
    assert len(told) > 3


def test_beside_a_prompt_the_next_pass_begins_before_words_are_seen(make: Maker) -> None:
    """Nothing would be drafted in it, so nobody need look at them first."""
    scene = make(max_rows_per_step=8)
    begun: list[str] = []
    begin_ahead = scene.engine._begin_ahead

    def noted(underway: Any) -> Any:
        following = begin_ahead(underway)
        begun.append(following.reason if following else "")
        return following

    scene.engine._begin_ahead = noted  # type: ignore[method-assign]
    scene.submit([0], speculation=Speculation())
    for _ in range(4):
        scene.engine.step()
    begun.clear()
    scene.submit([3], speculation=Speculation())  # 33 rows, beside which there are 7 in each step
    said = scene.rest()
    assert begun.count("nothing is drafted beside a prompt") >= 3
    assert said["3"] == plain(make, [3])["3"]


def test_a_device_that_waits_in_vain_is_held_against_asking(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is offered, and the pass without a draft is late: both are taken from the balance."""
    scene = make()
    observe, told = Worth.observe, []

    def noted(self: Worth, kind: str, *, saved: float, spent: float) -> None:
        told.append((saved, spent))
        observe(self, kind, saved=saved, spent=spent)

    monkeypatch.setattr(Worth, "observe", noted)
    scene.drafter.propose = lambda contexts, budgets: [EMPTY] * len(contexts)  # type: ignore[method-assign]
    scene.words([2], speculation=Speculation())
    assert told
    assert len(told) % 2 == 0
    assert all(saved == 0.0 and spent > 0.0 for saved, spent in told[1::2])


class Timed(CostModel):
    """Notes what it is told."""

    def __init__(self) -> None:
        super().__init__({1: 1e-4, 64: 1e-4})
        self.loads: list[Load] = []

    def observe(self, load: Load, seconds: float, base: Load | None = None) -> None:
        self.loads.append(load)


@pytest.mark.parametrize(("are_over", "num_timed"), [((False, False), 2), ((True, True), 0), ((True, False), 0)])
def test_a_pass_that_was_over_before_anybody_looked_is_not_timed(
    make: Maker, are_over: tuple[bool, bool], num_timed: int
) -> None:
    """Nor is one behind it: nobody knows when it began. Of three passes two were begun; nobody waits for the last."""
    cost = Timed()
    scene = make(draft_cost=cost)
    scene.device.is_over = False
    begin = scene.drafter.begin

    def noted(contexts: Sequence[Context]) -> bool:
        found = begin(contexts)
        for one, is_over in zip(scene.drafter._begun, are_over, strict=False):
            one.flight._launched.is_over = is_over  # type: ignore[misc]
        return found

    scene.drafter.begin = noted  # type: ignore[method-assign]
    scene.submit([2])
    for _ in range(4):
        scene.engine.step()
    del cost.loads[:]
    scene.engine.step()
    assert len(scene.begun) >= 2
    assert len(cost.loads) == num_timed
