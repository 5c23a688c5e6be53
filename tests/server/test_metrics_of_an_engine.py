"""The counters against a real engine in its process: what its answers said of themselves adds up, aborted ones too."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from tests.server.watched import value
from tests.tiny_models import write_tiny_model
from understudy.config import EngineConfig
from understudy.core.events import Ended, Event
from understudy.core.request import Facts, Request, SamplingParams, Speculation
from understudy.server.config import ServerConfig
from understudy.server.exchange import Caller, Exchange
from understudy.server.metrics import Metrics
from understudy.server.service import Service
from understudy.server.speculation_block import block
from understudy.server.supervisor import EngineProcess


def test_counters_of_an_engine_are_the_sums_of_its_answers(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny", max_position_embeddings=32_768)
    ended: list[Ended] = []
    metrics = Metrics()

    def keep(event: Event) -> None:
        if isinstance(event, Ended):
            ended.append(event)

    async def main() -> list[Facts]:
        backend = EngineProcess(str(folder), EngineConfig(num_threads=1))
        service = Service(backend, ServerConfig())
        metrics.watch(service)
        backend.listen(keep)
        await backend.start()
        try:
            exchanges = [_exchange(number) for number in range(4)]
            await asyncio.gather(*(_read(service, exchange) for exchange in exchanges))
            left = _exchange(4, max_tokens=32_000)  # so many that it is left before its end, however late we are told
            async with contextlib.aclosing(service.answer(left)) as outputs:
                await anext(outputs)
            while len(ended) < 5:
                await asyncio.sleep(0.01)
            return [facts for exchange in exchanges for facts in exchange.facts]
        finally:
            await backend.close()

    told = asyncio.run(main())
    assert {event.finish_reason for event in ended} == {"length", "abort"}
    (aborted,) = (event for event in ended if event.finish_reason == "abort")
    whole = block([*told, aborted.facts], max_depth=16)
    assert whole["num_accepted_draft_tokens"] != 0, "otherwise this would prove nothing"
    assert value(metrics, "understudy_spec_drafts_total") == whole["num_spec_steps"]
    assert value(metrics, "understudy_spec_drafted_tokens_total") == whole["num_draft_tokens"]
    assert value(metrics, "vllm:spec_decode_num_accepted_tokens_total") == whole["num_accepted_draft_tokens"]
    assert value(metrics, "understudy_choices_total", finish_reason="abort") == 1
    num_words = sum(event.facts.num_tokens for event in ended)
    assert value(metrics, "understudy_generation_tokens_total") == num_words
    assert value(metrics, "understudy_step_seconds_total", part="forward") > 0
    assert value(metrics, "understudy_memory_bytes", part="target") > 0


def _exchange(number: int, max_tokens: int = 24) -> Exchange:
    request = Request(
        request_id=f"r{number}",
        prompt_ids=(5, 6, 7) * 6,
        sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
        speculation=Speculation(forced=True),
        workload_class="code" if number % 2 else "chat",
    )
    return Exchange(request, Caller(), "chat")


async def _read(service: Service, exchange: Exchange) -> None:
    async for _ in service.answer(exchange):
        pass
