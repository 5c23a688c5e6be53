"""The per-request block: its form is vLLM's, and its parts agree as AIPerf checks that they do."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from understudy.core.request import Facts, SpeculationCounts
from understudy.server.speculation_block import block

KEYS = [
    "mean_acceptance_length",
    "draft_acceptance_rate",
    "acceptance_histogram",
    "num_spec_steps",
    "num_accepted_draft_tokens",
    "num_draft_tokens",
    "num_spec_tokens",
]


@st.composite
def counted(draw: st.DrawFn, most_depth: int = 16) -> SpeculationCounts:
    """The counts of some cycles, added up as the engine does."""
    counts = SpeculationCounts()
    for depth in draw(st.lists(st.integers(0, most_depth), max_size=12)):
        accepted = draw(st.integers(0, depth))
        is_cut = accepted > 0 and draw(st.booleans())  # a stop within the accepted words
        sources = draw(st.lists(st.sampled_from(["ngram", "suffix", "model"]), min_size=depth, max_size=depth))
        counts.cycles += 1
        counts.drafted += depth
        counts.rows += depth
        counts.accepted += accepted
        counts.rejected += 0 if is_cut else depth - accepted
        counts.add_walk([True] * accepted + [False] * (accepted < depth and not is_cut))
        counts.add_draft(sources, range(accepted))
    return counts


def facts(counts: SpeculationCounts, workload_class: str = "chat") -> Facts:
    num_tokens = counts.cycles + counts.accepted
    return Facts(workload_class, num_tokens, seed=1, cached_tokens=0, num_preemptions=0, counts=counts)


def check_as_aiperf(told: dict[str, Any]) -> None:
    """What AIPerf 0.13 demands of the object before it believes it."""
    histogram = told["acceptance_histogram"]
    assert isinstance(histogram, list)
    assert all(type(count) is int and count >= 0 for count in histogram)
    assert len(histogram) == told["num_spec_tokens"] + 1
    assert sum(histogram) == told["num_spec_steps"]
    assert sum(place * count for place, count in enumerate(histogram)) == told["num_accepted_draft_tokens"]
    assert told["num_accepted_draft_tokens"] <= told["num_draft_tokens"]


@given(st.lists(counted(), max_size=4), st.integers(16, 64))
def test_parts_agree(several: list[SpeculationCounts], max_depth: int) -> None:
    told: dict[str, Any] = block([facts(counts) for counts in several], max_depth=max_depth)
    assert list(told) == KEYS
    check_as_aiperf(told)
    assert told["num_spec_tokens"] == max_depth
    steps, accepted, drafted = told["num_spec_steps"], told["num_accepted_draft_tokens"], told["num_draft_tokens"]
    assert told["mean_acceptance_length"] == (1 + accepted / steps if steps else 1.0)
    assert told["draft_acceptance_rate"] == (accepted / drafted if drafted else 0.0)


def test_an_example_by_hand() -> None:
    counts = SpeculationCounts()
    for sources, path in (("aaa", (0, 1)), ("aa", ()), ("", ())):  # three and two tokens drafted; the third is plain
        counts.cycles += 1
        counts.drafted += len(sources)
        counts.accepted += len(path)
        counts.add_draft(list(sources), path)
    assert block([facts(counts)], max_depth=3) == {
        "mean_acceptance_length": 2.0,
        "draft_acceptance_rate": 0.4,
        "acceptance_histogram": [1, 0, 1, 0],
        "num_spec_steps": 2,
        "num_accepted_draft_tokens": 2,
        "num_draft_tokens": 5,
        "num_spec_tokens": 3,
    }


def test_request_without_speculation_has_an_empty_block() -> None:
    told: dict[str, Any] = block([facts(SpeculationCounts(cycles=5))], max_depth=0)
    assert told["acceptance_histogram"] == [0]
    assert (told["mean_acceptance_length"], told["draft_acceptance_rate"]) == (1.0, 0.0)
    check_as_aiperf(told)


def test_draft_deeper_than_allowed_is_told_all_the_same() -> None:
    counts = SpeculationCounts(cycles=1, drafted=3, accepted=3)
    counts.add_draft(["a"] * 3, range(3))
    check_as_aiperf(block([facts(counts)], max_depth=1))
