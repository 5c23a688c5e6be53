"""From prompts to a draft that is a model: the folder loads, its words are the target's, and it repeats itself."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.tiny_models import write_tiny_model
from understudy.core.request import SamplingParams, Speculation
from understudy.errors import ConfigError, ModelError
from understudy.llm import LLM
from understudy.models.load import load_model
from understudy.train.collect import CollectSettings
from understudy.train.model_draft import CARD_FILE, make_model_draft
from understudy.train.run import Plan, run
from understudy.train.settings import TrainSettings
from understudy.train.teacher import Teacher

COLLECT = CollectSettings(max_tokens=24, temperatures=(0.0,))
TRAIN = TrainSettings(num_steps=120, learning_rate=3e-3, max_length=64, tokens_per_batch=1024, save_every_steps=2)
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", CARD_FILE)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", num_hidden_layers=4, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def wanted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = tmp_path_factory.mktemp("work")
    file = folder / "asked.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"the cat {place}"}) + "\n" for place in range(16)))
    return Plan(
        kind="model",
        model=str(model),
        data=(str(file),),
        out=folder / "draft",
        answers=folder / "answers",
        held_out_share=0.5,
        device="cpu",
        num_threads=1,
        collect=COLLECT,
        train=TRAIN,
    )


@pytest.fixture(scope="module")
def draft(wanted: Plan) -> Path:
    assert run(wanted).is_done
    return wanted.out


def test_the_folder_is_a_model_with_a_card(model: Path, draft: Path) -> None:
    target, loaded = load_model(model), load_model(draft)
    assert loaded.config == replace(target.config, num_layers=2)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        torch.testing.assert_close(loaded.tensors[name], target.tensors[name].half().float(), rtol=0.0, atol=0.0)
    card = json.loads((draft / CARD_FILE).read_text())
    assert (card["kind"], card["layers"], card["target_hash"]) == ("model", [0, 3], target.source_hash)
    assert card["weights"]["bytes"] == (draft / "model.safetensors").stat().st_size
    assert card["provenance"]["train"]["seed"] == 0
    assert card["provenance"]["num_samples"] == 16


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_words_are_those_without_it(temperature: float, model: Path, draft: Path) -> None:
    sampling = SamplingParams(temperature=temperature, max_tokens=24, seed=5)
    prompts = ["the cat", "def add(a, b):", "the other one"]
    plain = LLM(model, num_threads=1, device="cpu", draft="none").generate(prompts, sampling)
    drafting = LLM(model, num_threads=1, device="cpu", draft=str(draft), drafters=("model",))
    drafted = drafting.generate(prompts, sampling, speculation=Speculation(forced=True, max_depth=4))
    assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
    assert sum(result.completions[0].speculation.accepted for result in drafted) > 0


def test_trained_it_is_accepted_more_often_than_untrained(wanted: Plan, draft: Path, tmp_path: Path) -> None:
    untrained = replace(wanted, out=tmp_path, train=replace(TRAIN, num_steps=1, learning_rate=0.0))
    before = run(untrained).measured["arms"]
    after = json.loads((draft / CARD_FILE).read_text())["provenance"]["measured"]["arms"]
    for arms in (before, after):
        assert [(arm["shape"], arm["temperature"]) for arm in arms] == [("chain", 0.0), ("chain", 1.0)]
        for told in (told for arm in arms for told in arm["classes"].values()):
            assert told["num_same"] == told["num_answers"] > 0
            assert len(told["acceptance_by_position"]) <= 4
    assert after[0]["mean_tokens_per_cycle"] > before[0]["mean_tokens_per_cycle"] + 0.2


def test_in_parts_it_comes_to_the_same_files(wanted: Plan, tmp_path: Path) -> None:
    few = replace(wanted, train=replace(TRAIN, num_steps=6))
    whole, again, parts = (replace(few, out=tmp_path / name) for name in ("whole", "again", "parts"))
    assert run(whole).is_done
    assert run(again).is_done

    class Killed(Exception):
        pass

    def kill(part: str, done: int, _: int, __: str) -> None:
        if part == "train" and done == 3:
            raise Killed

    with pytest.raises(Killed):
        run(parts, watcher=kill)
    assert not (parts.out / CARD_FILE).exists()

    def kill_later(part: str, done: int, total: int, __: str) -> None:
        if part == "evaluate" and done == total - 1:  # in the second of two arms
            raise Killed

    with pytest.raises(Killed):
        run(parts, watcher=kill_later)
    assert (parts.out / "work" / "draft" / CARD_FILE).exists()
    assert not (parts.out / CARD_FILE).exists()
    assert run(parts, deadline_s=time.monotonic()).part == "evaluate"
    seen: list[int] = []
    assert run(parts, watcher=lambda part, done, *_: seen.append(done) if part == "evaluate" else None).is_done
    assert min(seen) > 1  # the first arm was not measured again
    for name in FILES:
        assert len({(plan.out / name).read_bytes() for plan in (whole, again, parts)}) == 1


def test_a_folder_of_another_kind_is_refused(wanted: Plan, tmp_path: Path) -> None:
    """What reads drafts would take the folder for the other kind, and never look at the model."""
    for place in ("out", "measured/work/draft"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "draft.json").write_text("{}")
    for place in ("out", "measured"):
        with pytest.raises(ConfigError, match="a trained draft that is no model"):
            run(replace(wanted, out=tmp_path / place))


def test_what_fp16_cannot_hold_is_refused(model: Path, tmp_path: Path) -> None:
    loaded = load_model(model)
    draft = make_model_draft(loaded, Teacher(loaded.config, loaded.tensors))
    with torch.no_grad():
        draft.learner.head.get_parameter("model.norm.weight")[0] = 1e6
    with pytest.raises(ModelError, match=r"model\.norm\.weight has numbers that fp16 cannot hold"):
        draft.write(tmp_path, {})
    assert not list(tmp_path.iterdir())


def test_settings_of_other_kinds_are_refused(wanted: Plan) -> None:
    with pytest.raises(ConfigError, match="can guess every id"):
        replace(wanted, num_draft_ids=64)
    with pytest.raises(ConfigError, match="stored in fp16"):
        replace(wanted, stored="int8")
    assert replace(wanted, stored="fp16").stored == "fp16"
