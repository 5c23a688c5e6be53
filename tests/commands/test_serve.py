"""`understudy serve`: its options, and a real process from its start to its end."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from tests.engine.engines import tiny_target
from tests.tiny_models import write_tiny_model
from understudy.assembly import build_engine
from understudy.cli import main
from understudy.commands.serve_arguments import ServeSettings, declare_serve, serve_settings
from understudy.commands.speculative_config import read_speculative_config
from understudy.config import EngineConfig
from understudy.control.cost import CostModel
from understudy.control.policy_file import PolicyFile, read_policy, write_policy
from understudy.core.control import ClassPolicy, Policy
from understudy.core.events import Event, Notice
from understudy.errors import ConfigError


def settings_of(*written: str) -> ServeSettings:
    parser = argparse.ArgumentParser()
    declare_serve(parser)
    arguments = parser.parse_args(written)
    arguments.written = ["serve", *written]
    return serve_settings(arguments)


@pytest.fixture(autouse=True)
def nothing_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("UNDERSTUDY_API_KEY", raising=False)
    monkeypatch.delenv("UNDERSTUDY_ADMIN_KEY", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERSTUDY_API_KEY", "one, two")
    settings = settings_of("folder", "--host", "0.0.0.0", "--max-running", "8", "--kv-tokens", "99", "--record", "x")
    assert settings.model == "folder"
    assert settings.server.api_keys == ("one", "two")
    assert settings.server.max_running == settings.engine.max_sequences == 8
    assert settings.engine.kv_tokens == 99
    assert settings.server.record_dir == Path("x")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "model: m\nmax_running: 7\nport: 9\nstrict: yes\ndrafters: [ngram, suffix]\ncross-tokenizer: no"),
        ("a.toml", 'model = "m"\nmax-running = 7\nport = 9\nstrict = true\ndrafters = ["ngram", "suffix"]\n'),
        ("a.json", '{"model": "m", "max-running": 7, "port": 9, "strict": true, "drafters": "ngram,suffix"}'),
    ],
)
def test_file_of_options(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    settings = settings_of("--config", str(file), "--port", "10")
    assert settings.model == "m"
    assert settings.server.port == 10, "the command line wins"
    assert settings.server.max_running == 7
    assert settings.server.strict
    assert settings.engine.drafters == ("ngram", "suffix")
    settings = settings_of("other", "--no-strict", "--config", str(file))
    assert (settings.model, settings.server.strict, settings.server.port) == ("other", False, 9)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "max-runing: 7"),
        ("a.yaml", "config: b.yaml"),
        ("a.yaml", "api-key: secret"),
        ("a.yaml", "max-running: many"),
        ("a.yaml", "strict: 1"),
        ("a.yaml", "port: true"),
        ("a.yaml", "model: 3"),
        ("a.yaml", "- a"),
        ("a.yaml", "a: [b"),
        ("a.yaml", "!!python/object/apply:os.system ['true']"),
        ("a.yaml", ""),
        ("a.json", "{"),
        ("a.toml", "a"),
        ("a.ini", "a"),
    ],
)
def test_file_with_a_mistake_is_refused(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError):
        settings_of("--config", str(file))


def test_state_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "state" / "understudy"
    assert settings_of().server.state_file == folder / "embedded.sqlite"
    assert settings_of("hub:owner/some model").server.state_file == folder / "hub-owner-some-model.sqlite"
    assert settings_of("m", "--served-model-name", "../..").server.state_file == folder / "model.sqlite"
    assert settings_of("--state", "a.db").server.state_file == Path("a.db")
    assert settings_of("--state", "none").server.state_file is None
    monkeypatch.setenv("XDG_STATE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert settings_of("m").server.state_file == tmp_path / ".local" / "state" / "understudy" / "m.sqlite"
    (tmp_path / "a.yaml").write_text("state: none\nshadow-share: 0.5")
    server = settings_of("--config", str(tmp_path / "a.yaml")).server
    assert (server.state_file, server.shadow_share) == (None, 0.5)
    with pytest.raises(ConfigError, match="shadow_share"):
        settings_of("--shadow-share", "1.5")


def test_speculative_config() -> None:
    settings = settings_of("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 5}')
    assert settings.engine.drafters == ("ngram",)
    assert settings.server.max_depth == 5
    settings = settings_of("--speculative-config", '{"model": "small"}')
    assert (settings.engine.drafters, settings.engine.draft) == (("model",), "small")


@pytest.mark.parametrize(("method", "kind"), [("eagle", "eagle"), ("eagle3", "eagle"), ("medusa", "medusa")])
def test_speculative_config_of_a_trained_draft(method: str, kind: str) -> None:
    """Without a model it is the one that comes with the package."""
    engine = settings_of("--speculative-config", f'{{"method": "{method}"}}').engine
    assert (engine.drafters, engine.draft, engine.wanted_draft) == ((kind,), "auto", kind)
    engine = settings_of("--speculative-config", f'{{"method": "{method}", "model": "a/folder"}}').engine
    assert (engine.drafters, engine.wanted_draft) == ((kind,), "a/folder")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"method": "mtp"}', "mtp"),
        ('{"method": "ngram", "prompt_lookup_max": 4}', "prompt_lookup_max"),
        ('{"method": "ngram", "typo": 4}', "typo"),
        ('{"method": "ngram", "model": "x"}', "model"),
        ('{"method": "draft_model"}', "model"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "num_speculative_tokens"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "num_speculative_tokens"),
        ("[]", "object"),
        ("{", "JSON"),
        ("{}", "method"),
    ],
)
def test_speculative_config_refuses_by_name(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_speculative_config(text)


def test_mistakes_are_told_before_anything_is_loaded(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["serve", "--host", "0.0.0.0"]) == 2
    assert "UNDERSTUDY_API_KEY" in capsys.readouterr().err
    assert main(["serve", "--audit-log", str(tmp_path / "none" / "a"), "--port", "0"]) == 2
    assert "audit log" in capsys.readouterr().err


# a real process


@dataclass
class Server:
    process: subprocess.Popen[str]
    address: str

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@contextmanager
def running(*options: object) -> Iterator[Server]:
    command = [sys.executable, "-m", "understudy.cli", "serve", "--port", "0", "--threads", "1", "--kv-tokens", "2048"]
    process = subprocess.Popen(
        [*command, *map(str, options)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.match(r"ready on (http://127\.0\.0\.1:\d+) -- curl ", line)
        assert found, (line, process.communicate(timeout=60)[1])
        yield Server(process, found[1])
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("serve") / "tiny")


def wait_gone(processes: list[psutil.Process], within_s: float) -> None:
    gone, alive = psutil.wait_procs(processes, timeout=within_s)
    assert gone
    assert not alive


def test_serve_flip_and_leave(model: Path, tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    with running(model, "--audit-log", audit, "--record", tmp_path / "records") as server:
        state = httpx.get(f"{server.address}/admin/v1/state").json()
        assert (state["state"], state["model"]["name"]) == ("ready", "tiny")
        assert httpx.post(f"{server.address}/admin/v1/check").json()["problem"] == ""
        server.process.send_signal(signal.SIGUSR1)
        ended_s = time.monotonic() + 5.0
        while httpx.get(f"{server.address}/admin/v1/speculation").json()["effective"]["enabled"]:
            assert time.monotonic() < ended_s
        assert json.loads(audit.read_text())["who"] == "signal SIGUSR1"
        workers = server.workers()
        assert len(workers) == 2, "one that has loaded the model, and the engine that was forked from it"
        for worker in workers:
            worker.send_signal(signal.SIGTERM)  # as a service manager would, to the whole group
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=10.0) == 0
        wait_gone(workers, within_s=1.0)
    (state,) = (tmp_path / "state" / "understudy").glob("*.sqlite")
    assert state.stat().st_mode & 0o777 == 0o600
    assert b"SIGUSR1" in state.read_bytes(), "what was decided is kept"


@pytest.mark.parametrize("hangs", [False, True])
def test_killed_server_leaves_no_worker(model: Path, hangs: bool) -> None:
    with running(model) as server:
        workers = server.workers()
        if hangs:
            (engine,) = (worker for worker in workers if worker.ppid() != server.process.pid)
            engine.send_signal(signal.SIGSTOP)
        server.process.kill()
        server.process.wait(timeout=10.0)
        wait_gone(workers, within_s=5.0)


def test_model_that_is_not_there(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "understudy.cli", "serve", str(tmp_path / "none"), "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "error: " in ended.stderr
    assert "Traceback" not in ended.stderr


def _write_policy(path: Path, drafter: str = "suffix") -> Path:
    classes = {"code": ClassPolicy(max_depth=2, drafters=(drafter,)), "chat": ClassPolicy(enabled=False)}
    write_policy(path, PolicyFile(model="m", system_fingerprint="f", date="2026-11-15", classes=classes))
    return path


def test_policy_is_part_of_the_engine(tmp_path: Path) -> None:
    file = _write_policy(tmp_path / "policy.json")
    config = tmp_path / "a.yaml"
    config.write_text(f"policy: {file}")
    for settings in (settings_of("--policy", str(file)), settings_of("--config", str(config))):
        assert settings.engine.policy is not None
        assert settings.engine.policy.of("code").max_depth == 2
        assert not settings.engine.policy.of("chat").enabled
    assert settings_of().engine.policy is None


def test_policy_that_names_an_unknown_drafter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="oracle"):
        settings_of("--policy", str(_write_policy(tmp_path / "policy.json", "oracle")))


def test_policy_of_another_model_is_told(tmp_path: Path) -> None:
    told: list[Event] = []
    target = tiny_target("llama")
    policy = read_policy(_write_policy(tmp_path / "policy.json")).policy
    build_engine(
        target, EngineConfig(num_threads=1, kv_tokens=512, policy=policy), cost=CostModel({1: 1.0}), emit=told.append
    )
    assert [event.what for event in told if isinstance(event, Notice)] == ["the policy"]


def test_policy_brings_its_drafters_unless_they_were_chosen(tmp_path: Path) -> None:
    file = str(_write_policy(tmp_path / "policy.json", "ngram"))
    assert settings_of("--policy", file).engine.drafters == ("default", "ngram")
    assert settings_of("--policy", file, "--drafters", "suffix").engine.drafters == ("suffix",)
    assert settings_of("--policy", str(_write_policy(tmp_path / "b", "model"))).engine.drafters == ("default",)
    assert settings_of("--policy", str(_write_policy(tmp_path / "c", "eagle"))).engine.drafters == ("default",)


def test_policy_whose_drafters_are_not_there_is_told(tmp_path: Path) -> None:
    told: list[Event] = []
    target = tiny_target("llama")
    config = EngineConfig(
        num_threads=1, kv_tokens=512, policy=Policy(classes={"code": ClassPolicy(drafters=("ngram",))})
    )
    build_engine(target, config, cost=CostModel({1: 1.0}), emit=told.append)
    assert [event.text for event in told if isinstance(event, Notice) and "code" in event.text]
