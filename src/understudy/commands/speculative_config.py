"""`--speculative-config`: the JSON that vLLM takes, as far as it has a meaning here; the rest is refused by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from understudy.errors import ConfigError

_METHODS = {
    "ngram": "ngram",
    "suffix": "suffix",
    "draft_model": "model",
    "eagle": "eagle",
    "eagle3": "eagle",
    "medusa": "medusa",
}
_WITHOUT_A_MODEL = ("ngram", "suffix")
_REMEDIES = {
    "prompt_lookup_min": "The ngram drafter looks up 2 to 4 words; leave it out.",
    "prompt_lookup_max": "The ngram drafter looks up 2 to 4 words; leave it out.",
    "rejection_sample_method": "Every word is the target's own here; leave it out.",
    "disable_by_batch_size": "Drafting stops by itself where it would not pay; leave it out.",
}


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """What it came to."""

    drafter: str
    draft: str | None
    max_depth: int | None


def read_speculative_config(text: str) -> SpeculativeConfig:
    """Read the JSON."""
    values = _mapping(text)
    method, draft = values.pop("method", None), values.pop("model", None)
    max_depth = values.pop("num_speculative_tokens", None)
    for name in values:
        remedy = _REMEDIES.get(name, "Known are method, model and num_speculative_tokens.")
        raise _error(f"{name!r} has no meaning here.", remedy)
    if method is None and draft is not None:
        method = "draft_model"
    if not isinstance(method, str) or method not in _METHODS:
        raise _error(f"method is {method!r}.", f"Choose from {', '.join(_METHODS)}.")
    if draft is not None and not isinstance(draft, str):
        raise _error(f"model is {draft!r}.", "Give the draft model's folder, file or name.")
    if method in _WITHOUT_A_MODEL if draft is not None else method == "draft_model":
        raise _error(
            f"method is {method!r}, model is {draft!r}.",
            "draft_model needs a model; eagle, eagle3 and medusa may name the draft's folder; the others have none.",
        )
    if max_depth is not None and (type(max_depth) is not int or not 1 <= max_depth <= 64):
        raise _error(f"num_speculative_tokens is {max_depth!r}.", "Give a whole number from 1 to 64.")
    return SpeculativeConfig(_METHODS[method], draft, max_depth)


def _mapping(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise _error("it is no JSON.", 'As in: \'{"method": "ngram", "num_speculative_tokens": 5}\'') from None
    if not isinstance(values, dict):
        raise _error("it is no JSON object.", 'As in: \'{"method": "ngram", "num_speculative_tokens": 5}\'')
    return values


def _error(message: str, remedy: str) -> ConfigError:
    return ConfigError(f"--speculative-config: {message}", remedy)
