"""Asks through LiteLLM, once as a vLLM that is hosted and once as OpenAI, and prints what came back as JSON.

python litellm_sdk.py BASE_URL MODEL
"""

import asyncio
import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it downloads a list of prices

import litellm

base_url, model = sys.argv[1:]
common = {
    "messages": [{"role": "user", "content": "Name three colours."}],
    "api_base": base_url,
    "api_key": "none",
    "max_tokens": 32,
    "temperature": 0.7,
    "seed": 11,
    "num_retries": 0,
    "timeout": 60,
}
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "blue"]}, "warm": {"type": "boolean"}},
    "required": ["colour", "warm"],
    "additionalProperties": False,
}


def ask(provider: str) -> dict[str, object]:
    asked = {"model": f"{provider}/{model}", **common}
    answer = litellm.completion(**asked)
    stream = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    schema = {"type": "json_schema", "json_schema": {"name": "colour", "schema": SCHEMA, "strict": True}}
    shaped = litellm.completion(**asked, response_format=schema)
    later = asyncio.run(litellm.acompletion(**asked))
    usage = [chunk.usage.model_dump() for chunk in stream if getattr(chunk, "usage", None)]
    try:
        litellm.completion(**{**asked, "model": f"{provider}/no-such-model"})
        refused = None
    except litellm.exceptions.NotFoundError as error:
        refused = type(error).__name__
    return {
        "text": answer.choices[0].message.content,
        "usage": answer.usage.model_dump(),
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices),
        "streamed_usage": usage[-1] if usage else None,
        "shaped": json.loads(shaped.choices[0].message.content),
        "asynchronous": later.choices[0].message.content,
        "refused": refused,
    }


print(json.dumps({provider: ask(provider) for provider in ("hosted_vllm", "openai")}))
