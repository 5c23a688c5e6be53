"""What only the first drafts of a process cost, paid before anybody asks.

A drafter's first words load what is compiled, which takes as long as ten later ones. Held against it, they would let it
rest for a hundred steps, and a short run would end without a draft. So an engine that is thrown away drafts a little,
and nobody learns anything from that.
"""

from __future__ import annotations

from understudy.core.request import Request, SamplingParams, Speculation
from understudy.engine.engine import Engine

_PROMPT_IDS = (1, 2, 3, 4, 5, 6, 7) * 3
"""It repeats itself, so that every drafter has something to say."""
_NUM_TOKENS = 12


def warm_up(thrown_away: Engine) -> None:
    """Draft for two short texts, as a greedy one is drafted for and as a drawn one is."""
    if thrown_away.max_context <= len(_PROMPT_IDS) + _NUM_TOKENS:
        return
    for temperature in (0.0, 1.0):
        thrown_away.submit(
            Request(
                request_id="warm-up",
                prompt_ids=_PROMPT_IDS,
                sampling=SamplingParams(temperature=temperature, max_tokens=_NUM_TOKENS, seed=0, ignore_eos=True),
                speculation=Speculation(forced=True),
                tenant="warm-up",
            )
        )
        while thrown_away.has_work:
            thrown_away.step()
