"""One choice of one request while it lives in the engine."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from understudy.control.classes import Line, temperature_band
from understudy.control.health import Health
from understudy.control.ledger import Ledger
from understudy.core.dice import dice_of
from understudy.core.request import Facts, FinishReason, Output, Request, SpeculationCounts, TokenLogprob
from understudy.drafters.base import Context
from understudy.kv.sequence import SequenceCache
from understudy.runtime.runner import Answer
from understudy.sampling.grammar import GrammarState
from understudy.sampling.noise import NoiseKey
from understudy.sampling.processors import Sampler, log_probabilities
from understudy.text.detokenize import Detokenizer

Floats = NDArray[np.float32]

_NO_ROWS = range(0)


class Sequence:
    """A text that grows. `tokens` is all of it; the cache holds keys and values of its first `cache.length`."""

    is_hidden = False
    """Whether drafters see none of its hidden states at present: see showing.py."""
    is_met = False
    """Whether that was decided."""

    def __init__(
        self,
        sequence_id: int,
        request: Request,
        *,
        seed: int,
        choice: int,
        cache: SequenceCache,
        detokenizer: Detokenizer,
        eos_ids: tuple[int, ...],
        max_context: int,
        vocab_size: int,
        grammar: GrammarState | None = None,
    ) -> None:
        sampling = request.sampling
        self.sequence_id = sequence_id
        self.request = request
        self.choice = choice
        self.tokens = list(request.prompt_ids)
        self.cache = cache
        self.counts = SpeculationCounts()
        self.unseen: int | None = None
        """The place where the pass under way draws its next word, while that word is counted on."""
        self.ledger = Ledger()
        self.unpaid_s = 0.0
        """Time that a drafter spent on reading this text, and that no ledger holds yet."""
        self.health = Health()
        self.num_resting = 0
        """Steps for which nothing is drafted: its drafts have suddenly become wrong."""
        self.num_shown = 0
        """Positions whose hidden states drafters were told of, or never will be."""
        self.cached_tokens = 0
        self.num_preemptions = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self._num_prompt = len(request.prompt_ids)
        self._min_tokens = sampling.min_tokens
        self._max_tokens = min(sampling.max_tokens, max_context - self._num_prompt)
        self._grammar = grammar
        has_ends = grammar is not None or not sampling.ignore_eos
        self._eos_ids = frozenset(eos_ids) if has_ends else frozenset()
        self._end_ids = self._eos_ids | frozenset(sampling.stop_token_ids)
        self._detokenizer = detokenizer
        self._may_stop = detokenizer.may_stop
        self._text = ""
        self._num_spelled = self._num_prompt
        """Tokens, of all, that the text was made of: without stop strings nobody need read it before it is told."""
        self._fresh_sources: list[str] = []
        """One for each token that was not told yet."""
        self._fresh_logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: list[TokenLogprob] = []
        scores = sampling.prompt_logprobs is not None and not choice
        self._num_to_score = self._num_prompt - 1 if scores else 0
        key = NoiseKey(seed, choice)
        self.context = Context(
            sequence_id,
            self.tokens,
            self._num_prompt,
            request.tenant,
            sampling.temperature,
            key,
            sampling,
            prediction_ids=request.prediction_ids,
            forced_tokens=None if grammar is None else grammar.forced_tokens,
        )
        self.dice = dice_of(sampling, seed=seed, choice=choice)
        self._sampler = Sampler(
            sampling,
            key,
            prompt_ids=request.prompt_ids,
            end_ids=self._end_ids,
            vocab_size=vocab_size,
        )
        self._remembers = self._sampler.remembers

    @cached_property
    def line(self) -> Line:
        """Its class and about its temperature: the texts that it is like."""
        return Line(self.request.workload_class, temperature_band(self.request.sampling.temperature))

    @property
    def num_generated(self) -> int:
        """Tokens said so far."""
        return len(self.tokens) - self._num_prompt

    @property
    def num_left(self) -> int:
        """Tokens that may still be said."""
        return self._max_tokens - self.num_generated

    @property
    def num_pending(self) -> int:
        """Tokens to compute, whose keys and values the cache lacks; one, once the prompt is computed.

        A word that a device has drawn and nobody has seen yet is one of them, unless it is sure to be the last.
        """
        num_tokens = len(self.tokens)
        if self.unseen is None:
            return num_tokens - self.cache.length
        is_last = num_tokens - self._num_prompt >= self._max_tokens - 1
        return 0 if is_last else num_tokens + 1 - self.cache.length

    def pending(self, count: int) -> list[int]:
        """The first `count` of the tokens to compute; the unseen word as `kernels.interface.Passes` names it."""
        length = self.cache.length
        known = self.tokens[length : length + count]
        return known if len(known) == count or self.unseen is None else [*known, -1 - self.unseen]

    @property
    def scores_prompt(self) -> bool:
        """Whether the log probabilities of the prompt's tokens are wanted and not all known yet."""
        return len(self._prompt_logprobs) < self._num_to_score

    def rows_to_score(self, num_known: int) -> range:
        """Of the next known rows, those that are followed by a prompt token whose log probability is wanted."""
        if not self._num_to_score:
            return _NO_ROWS
        start = self.cache.length
        first, last = len(self._prompt_logprobs), min(start + num_known, self._num_to_score)
        assert first >= start or first >= last, "a row that was not computed cannot be scored"
        return range(first - start, last - start) if first < last else range(0)

    def score(self, logits: Floats) -> None:
        """Take the rows' logits [rows, vocabulary] for the log probabilities of the prompt tokens that follow them."""
        wanted = self.request.sampling.prompt_logprobs
        assert wanted is not None or not len(logits)
        for row in logits:
            token = self.tokens[len(self._prompt_logprobs) + 1]
            if not np.isfinite(row.max()):
                raise FloatingPointError(f"the model's logits before the prompt's token {token} are not finite")
            self._prompt_logprobs.append(log_probabilities(row, token, wanted or 0))

    def draw(self, answer: Answer, row: int) -> int:
        """Draw the next word from what the target answered at a row. Logits are used up."""
        if answer.logits is None:
            return self._drawn(answer, row)
        logits = answer.logits[row]
        wanted = self.request.sampling.logprobs
        raw = logits.copy() if wanted is not None else logits
        token = self._sampler.sample(
            logits,
            position=len(self.tokens),
            num_generated=self.num_generated,
            allowed=None if self._grammar is None else self._grammar.allowed(),
        )
        if wanted is not None:
            self._fresh_logprobs.append(log_probabilities(raw, token, wanted))
        return token

    def foresee(self, answer: Answer, row: int, position: int) -> int:
        """What would be drawn at a later position, as far as can be told now: what a grammar will allow there cannot.

        Logits are used up.
        """
        if answer.logits is None:
            return self._drawn(answer, row)
        return self._sampler.sample(answer.logits[row], position=position, num_generated=self.num_generated)

    def _drawn(self, answer: Answer, row: int) -> int:
        """The word that the device drew; it marks what it cannot draw."""
        assert answer.words is not None
        token = answer.words[row]
        if token < 0:
            raise FloatingPointError(f"the model's logits at position {len(self.tokens)} are not finite")
        return token

    def append(self, token: int, source: str = "") -> bool:
        """Say one more token, which the drafter `source` had foreseen; return whether the text goes on."""
        self.tokens.append(token)
        if self._remembers:
            self._sampler.append(token)
        self._fresh_sources.append(source)
        num_tokens = len(self.tokens)
        if token in self._end_ids:  # it is no part of the text
            self._spell(num_tokens - 1)
            self._num_spelled = num_tokens
            self._finish("stop", None if token in self._eos_ids else token)
            return False
        num_generated = num_tokens - self._num_prompt
        if self._may_stop:
            self._text += self._detokenizer.add(token, may_stop=num_generated >= self._min_tokens)
            self._num_spelled = num_tokens
        if self._grammar is not None:
            self._grammar.advance(token)
        if self._detokenizer.stopped is not None:
            self._finish("stop", self._detokenizer.stopped)
        elif self._grammar is not None and self._grammar.is_complete:
            self._finish("stop", None)
        elif num_generated >= self._max_tokens:
            self._finish("length", None)
        return self.finish_reason is None

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """End the text from outside: an abort or an error."""
        self.error = error
        self._finish(reason, None)

    def take_output(self) -> Output:
        """What was said since the last call; with the first word, what was found of the prompt."""
        tokens, num_fresh = self.tokens, len(self._fresh_sources)
        self._spell(len(tokens))
        is_first = self._num_to_score and num_fresh and num_fresh == self.num_generated
        output = Output(
            self.request.request_id,
            self.choice,
            tuple(tokens[len(tokens) - num_fresh :]),
            self._text,
            tuple(self._fresh_logprobs),
            self.finish_reason,
            self.stop_reason,
            self.error,
            tuple(self._fresh_sources),
            tuple(self._prompt_logprobs) if is_first else (),
            self._facts() if self.finish_reason is not None else None,
        )
        self._text = ""
        self._fresh_sources.clear()
        self._fresh_logprobs.clear()
        return output

    def _spell(self, num_tokens: int) -> None:
        """Turn what was said into text, up to so many of all tokens."""
        if self._num_spelled < num_tokens:
            self._text += self._detokenizer.add_all(self.tokens[self._num_spelled : num_tokens])
            self._num_spelled = num_tokens

    def _facts(self) -> Facts:
        return Facts(
            self.request.workload_class,
            self.num_generated,
            self.context.noise.seed,
            self.cached_tokens,
            self.num_preemptions,
            self.counts,
        )

    def _finish(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason
        self._spell(len(self.tokens))
        if self._detokenizer.stopped is None:
            self._text += self._detokenizer.finish()
