"""Predicted outputs: the caller sends along what it expects the answer to be, say a file of which a line changes.

The prediction is followed from its beginning, token by token, for as long as the answer agrees with it. Where the
answer leaves it, the last words that were said are searched in the prediction: the longest match of at least two
tokens is where it is followed on from, the first one ahead of where it was left if several are as long. What was
inserted, left out or replaced is so passed over.

A sequence keeps its place and the tokens that it has read. The places of every pair of tokens are found once for all
choices of a request, when the first of them leaves the prediction.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar
from weakref import WeakValueDictionary

from understudy.core.draft import EMPTY, Draft
from understudy.drafters.base import Budget, Context

_CONFIDENCE = 0.9
"""Of a prediction that was right so far."""
_LEAST_MATCH = 2
_MOST_MATCH = 16
_MOST_PLACES = 32
"""Places of a pair that are looked at on either side of where the prediction was left: some pairs are everywhere."""
_MOST_SEARCHED = 1 << 17
"""Tokens at the beginning of a prediction that are searched: to find their pairs takes a tenth of a second."""


class _Pairs:
    """Where every two tokens in a row stand in a prediction."""

    def __init__(self, prediction: Sequence[int]) -> None:
        self._prediction = prediction

    @cached_property
    def places(self) -> dict[tuple[int, int], list[int]]:
        """Two tokens -> the places behind them, ascending."""
        prediction = self._prediction[:_MOST_SEARCHED]
        places: dict[tuple[int, int], list[int]] = {}
        for place in range(_LEAST_MATCH, len(prediction) + 1):
            places.setdefault((prediction[place - 2], prediction[place - 1]), []).append(place)
        return places


@dataclass(slots=True)
class _Reading:
    """Where one answer is in its prediction."""

    pairs: _Pairs
    place: int | None = 0
    """Of the token that is expected next; None where the answer has left the prediction."""
    left_at: int = 0
    """Where it was followed last."""
    num_read: int = 0
    """Tokens of the answer that were compared."""
    num_matched: int | None = field(default=None)
    """Tokens that agreed since it was found again; None before it was ever lost."""

    @property
    def confidence(self) -> float:
        """The more tokens agreed since it was found again, the surer."""
        matched = self.num_matched
        return _CONFIDENCE if matched is None else _CONFIDENCE * matched / (matched + 2.0)


class PredictionDrafter:
    """Drafts what the caller expects the answer to be."""

    name: ClassVar[str] = "prediction"
    is_certain: ClassVar[bool] = False

    def __init__(self) -> None:
        self._readings: dict[int, _Reading] = {}  # by sequence id
        # by identity of the prediction, which the choices of a request share, for as long as one of them reads it
        self._pairs: WeakValueDictionary[int, _Pairs] = WeakValueDictionary()

    def concerns(self, context: Context) -> bool:
        """Whether the caller sent a prediction."""
        return bool(context.prediction_ids)

    def start(self, context: Context) -> None:
        """Begin to read; nothing is searched before the answer leaves the prediction."""
        prediction = context.prediction_ids
        self._readings[context.sequence_id] = _Reading(self._pairs.setdefault(id(prediction), _Pairs(prediction)))

    def stop(self, context: Context, *, finished: bool) -> None:
        """Forget the sequence."""
        self._readings.pop(context.sequence_id, None)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """Return one chain for each context, empty where the answer has left its prediction."""
        return [self._propose(context, budget) for context, budget in zip(contexts, budgets, strict=True)]

    def _propose(self, context: Context, budget: Budget) -> Draft:
        reach = min(budget.max_depth, budget.max_rows)
        if reach <= 0 or not context.prediction_ids:
            return EMPTY
        if context.sequence_id not in self._readings:
            self.start(context)
        reading = self._readings[context.sequence_id]
        _follow(reading, context)
        if reading.place is None:
            _find(reading, context)
        if reading.place is None:
            return EMPTY
        tokens = context.prediction_ids[reading.place : reading.place + reach]
        return Draft.chain(tokens, confidence=[reading.confidence] * len(tokens), source=self.name) if tokens else EMPTY


def _follow(reading: _Reading, context: Context) -> None:
    """Compare the words that came since the last look, until one differs."""
    first = context.num_prompt_tokens + reading.num_read
    prediction, place = context.prediction_ids, reading.place
    for token in context.tokens[first:]:
        if place is None:
            break
        if place < len(prediction) and prediction[place] == token:
            place += 1
            reading.num_matched = None if reading.num_matched is None else reading.num_matched + 1
        else:
            reading.left_at, place = place, None
    reading.place = place
    reading.num_read = len(context.tokens) - context.num_prompt_tokens


def _find(reading: _Reading, context: Context) -> None:
    """Look for the last words in the prediction, and go on behind the longest match."""
    said = context.tokens[max(context.num_prompt_tokens, len(context.tokens) - _MOST_MATCH) :]
    if len(said) < _LEAST_MATCH:
        return
    places = reading.pairs.places.get((said[-2], said[-1]), [])
    ahead = bisect_left(places, reading.left_at)
    nearest = places[ahead : ahead + _MOST_PLACES] + places[max(0, ahead - _MOST_PLACES) : ahead][::-1]
    lengths = [_agreement(context.prediction_ids, place, said) for place in nearest]
    if lengths:
        reading.num_matched = max(lengths)
        reading.place = nearest[lengths.index(reading.num_matched)]


def _agreement(prediction: Sequence[int], place: int, said: Sequence[int]) -> int:
    """How many tokens before a place of the prediction are the last ones that were said."""
    length = 0
    while length < min(place, len(said)) and prediction[place - 1 - length] == said[-1 - length]:
        length += 1
    return length
