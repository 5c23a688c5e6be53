"""Understudy: language models served faster by speculative decoding, with the same words.

Importing this package is cheap; what needs torch is loaded when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy import threads
from understudy.config import EngineConfig
from understudy.core.request import Completion, Output, Request, Result, SamplingParams, Speculation
from understudy.errors import UnderstudyError

if TYPE_CHECKING:
    from understudy.llm import LLM

threads.share_one_pool()

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "Completion",
    "EngineConfig",
    "Output",
    "Request",
    "Result",
    "SamplingParams",
    "Speculation",
    "UnderstudyError",
]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from understudy.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
