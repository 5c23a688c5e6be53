"""The target writes the answers that its draft learns from, with our own engine, and some of the questions too.

    given            prompts from files
    self-elicited    the target is given the head of a user's turn alone, and writes the question
    about its own    one of the tasks below, about an answer that was collected before: texts to sum up, to translate,
                     to find something in, which lists of questions have few of

Prompts are answered in this order, each with its own seed and one of the temperatures in turn, a group at a time;
after each group its answers are written. So collecting can stop anywhere, and goes on after the last group.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from understudy.core.request import Request, SamplingParams
from understudy.errors import InvalidRequest
from understudy.llm import LLM
from understudy.text.chat import render
from understudy.train.data import Sample, append_samples, read_samples
from understudy.train.prompts import TrainPrompt

SELF_ELICITED = "self-elicited"
"""The class of questions that the target wrote itself."""
ABOUT_OWN = "about-its-own-text"
"""The class of tasks about what it wrote."""
_TASKS = (
    "Summarize the following text in a few sentences.\n\n{text}",
    "{text}\n\nTL;DR:",
    "Translate the following text to German.\n\n{text}",
    "Translate the following text to French.\n\n{text}",
    "Translate the following text to Spanish.\n\n{text}",
    "List the key points of this text.\n\n{text}",
    "Read the text and answer the question.\n\nText: {text}\n\nQuestion: What is it about, and why does it matter?",
    "Context:\n{text}\n\nUsing only the context above, explain its most important idea in your own words.",
    "Rewrite the following text in a simpler way.\n\n{text}",
    "Write a short story inspired by this text.\n\n{text}",
)
_LEAST_OWN_TOKENS = 48
"""Shorter answers are no text to work on."""
_GOLDEN = 0.6180339887498949
"""Its multiples are spread evenly, however many are taken."""
_MARK = "understudy-question"
_QUESTION_TOKENS = 160

Watcher = Callable[[int, int], None]
"""Told how many prompts were answered, and how many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectSettings:
    """How answers are collected."""

    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    max_tokens: int = 384
    seed: int = 0
    group: int = 256
    """Prompts that are answered and written together."""
    num_self_elicited: int = 0
    num_about_own: int = 0

    @property
    def num_made(self) -> int:
        """Prompts that come from the target itself."""
        return self.num_self_elicited + self.num_about_own


def collect(
    llm: LLM,
    prompts: Sequence[TrainPrompt],
    path: Path,
    settings: CollectSettings,
    *,
    deadline_s: float = math.inf,
    watcher: Watcher | None = None,
) -> bool:
    """Answer prompts that have no answer in the file yet; whether all have one when the clock reaches the deadline.

    A prompt that cannot be answered (it is too long) has a sample of its prompt alone, which nothing is trained on, so
    that places in the file are places among the prompts.
    """
    num_given, num_prompts = len(prompts), len(prompts) + settings.num_made
    first_about = num_given + settings.num_self_elicited
    samples = read_samples(path, vocab_size=llm.target.decoder.config.vocab_size)
    while len(samples) < num_prompts and time.monotonic() < deadline_s:
        first = len(samples)
        # a group has prompts of one origin, so that tasks find all answers that they are about
        end = next(end for end in (num_given, first_about, num_prompts) if first < end)
        places = range(first, min(first + settings.group, end))
        if end == num_given:
            asked = list(prompts[first : places.stop])
        elif end == first_about:
            asked = elicit(llm, [settings.seed + place for place in places])
        else:
            asked = _about_own(llm, samples[:first_about], range(first - first_about, places.stop - first_about))
        answers = _answers(llm, asked, places, settings)
        append_samples(path, answers)
        samples += answers
        if watcher is not None:
            watcher(len(samples), num_prompts)
    return len(samples) >= num_prompts


def _about_own(llm: LLM, samples: Sequence[Sample], numbers: range) -> list[TrainPrompt]:
    """Tasks about earlier answers, spread over all of them."""
    texts = [sample for sample in samples if len(sample.answer_ids) >= _LEAST_OWN_TOKENS]
    if not texts:
        raise InvalidRequest("No answer is long enough to ask something about it.")
    tokenizer = llm.target.tokenizer
    asked: list[TrainPrompt] = []
    for number in numbers:
        sample = texts[int(number * _GOLDEN % 1.0 * len(texts))]
        text = tokenizer.decode(sample.answer_ids).strip()
        content = _TASKS[number % len(_TASKS)].replace("{text}", text)
        asked.append(TrainPrompt(ABOUT_OWN, ({"role": "user", "content": content},)))
    return asked


def elicit(llm: LLM, seeds: Sequence[int]) -> list[TrainPrompt]:
    """Let the target write questions: it is given the head of a user's turn alone, and goes on at temperature 1."""
    if not seeds:
        return []
    tokenizer = llm.target.tokenizer
    if tokenizer.chat_template is None:
        raise InvalidRequest("This model has no chat template, so it cannot be asked for questions.")
    messages = [{"role": "user", "content": _MARK}]
    text = render(
        tokenizer.chat_template, messages, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token
    )  # fmt: skip
    head, mark, _ = text.partition(_MARK)
    if not mark:
        raise InvalidRequest("This model's chat template changes what a user says: it cannot be asked for questions.")
    head_ids = tuple(tokenizer.encode(head, add_special=False))
    requests = [
        Request(
            request_id=f"question {place}",
            prompt_ids=head_ids,
            sampling=SamplingParams(temperature=1.0, max_tokens=_QUESTION_TOKENS, seed=seed),
            tenant=f"question {place}",
        )
        for place, seed in enumerate(seeds)
    ]
    questions = [
        result.completions[0].text.strip() or "Hello."
        for result in llm.run(requests, concurrency=llm.engine.config.max_sequences)
    ]
    return [TrainPrompt(SELF_ELICITED, ({"role": "user", "content": question},)) for question in questions]


def _answers(llm: LLM, asked: Sequence[TrainPrompt], places: range, settings: CollectSettings) -> list[Sample]:
    requests: dict[int, Request] = {}
    prompt_ids = [_ids(llm, prompt.messages) for prompt in asked]
    room = llm.engine.max_context - settings.max_tokens
    for place, prompt, ids in zip(places, asked, prompt_ids, strict=True):
        if len(ids) <= room:
            requests[place] = Request(
                request_id=f"answer {place}",
                prompt_ids=ids,
                sampling=SamplingParams(
                    temperature=temperature_of(place, settings),
                    max_tokens=settings.max_tokens,
                    seed=settings.seed + place,
                ),
                tenant=f"answer {place}",  # drafts learn nothing from the others' answers
                workload_class=prompt.prompt_class,
            )
    results = dict(zip(requests, llm.run(requests.values(), concurrency=llm.engine.config.max_sequences), strict=True))
    return [
        Sample(
            token_ids=(*ids, *(results[place].completions[0].token_ids if place in results else ())),
            answer_start=len(ids),
            prompt_class=prompt.prompt_class,
            temperature=temperature_of(place, settings),
        )
        for place, prompt, ids in zip(places, asked, prompt_ids, strict=True)
    ]


def temperature_of(place: int, settings: CollectSettings) -> float:
    """The temperature of a prompt's answer, by its place among the prompts."""
    return settings.temperatures[place % len(settings.temperatures)]


def _ids(llm: LLM, messages: Sequence[Mapping[str, object]]) -> tuple[int, ...]:
    """A conversation as token ids: by the model's chat template, or as plain text if it has none."""
    if llm.target.tokenizer.chat_template is not None:
        return tuple(llm.chat_ids(messages))
    return tuple(llm.target.tokenizer.encode("\n\n".join(str(message["content"]) for message in messages)))
