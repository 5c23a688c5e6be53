"""Questions of every class with seeds and temperatures, as bodies of chat requests."""

from __future__ import annotations

import random
from typing import Any

from understudy.bench.prompts import own_prompts

MODES = (0.0, 0.7, 1.0)


def questions(count: int, *, max_tokens: int = 48, seed: int = 0) -> list[dict[str, Any]]:
    """`count` bodies; prompts repeat with other seeds when there are fewer."""
    prompts = own_prompts()
    draw = random.Random(seed)
    bodies = []
    for number in range(count):
        prompt = prompts[(number * 13) % len(prompts)]
        messages = list(prompt.messages) or [{"role": "user", "content": prompt.text or prompt.turns[0]}]
        bodies.append(
            {
                "messages": messages,
                "seed": draw.randrange(2**31),
                "temperature": MODES[number % len(MODES)],
                "top_p": 0.95 if number % 2 else 1.0,
                "max_tokens": max_tokens,
                "metadata": {"workload_class": prompt.prompt_class},
            }
        )
    return bodies
