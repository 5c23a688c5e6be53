"""Transcripts and scores with a known truth: drafts that are always right, never right, or right for so many words."""

from __future__ import annotations

from collections.abc import Sequence

from understudy.advise.replay import ALL
from understudy.advise.scores import Score, ScoredCycle, TranscriptScore
from understudy.advise.transcript import Transcript
from understudy.core.request import Request, SamplingParams, SpeculationCounts


def transcript(
    name: str = "a", *, num_tokens: int = 31, workload_class: str = "code", temperature: float = 0.0
) -> Transcript:
    request = Request(
        request_id=name,
        prompt_ids=tuple(range(1, 21)),
        sampling=SamplingParams(temperature=temperature, max_tokens=num_tokens, seed=0),
        workload_class=workload_class,
    )
    return Transcript(request=request, answer_ids=tuple(range(num_tokens)), seed=0)


def drafted(text: Transcript, depth: int, num_right: int, *, asking_s: float = 0.0) -> TranscriptScore:
    """A text whose every draft has this depth, and so many right words at its beginning."""
    counts = SpeculationCounts(cycles=1)
    cycles = []
    said = 1
    while said < text.num_tokens:
        wanted = min(depth, text.num_tokens - said - 1)
        accepted = min(num_right, wanted)
        emitted = accepted + 1
        counts.cycles += 1
        counts.drafted += wanted
        counts.accepted += accepted
        counts.rows += wanted
        counts.add_walk(place < accepted for place in range(min(emitted, wanted)))
        cycles.append(
            ScoredCycle(
                context=len(text.request.prompt_ids) + said - 1,
                rows=wanted,
                depth=wanted,
                accepted=accepted,
                emitted=emitted,
                asking_s=asking_s,
            )
        )
        said += emitted
    return TranscriptScore(text, counts, tuple(cycles))


def scored(
    texts: Sequence[Transcript], depth: int, num_right: int, *, drafter: str = "suffix", asking_s: float = 0.0
) -> Score:
    found = tuple(drafted(text, depth, num_right, asking_s=asking_s) for text in texts)
    return Score(ALL, drafter, depth, found)
