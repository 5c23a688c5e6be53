"""What is asked and what is answered: plain data, checked at the door and trusted inside."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal, NamedTuple

from understudy.errors import InvalidRequest

FinishReason = Literal["stop", "length", "abort", "error"]
GrammarKind = Literal["json_schema", "regex", "lark"]
GRAMMAR_KINDS = ("json_schema", "regex", "lark")
MAX_SEED = 2**64 - 1


def _number(name: str, value: object, *, low: float, high: float, low_open: bool = False) -> None:
    """Refuse anything but a real number within the bounds; NaN is none, and True is not 1."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        bounds = _bounds(low, high, low_open=low_open)
        raise InvalidRequest(f"{name} must be a number, not {value!r}.", f"Give one {bounds}.", parameter=name)
    inside = (low < value if low_open else low <= value) and value <= high  # NaN is in no order with anything
    if not inside:
        shown = "a huge number" if isinstance(value, int) and abs(value) > 10**40 else f"{value}"
        bounds = _bounds(low, high, low_open=low_open)
        raise InvalidRequest(f"{name} is {shown}.", f"Give a number {bounds}.", parameter=name)


def _bounds(low: float, high: float, *, low_open: bool) -> str:
    return f"{'above' if low_open else 'at least'} {low:g}" + (f" and at most {high:g}" if high < math.inf else "")


def _whole(name: str, value: object, *, low: int, high: int) -> None:
    """Refuse anything but a whole number within the bounds."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        shown = "a huge number" if isinstance(value, int) and abs(value) > 10**40 else repr(value)
        raise InvalidRequest(f"{name} is {shown}.", f"Give a whole number from {low} to {high}.", parameter=name)


def _flag(name: str, value: object) -> None:
    """Refuse anything but true or false."""
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false.", parameter=name)


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must look like: every word is drawn from those that can still become it.

    The text ends (`stop`) where nothing can follow. The minimum length gives way to it, and so does `ignore_eos`.
    """

    kind: GrammarKind
    text: str
    """A JSON schema, a regular expression, or a grammar in llguidance's dialect of Lark."""

    def __post_init__(self) -> None:
        if self.kind not in GRAMMAR_KINDS:
            raise InvalidRequest(f"There is no grammar of kind {self.kind!r}.", parameter="response_format")
        if not isinstance(self.text, str) or not self.text:
            raise InvalidRequest("A grammar must be a text that is not empty.", parameter="response_format")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the target's words are drawn. The defaults are OpenAI's."""

    temperature: float = 1.0
    """0 takes the largest logit."""
    top_k: int = 0
    """Keep every token not below the k-th largest; 0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    """No end of text and no stop id before this many tokens."""
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    """An end of text is a token like others; not under a grammar, which says where a text ends."""
    seed: int | None = None
    """None: one is drawn and returned, so that any answer can be replayed."""
    n: int = 1
    logprobs: int | None = None
    """How many alternatives to report beside each token; None reports nothing."""
    prompt_logprobs: int | None = None
    """The same for the prompt's own tokens, all but the first. The whole prompt is computed then, cached or not.

    They come with choice 0 alone: the prompt is the same for all."""
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, low=0.0, high=100.0)
        _number("top_p", self.top_p, low=0.0, high=1.0, low_open=True)
        _number("min_p", self.min_p, low=0.0, high=1.0)
        _number("repetition_penalty", self.repetition_penalty, low=0.01, high=100.0)
        _number("presence_penalty", self.presence_penalty, low=-100.0, high=100.0)
        _number("frequency_penalty", self.frequency_penalty, low=-100.0, high=100.0)
        _whole("top_k", self.top_k, low=0, high=2**31 - 1)
        _whole("max_tokens", self.max_tokens, low=1, high=2**31 - 1)
        _whole("min_tokens", self.min_tokens, low=0, high=self.max_tokens)
        _whole("n", self.n, low=1, high=128)
        if self.seed is not None:
            _whole("seed", self.seed, low=0, high=MAX_SEED)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), low=0, high=100)
        self._check_tokens_and_stops()

    def _check_tokens_and_stops(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequest("logit_bias must map token ids to numbers.", parameter="logit_bias")
        for token, bias in self.logit_bias.items():
            _whole("logit_bias", token, low=0, high=2**31 - 1)
            _number("logit_bias", bias, low=-1e6, high=1e6)
        if not isinstance(self.stop, tuple) or not all(isinstance(s, str) and s for s in self.stop):
            raise InvalidRequest("stop must be a tuple of non-empty strings.", parameter="stop")
        if not isinstance(self.stop_token_ids, tuple | list):
            raise InvalidRequest("stop_token_ids must be a tuple of token ids.", parameter="stop_token_ids")
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, low=0, high=2**31 - 1)
        _flag("ignore_eos", self.ignore_eos)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """What a request allows speculation to do. `forced` skips the cost rule: only bench and verify use it."""

    enabled: bool = True
    max_depth: int = 16
    max_rows: int = 32
    """Drafted rows in one pass; rows that a drafter only learns from ride beside them if they are no more than this."""
    drafter: str | None = None
    """Only this drafter; None allows all."""
    forced: bool = False

    def __post_init__(self) -> None:
        _flag("enabled", self.enabled)
        _flag("forced", self.forced)
        _whole("max_depth", self.max_depth, low=0, high=64)
        _whole("max_rows", self.max_rows, low=0, high=256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt, as token ids, and how to continue it."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    speculation: Speculation = field(default_factory=Speculation)
    tenant: str = ""
    """Cached prefixes and learned drafts are never shared between tenants."""
    workload_class: str = "other"
    prediction_ids: tuple[int, ...] = ()
    """What the caller expects the answer to be: a draft that costs nothing."""
    priority: int = 0
    """Who waits is served in this order, the lowest number first; equals in order of arrival."""

    def __post_init__(self) -> None:
        for name in ("request_id", "tenant", "workload_class"):
            if not isinstance(getattr(self, name), str):
                raise InvalidRequest(f"{name} must be a text.", parameter=name)
        for name, parameter in (("prompt_ids", "prompt"), ("prediction_ids", "prediction")):
            value = getattr(self, name)
            if not isinstance(value, tuple) or not set(map(type, value)) <= {int}:
                raise InvalidRequest(f"{name} must be a tuple of whole numbers.", parameter=parameter)
        _whole("priority", self.priority, low=-(2**31), high=2**31 - 1)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The target's own log probabilities at one position, before any processor."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The most likely ids with their log probabilities, best first, the lower id on a tie."""


@dataclass(slots=True)
class SpeculationCounts:
    """What speculation did for one choice. Acceptance counts positions; cost counts rows."""

    cycles: int = 0
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0
    rows: int = 0
    reached_by_position: list[int] = field(default_factory=list)
    """Walks that came to each drafted position: all before it matched, and no stop or maximum cut it off."""
    matched_by_position: list[int] = field(default_factory=list)
    """Of those, the ones whose word at that position was drafted; they sum up to `accepted`."""
    drafts: int = 0
    """Cycles that verified a draft."""
    accepted_histogram: list[int] = field(default_factory=list)
    """Of those cycles, how many accepted none, one, two, ... drafted tokens."""
    proposed: dict[str, int] = field(default_factory=dict)
    """Tokens that each drafter proposed, verified or not."""
    rows_by_drafter: dict[str, int] = field(default_factory=dict)
    """Tokens of each drafter that were verified: they sum up to `rows`."""
    accepted_by_drafter: dict[str, int] = field(default_factory=dict)
    """Of those, the ones that the target said: they sum up to `accepted`."""

    def add_walk(self, matches: Iterable[bool]) -> None:
        """Count the drafted positions that one walk came to: whether each held the target's word."""
        for position, matched in enumerate(matches):
            if position == len(self.reached_by_position):
                self.reached_by_position.append(0)
                self.matched_by_position.append(0)
            self.reached_by_position[position] += 1
            self.matched_by_position[position] += matched

    def add_draft(self, sources: Sequence[str], path: Sequence[int]) -> None:
        """Count a draft that was verified: who had proposed its nodes, and which of these were accepted."""
        if not sources:
            return
        self.drafts += 1
        self.accepted_histogram = _sums(self.accepted_histogram, [*[0] * len(path), 1])
        for source in sources:
            self.rows_by_drafter[source] = self.rows_by_drafter.get(source, 0) + 1
        for node in path:
            self.accepted_by_drafter[sources[node]] = self.accepted_by_drafter.get(sources[node], 0) + 1

    def add(self, other: SpeculationCounts) -> None:
        """Count another one's cycles as well."""
        self.reached_by_position = _sums(self.reached_by_position, other.reached_by_position)
        self.matched_by_position = _sums(self.matched_by_position, other.matched_by_position)
        self.accepted_histogram = _sums(self.accepted_histogram, other.accepted_histogram)
        self.drafts += other.drafts
        self.cycles += other.cycles
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.rejected += other.rejected
        self.rows += other.rows
        for mine, theirs in (
            (self.proposed, other.proposed),
            (self.rows_by_drafter, other.rows_by_drafter),
            (self.accepted_by_drafter, other.accepted_by_drafter),
        ):
            for name, count in theirs.items():
                mine[name] = mine.get(name, 0) + count


def _sums(first: list[int], second: list[int]) -> list[int]:
    return [a + b for a, b in zip_longest(first, second, fillvalue=0)]


@dataclass(frozen=True, slots=True)
class Facts:
    """What one choice came to, told with its last output."""

    workload_class: str
    num_tokens: int
    """Said in all."""
    seed: int
    """Repeats the answer."""
    cached_tokens: int
    """Prompt tokens that were found in the prefix cache."""
    num_preemptions: int
    counts: SpeculationCounts


class Output(NamedTuple):
    """What one step added to one choice of a request. A tuple, because every word makes one."""

    request_id: str
    choice: int
    token_ids: tuple[int, ...]
    text: str
    """Text that is now certain: whole characters, and nothing that may still become a stop string."""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop id or stop string that ended the text, if one did."""
    error: str | None = None
    sources: tuple[str, ...] = ()
    """For each token the drafter that had foreseen it; empty for a token that only the target said."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Of the prompt's tokens from the second on, with the first word of choice 0, if they were asked for."""
    facts: Facts | None = None
    """With the last output of a choice, whatever ended it."""


@dataclass(slots=True)
class Completion:
    """One finished choice."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    sources: list[str] = field(default_factory=list)
    """For each token the drafter that had foreseen it; empty for a token that only the target said."""
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)


@dataclass(slots=True)
class Result:
    """The answer to one request, with the seed that repeats it."""

    request_id: str
    prompt_ids: tuple[int, ...]
    seed: int
    completions: list[Completion]
    cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache."""
    num_preemptions: int = 0
    system_fingerprint: str = ""
    """Names everything besides the request and its seed that the words are a function of."""

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first choice's token ids."""
        return self.completions[0].token_ids
