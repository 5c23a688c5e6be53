"""What an engine can never serve, refused at the door with a reason."""

from __future__ import annotations

from collections.abc import Sequence

from understudy.core.request import Request
from understudy.errors import CapacityError, InvalidRequest


def check_request(
    request: Request, *, vocab_size: int, max_context: int, cache_tokens: int, drafters: Sequence[str]
) -> None:
    """Refuse what can never be served; `cache_tokens` is all that the cache can hold."""
    num_prompt = len(request.prompt_ids)
    if not num_prompt:
        raise InvalidRequest("The prompt is empty.", "Give at least one token.", parameter="prompt")
    if num_prompt >= max_context:
        raise InvalidRequest(
            f"The prompt has {num_prompt} tokens and leaves no room in a context of {max_context}.",
            "Shorten it.",
            parameter="prompt",
        )
    drafter = request.speculation.drafter
    if drafter is not None and drafters and drafter not in drafters:
        raise InvalidRequest(
            f"There is no drafter {drafter!r} here.",
            f"Choose from {', '.join(drafters)}, or leave it out.",
            parameter="speculation.drafter",
        )
    sampling = request.sampling
    named = (*request.prompt_ids, *request.prediction_ids, *sampling.logit_bias, *sampling.stop_token_ids)
    if min(named) < 0 or max(named) >= vocab_size:
        outside = next(token for token in named if not 0 <= token < vocab_size)
        raise InvalidRequest(f"Token {outside} does not exist.", f"Ids go from 0 to {vocab_size - 1}.")
    longest = min(num_prompt + sampling.max_tokens, max_context)
    if longest > cache_tokens:
        raise CapacityError(
            f"{longest} tokens of prompt and answer do not fit in a cache of {cache_tokens}.",
            "Lower max_tokens or raise kv_tokens.",
        )
