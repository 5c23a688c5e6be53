"""What speculation did for one request, in the form that vLLM gives it and that benchmarks look for.

Its parts agree with each other, as readers check: the histogram has a place for each number of tokens from none to the
deepest draft allowed, sums up to the steps, and weighted by its places to the accepted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from understudy.core.request import Facts, SpeculationCounts


def block(facts: Sequence[Facts], *, max_depth: int) -> dict[str, object]:
    """The object `metrics.speculative_decoding` of a request whose drafts may be so deep, over all given choices."""
    counts = SpeculationCounts()
    for choice in facts:
        counts.add(choice.counts)
    deepest = max(max_depth, len(counts.accepted_histogram) - 1)  # what happened is told, allowed or not
    histogram = counts.accepted_histogram + [0] * (deepest + 1 - len(counts.accepted_histogram))
    return {
        "mean_acceptance_length": 1.0 + counts.accepted / counts.drafts if counts.drafts else 1.0,
        "draft_acceptance_rate": counts.accepted / counts.drafted if counts.drafted else 0.0,
        "acceptance_histogram": histogram,
        "num_spec_steps": counts.drafts,
        "num_accepted_draft_tokens": counts.accepted,
        "num_draft_tokens": counts.drafted,
        "num_spec_tokens": deepest,
    }
