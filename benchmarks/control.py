"""Mixed traffic under the control plane, beside plain decoding: one table by class and concurrency.

    python benchmarks/control.py [--rounds 20] [--concurrency 1,4,16] [--max-tokens 40] [--depths 2,4,8] [--device cpu]
        [--json OUT]
    python benchmarks/control.py --pool OUT...

Every round asks texts of eight classes at temperatures from 0 to 1.5, in waves of so many at once. Each wave is
answered by all arms side by side, step by step, each on its own clock (bench/in_step.py; on a GPU, where a step leaves
the next one under way, one after the other): `plain` has no drafter, `default` is what a user gets, `chance` is plain
once more, and `depth d` forces drafts of a fixed depth (alone, to see what the best fixed choice would have been). A
wave's requests come at times that are the same for every arm: in a closed loop whoever is faster is asked more. Words
must be equal in all arms.
Speed-ups are of time per token, decoding alone, against the mean of both plain arms. TTFT is compared request by
request: prompts differ so much in length that the median of all of them jumps.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from understudy.assembly import Target, build_engine, load_target
from understudy.bench.arrivals import Timed
from understudy.bench.in_step import Serving, serve_in_step
from understudy.bench.prompts import own_prompts
from understudy.bench.served import Answer
from understudy.config import AUTO_DRAFT, EngineConfig
from understudy.core.events import Decided, Event, EventSink, ignore
from understudy.core.request import Request, SamplingParams, Speculation
from understudy.core.weights import DEVICE_CHOICES
from understudy.engine.engine import Engine
from understudy.text.chat import render
from understudy.upkeep import calm_process

TEMPERATURES = (0.0, 0.5, 1.0, 1.5)


@dataclass
class Done:
    """What one request came to."""

    workload_class: str
    ttft_s: float
    tpot_s: float
    """Per token after the first."""
    request_s: float
    tokens: tuple[int, ...] = ()


Found = dict[int, dict[str, list[list[Done]]]]
"""By concurrency and arm, the answers of each round."""


@dataclass
class Arm:
    """One way of answering."""

    name: str
    engine: Engine
    speculation: Speculation = field(default_factory=Speculation)


def serve(arms: Sequence[Arm], asked: Sequence[Sequence[Request]], times_s: Sequence[float]) -> list[list[Done]]:
    """Let every arm answer its requests, which come at the same times, step by step beside the others."""
    servings = [Serving(arm.engine, requests, Timed(times_s)) for arm, requests in zip(arms, asked, strict=True)]
    serve_in_step(servings)
    return [
        [done_of(request, answer) for request, answer in zip(requests, serving.answers, strict=True)]
        for requests, serving in zip(asked, servings, strict=True)
    ]


def done_of(request: Request, answer: Answer) -> Done:
    """What a request came to, in seconds."""
    ttft_ms, tpot_ms = answer.ttft_ms, answer.tpot_ms
    assert ttft_ms is not None
    assert tpot_ms is not None
    assert answer.token_ids is not None
    return Done(request.workload_class, ttft_ms / 1e3, tpot_ms / 1e3, answer.request_ms / 1e3, answer.token_ids)


def requests_of(
    arm: Arm, asked: Sequence[tuple[str, tuple[int, ...]]], number: int, first: int, max_tokens: int
) -> list[Request]:
    """The same questions for every arm, the first of them at a place in its round; no draft knows an earlier answer."""
    return [
        Request(
            request_id=f"{number}-{place}",
            prompt_ids=ids,
            sampling=SamplingParams(
                temperature=TEMPERATURES[(number + place) % len(TEMPERATURES)],
                max_tokens=max_tokens,
                seed=number,
                ignore_eos=True,
            ),
            speculation=arm.speculation,
            tenant=f"{number}-{place}",
            workload_class=name,
        )
        for place, (name, ids) in enumerate(asked, first)
    ]


def questions(tokenizer: Any) -> dict[str, list[tuple[int, ...]]]:
    """Our own prompts as token ids, by class."""
    found: dict[str, list[tuple[int, ...]]] = {}
    for prompt in own_prompts():
        if prompt.messages or prompt.turns:
            content = prompt.messages[-1]["content"] if prompt.messages else prompt.turns[0]
        else:
            content = prompt.text
        text = render(
            tokenizer.chat_template,
            [{"role": "user", "content": content}],
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
        )
        found.setdefault(prompt.prompt_class, []).append(tuple(tokenizer.encode(text, add_special=False)))
    return found


def ratio_of(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """The typical ratio of two times, and its 95 % interval: one stalled round moves neither.

    Hodges and Lehmann: the median of all means of two logarithms, with the interval of Wilcoxon's signed ranks.
    """
    logs = [math.log(a / b) for a, b in pairs]
    count = len(logs)
    means = sorted((logs[i] + logs[j]) / 2 for i in range(count) for j in range(i, count))
    out = int(len(means) / 2 - 1.96 * math.sqrt(count * (count + 1) * (2 * count + 1) / 24))
    if out < 0:
        return math.exp(statistics.median(means)), 0.0, math.inf
    return math.exp(statistics.median(means)), math.exp(means[out]), math.exp(means[-1 - out])


def quantile(values: Sequence[float], q: float) -> float:
    """The value below which a share q lies."""
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def gap_of(arm: Arm, known: dict[str, list[tuple[int, ...]]], concurrency: int, max_tokens: int) -> float:
    """Seconds between two arrivals at which about so many run at once when they are served plainly."""
    asked = [(name, ids[0]) for name, ids in known.items()] * max(1, concurrency // len(known))
    asked = asked[:concurrency]
    requests = requests_of(arm, asked, 10**6 + concurrency, 0, max_tokens)
    (done,) = serve([arm], [requests], [0.0] * len(asked))
    return max(answer.request_s for answer in done) / len(asked)


def one_round(
    arms: Sequence[Arm],
    asked: Sequence[tuple[str, tuple[int, ...]]],
    draw: random.Random,
    number: int,
    at_once: int,
    gap_s: float,
    max_tokens: int,
    is_in_step: bool,
) -> dict[str, list[Done]]:
    """Wave after wave, each answered by every arm."""
    served: dict[str, list[Done]] = {arm.name: [] for arm in arms}
    for first in range(0, len(asked), at_once):
        wave = asked[first : first + at_once]
        times_s = [place * gap_s / 2 for place in range(len(wave))]
        order = draw.sample(arms, len(arms))
        for together in [order] if is_in_step else [[arm] for arm in order]:
            requests = [requests_of(arm, wave, number, first, max_tokens) for arm in together]
            for arm, done in zip(together, serve(together, requests, times_s), strict=True):
                served[arm.name] += done
    return served


def arms_of(target: Target, depths: Sequence[int], emit: EventSink) -> list[Arm]:
    """`plain`, `default` and `chance`, then one arm for each fixed depth; `emit` hears the default's events."""

    def engine(drafters: tuple[str, ...] | None = None, emit: EventSink = ignore) -> Engine:
        room = EngineConfig(kv_tokens=64 * 1024, prefix_cache=False)
        return build_engine(target, room if drafters is None else replace(room, drafters=drafters), emit=emit)

    fixed = [Arm(f"depth {depth}", engine(), Speculation(forced=True, max_depth=depth)) for depth in depths]
    return [Arm("plain", engine(())), Arm("default", engine(emit=emit)), Arm("chance", engine(())), *fixed]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--depths", default="2,4,8")
    parser.add_argument("--device", choices=DEVICE_CHOICES, default="auto")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pool", type=Path, nargs="+", help="measure nothing: the table of all rounds of saved runs")
    options = parser.parse_args()
    console = Console(width=190)
    if options.pool:
        found, num_different = pooled(options.pool)
        show(console, rows_of(found), num_different)
        sys.exit(1 if num_different else 0)
    # the default is measured with the draft that comes with it
    target = load_target(device=options.device, draft=AUTO_DRAFT)
    decided: list[Decided] = []

    def hear(event: Event) -> None:
        if isinstance(event, Decided):
            decided.append(event)

    everybody = arms_of(target, [int(depth) for depth in options.depths.split(",") if depth], hear)
    calm_process()  # as where it is served
    known = questions(target.tokenizer)
    concurrencies = [int(part) for part in options.concurrency.split(",")]
    gaps = {c: gap_of(everybody[0], known, c, options.max_tokens) for c in concurrencies}
    found = {c: {} for c in concurrencies}
    num_different = 0
    for number in range(-1, options.rounds):  # the first round is for warming up
        for concurrency in concurrencies:
            draw = random.Random(f"{number}/{concurrency}")
            count = max(1, concurrency // len(known))
            asked = [(name, draw.choice(ids)) for name, ids in known.items() for _ in range(count)]
            draw.shuffle(asked)
            served = one_round(
                everybody if concurrency == 1 else everybody[:3],
                asked,
                draw,
                number + 1,
                concurrency,
                gaps[concurrency],
                options.max_tokens,
                is_in_step=not target.device_facts,
            )
            words = [[done.tokens for done in answers] for answers in served.values()]
            num_different += sum(line != words[0] for line in words[1:])
            if number >= 0:
                for name, answers in served.items():
                    found[concurrency].setdefault(name, []).append(answers)
        console.print(f"round {number + 1} of {options.rounds}", end="\r")
        if options.json and number > 0:  # a long run that is cut short has lost nothing
            write(options.json, found, num_different, decided)
    show(console, rows_of(found), num_different)
    sys.exit(1 if num_different else 0)


def write(path: Path, found: Found, num_different: int, decided: Sequence[Decided]) -> None:
    """Keep the table, and the seconds that it is made of: to the first word, per word and in all, by round."""
    raw = {
        str(concurrency): {
            name: [[(d.workload_class, d.ttft_s, d.tpot_s, d.request_s) for d in answers] for answers in rounds]
            for name, rounds in arms.items()
        }
        for concurrency, arms in found.items()
    }
    decisions = [f"{d.what} | {d.subject} | {d.outcome} | {d.reason}" for d in decided]
    record = {"rows": rows_of(found), "num_different": num_different, "decisions": decisions, "raw": raw}
    path.write_text(json.dumps(record, indent=1))


def pooled(paths: Sequence[Path]) -> tuple[Found, int]:
    """All rounds of several runs, and the answers that differed in them."""
    found: Found = {}
    num_different = 0
    for path in paths:
        record = json.loads(path.read_text())
        num_different += record["num_different"]
        for concurrency, arms in record["raw"].items():
            known = found.setdefault(int(concurrency), {})
            for name, rounds in arms.items():
                known.setdefault(name, []).extend([[Done(*line) for line in answers] for answers in rounds])
    whole = {c: {name: rounds for name, rounds in arms.items() if len(rounds) == len(arms["plain"])}
             for c, arms in found.items()}  # an arm must have been in all of them  # fmt: skip
    return whole, num_different


def rows_of(found: Found) -> list[dict[str, Any]]:
    """Every class at every concurrency, and all classes together."""
    return [
        row_of(arms, workload_class) | {"class": workload_class, "concurrency": concurrency}
        for concurrency, arms in found.items()
        for workload_class in [*sorted({done.workload_class for done in arms["plain"][0]}), "all"]
    ]


def show(console: Console, rows: Sequence[dict[str, Any]], num_different: int) -> None:
    """Print the table."""
    table = Table(title="default against plain, by class and concurrency")
    names = ("class", "at once", "speed-up", "low", "high", "chance", "low", "best fixed", "default / best",
             "TTFT", "low", "TTFT p50", "TTFT p99", "request p99", "TPOT p99",
             "chance TTFT", "TTFT p99", "request", "TPOT")  # fmt: skip
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["class"],
            str(row["concurrency"]),
            *(f"{row[key]:.3f}" for key in ("speedup", "low", "high", "chance", "chance_low")),
            f"{row['best']} {row['best_speedup']:.3f}" if row["best"] else "",
            f"{row['against_best']:.3f}" if row["best"] else "",
            *(f"{value:.3f}" for value in row["ttft"][:2]),
            *(f"{row[key]:.3f}" for key in ("ttft_p50", "ttft_p99", "request_p99", "tpot_p99")),
            f"{row['chance_ttft'][0]:.3f}",
            *(f"{row[key]:.3f}" for key in ("chance_ttft_p99", "chance_request_p99", "chance_tpot_p99")),
        )
    console.print(table)
    console.print(f"answers that differ between the arms: {num_different}")


def row_of(arms: dict[str, list[list[Done]]], workload_class: str) -> dict[str, Any]:
    """One class at one concurrency."""

    def of(name: str) -> list[list[Done]]:
        return [[d for d in answers if workload_class in (d.workload_class, "all")] for answers in arms[name]]

    def times(name: str) -> list[float]:
        return [sum(done.tpot_s for done in answers) for answers in of(name)]

    plain = [(a + b) / 2 for a, b in zip(times("plain"), times("chance"), strict=True)]

    def pairs(name: str, against: Sequence[float] = plain) -> list[tuple[float, float]]:
        return list(zip(against, times(name), strict=True))

    def tail(attribute: str, q: float, arm: str = "default", against: Sequence[str] = ("plain", "chance")) -> float:
        both = [[getattr(d, attribute) for name in names for answers in of(name) for d in answers]
                for names in ((arm,), against)]  # fmt: skip
        return quantile(both[0], q) / quantile(both[1], q)

    def first_words(arm: str, *against: str) -> tuple[float, float, float]:
        """The typical ratio of the times to the first word of one and the same request."""
        flat = {name: [done.ttft_s for answers in of(name) for done in answers] for name in (arm, *against)}
        others = [statistics.fmean(times) for times in zip(*(flat[name] for name in against), strict=True)]
        return ratio_of(list(zip(flat[arm], others, strict=True)))

    speedup, low, high = ratio_of(pairs("default"))
    chance, chance_low, _ = ratio_of(pairs("chance", times("plain")))
    fixed = [name for name in arms if name.startswith("depth")]
    speeds = {name: ratio_of(pairs(name))[0] for name in fixed} | {"plain": 1.0}
    best = max(speeds, key=lambda name: speeds[name]) if fixed else ""
    return {
        "speedup": speedup,
        "low": low,
        "high": high,
        "chance": chance,
        "chance_low": chance_low,
        "best": best,
        "best_speedup": speeds.get(best, 1.0),
        "against_best": ratio_of(pairs("default", times(best) if best != "plain" else plain))[0] if best else 1.0,
        "fixed": speeds,
        "ttft": first_words("default", "plain", "chance"),
        "chance_ttft": first_words("chance", "plain"),
        "ttft_p50": tail("ttft_s", 0.5),
        "ttft_p99": tail("ttft_s", 0.99),
        "request_p99": tail("request_s", 0.99),
        "tpot_p99": tail("tpot_s", 0.99),
        "chance_ttft_p50": tail("ttft_s", 0.5, "chance", ("plain",)),
        "chance_ttft_p99": tail("ttft_s", 0.99, "chance", ("plain",)),
        "chance_request_p99": tail("request_s", 0.99, "chance", ("plain",)),
        "chance_tpot_p99": tail("tpot_s", 0.99, "chance", ("plain",)),
    }


if __name__ == "__main__":
    main()
