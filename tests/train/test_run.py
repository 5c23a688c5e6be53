"""From prompts to a draft in a folder, in one go and in parts."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.tiny_models import write_tiny_model
from understudy.core.request import SamplingParams
from understudy.errors import ConfigError
from understudy.llm import LLM
from understudy.models.heads.files import load_head
from understudy.models.heads.spec import HEAD_KINDS, HeadKind
from understudy.models.load import load_model
from understudy.train.collect import SELF_ELICITED, CollectSettings, collect, elicit
from understudy.train.data import read_samples
from understudy.train.prompts import TrainPrompt, read_prompts
from understudy.train.run import Plan, run
from understudy.train.settings import TrainSettings

COLLECT = CollectSettings(max_tokens=12, group=4, num_self_elicited=2)
TRAIN = TrainSettings(num_steps=4, max_length=64, tokens_per_batch=512, num_anchors=8, save_every_steps=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", num_hidden_layers=4, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(model, num_threads=1, device="cpu")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "asked.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"the cat and the dog {place}"}) + "\n" for place in range(7)))
    return file


def plan(kind: HeadKind, model: Path, prompts: Path, out: Path) -> Plan:
    return Plan(
        kind=kind,
        model=str(model),
        data=(str(prompts),),
        out=out,
        num_draft_ids=64,
        held_out_share=0.5,
        device="cpu",
        num_threads=1,
        collect=COLLECT,
        train=TRAIN,
    )


def test_answers_are_the_targets_own(llm: LLM, prompts: Path, tmp_path: Path) -> None:
    asked = read_prompts([prompts])
    assert collect(llm, asked, tmp_path / "samples", COLLECT)
    samples = read_samples(tmp_path / "samples", vocab_size=304)
    assert len(samples) == 9
    assert [sample.temperature for sample in samples[:4]] == [0.0, 0.7, 1.0, 0.0]
    assert [sample.prompt_class for sample in samples] == ["asked"] * 7 + [SELF_ELICITED] * 2
    for sample in (samples[0], samples[3]):
        ids = sample.token_ids[: sample.answer_start]
        (result,) = llm.generate([ids], SamplingParams(temperature=0.0, max_tokens=12))
        assert tuple(result.token_ids) == sample.answer_ids


def test_collecting_in_parts_gives_the_same_answers(llm: LLM, prompts: Path, tmp_path: Path) -> None:
    asked = read_prompts([prompts])
    assert collect(llm, asked, tmp_path / "whole", COLLECT)

    class Killed(Exception):
        pass

    def kill(done: int, _: int) -> None:
        if done == 4:
            raise Killed

    with pytest.raises(Killed):
        collect(llm, asked, tmp_path / "parts", COLLECT, watcher=kill)
    assert len(read_samples(tmp_path / "parts", vocab_size=304)) == 4
    assert not collect(llm, asked, tmp_path / "parts", COLLECT, deadline_s=time.monotonic())
    assert collect(llm, asked, tmp_path / "parts", COLLECT)
    assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_prompt_that_is_too_long_keeps_its_place(llm: LLM, tmp_path: Path) -> None:
    long = TrainPrompt("long", ({"role": "user", "content": "zq " * 400},))
    short = TrainPrompt("short", ({"role": "user", "content": "the cat"},))
    settings = replace(COLLECT, num_self_elicited=0)
    assert collect(llm, [long, short], tmp_path / "samples", settings)
    first, second = read_samples(tmp_path / "samples", vocab_size=304)
    assert first.answer_ids == ()
    assert len(second.answer_ids) > 0


def test_elicited_questions_differ_by_seed_and_repeat(llm: LLM) -> None:
    one, same, other = elicit(llm, [1]), elicit(llm, [1]), elicit(llm, [2])
    assert one == same != other
    assert elicit(llm, []) == []


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_from_prompts_to_a_draft(kind: HeadKind, model: Path, prompts: Path, tmp_path: Path) -> None:
    parts: list[str] = []
    outcome = run(plan(kind, model, prompts, tmp_path), watcher=lambda part, *_: parts.append(part))
    assert outcome.is_done
    assert list(dict.fromkeys(parts)) == ["collect", "train", "evaluate"]
    trained = load_head(tmp_path)
    loaded = load_model(model)
    trained.spec.check_target(loaded.config, loaded.source_hash)
    assert trained.spec.kind == kind
    assert {0, 1, 2} <= set(trained.vocabulary.ids.tolist())  # the special ids
    assert trained.provenance["train"]["seed"] == 0
    assert trained.provenance["num_samples"] == 9
    assert trained.provenance["measured"] == json.loads(json.dumps(outcome.measured))
    assert (tmp_path / "speculators" / "model.safetensors").is_file() == (kind == "eagle")
    if kind == "eagle":
        config = json.loads((tmp_path / "speculators" / "config.json").read_bytes())
        assert config["speculators_config"]["verifier"]["name_or_path"] == str(model)
    arms = outcome.measured["arms"]
    assert [(arm["shape"], arm["temperature"]) for arm in arms] == [
        *(("chain", 0.0), ("tree", 0.0), ("chain", 1.0), ("tree", 1.0))
    ]
    for arm in arms:
        assert sum(told["num_answers"] for told in arm["classes"].values()) > 0
        assert all(told["num_same"] == told["num_answers"] for told in arm["classes"].values())


def test_it_need_not_be_measured(model: Path, prompts: Path, tmp_path: Path) -> None:
    parts: list[str] = []
    unmeasured = replace(plan("medusa", model, prompts, tmp_path), measured_by_class=0)
    outcome = run(unmeasured, watcher=lambda part, *_: parts.append(part))
    assert outcome.is_done
    assert "evaluate" not in parts
    assert set(load_head(tmp_path).provenance["measured"]) == {"loss", "coverage"}


def test_in_parts_it_comes_to_the_same_draft(model: Path, prompts: Path, tmp_path: Path) -> None:
    whole, parts = plan("medusa", model, prompts, tmp_path / "a"), plan("medusa", model, prompts, tmp_path / "b")
    assert run(whole).is_done
    assert run(parts, deadline_s=time.monotonic()).part == "collect"

    class Killed(Exception):
        pass

    def kill(part: str, done: int, _: int, __: str) -> None:
        if part == "train" and done == 3:
            raise Killed

    with pytest.raises(Killed):
        run(parts, watcher=kill)
    assert not (tmp_path / "b" / "draft.json").exists()

    def kill_later(part: str, done: int, _: int, __: str) -> None:
        if part == "evaluate" and done == 12:
            raise Killed

    with pytest.raises(Killed):
        run(parts, watcher=kill_later)
    assert not (tmp_path / "b" / "draft.json").exists()
    assert run(parts).is_done
    one, other = (load_head(tmp_path / name).head.state_dict() for name in "ab")
    assert all(torch.equal(one[name], other[name]) for name in one)
    for name in ("draft.json", "weights.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_several_drafts_learn_from_the_same_answers(model: Path, prompts: Path, tmp_path: Path) -> None:
    for kind in ("medusa", "eagle"):
        parts: list[str] = []
        shared = replace(plan(kind, model, prompts, tmp_path / kind), answers=tmp_path / "answers")
        assert run(shared, watcher=lambda part, *_, parts=parts: parts.append(part)).is_done  # type: ignore[misc]
        assert ("collect" in parts) == (kind == "medusa")


def test_other_prompts_for_the_same_folder_are_refused(model: Path, prompts: Path, tmp_path: Path) -> None:
    first = plan("medusa", model, prompts, tmp_path)
    run(first, deadline_s=time.monotonic())
    with pytest.raises(ConfigError, match="other prompts"):
        run(replace(first, max_prompts=3))
    with pytest.raises(ConfigError, match="other settings"):
        run(replace(first, collect=replace(COLLECT, seed=1)))


def test_nothing_to_train_on_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to train on"):
        run(Plan(kind="medusa", model=str(model), out=tmp_path))


def test_a_draft_is_trained_further(model: Path, prompts: Path, tmp_path: Path) -> None:
    """It begins where the other ended, with its ids, and says so; its own folder is resumed as any other."""
    first = replace(plan("block", model, prompts, tmp_path / "first"), measured_by_class=0)
    assert run(first).is_done
    more = replace(
        first,
        out=tmp_path / "more",
        answers=first.out / "work",
        begin_with=first.out,
        num_draft_ids=None,
        stored="fp16",
    )
    still = replace(more, out=tmp_path / "still", train=replace(TRAIN, learning_rate=0.0))
    assert run(more).is_done
    assert run(still).is_done
    begun, further, unchanged = (load_head(folder) for folder in (first.out, more.out, still.out))
    assert torch.equal(begun.vocabulary.ids, further.vocabulary.ids)
    assert further.provenance["begun_with"] == begun.provenance
    for name, weight in begun.head.state_dict().items():
        torch.testing.assert_close(unchanged.head.state_dict()[name], weight, rtol=1e-3, atol=1e-4)
    assert not torch.equal(further.head.markov_out.weight, unchanged.head.markov_out.weight)
    with pytest.raises(ConfigError, match="kind block"):
        run(replace(more, kind="eagle", out=tmp_path / "other", answers=None))
    assert not (tmp_path / "other").exists(), "refused before anything is collected"
    with pytest.raises(ConfigError, match="first weights"):
        run(replace(still, begin_with=more.out))


def test_numbers_that_a_draft_has_already_are_refused(model: Path, prompts: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keeps its ids"):
        replace(plan("block", model, prompts, tmp_path), begin_with=tmp_path)


def test_what_a_draft_begins_with_is_not_written_over(model: Path, prompts: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="begun with and written to"):
        replace(plan("block", model, prompts, tmp_path), begin_with=tmp_path / "." / "", num_draft_ids=None)
