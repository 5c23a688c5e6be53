import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from understudy import __version__
from understudy.bench.manifest import commit, hardware, prompts_hash, versions
from understudy.bench.prompts import Prompt, own_prompts

NOWHERE = {"commit": None, "dirty": None}


def test_the_hash_is_of_what_is_asked_and_of_its_order() -> None:
    prompts = own_prompts()
    assert prompts_hash(prompts) == prompts_hash(own_prompts())
    assert len(prompts_hash(prompts)) == 64
    assert prompts_hash(prompts) != prompts_hash(prompts[::-1])
    assert prompts_hash([Prompt("a", text="x")]) != prompts_hash([Prompt("b", text="x")])
    assert prompts_hash([Prompt(text="x")]) != prompts_hash([Prompt(messages=({"role": "user", "content": "x"},))])


def test_this_machine() -> None:
    machine = hardware()
    assert machine["cpu"]
    assert machine["num_cores"] >= 1
    assert machine["memory_bytes"] is None or machine["memory_bytes"] > 2**20
    assert platform.release() in machine["kernel"]


def test_versions_name_what_computes() -> None:
    found = versions()
    assert found["understudy"] == __version__
    assert found["python"] == platform.python_version()
    assert found["torch"]
    assert found["numba"]


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git here")
def test_a_commit_is_told_only_of_our_own_checkout(tmp_path: Path) -> None:
    def git(*command: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(["git", *identity, *command], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    folder = tmp_path / "package"
    folder.mkdir()
    file = folder / "code.py"
    file.write_text("1")
    assert commit(folder) == NOWHERE, "no checkout"
    git("init", "-q")
    assert commit(folder) == NOWHERE, "a checkout that does not know the package"
    git("add", ".")
    git("commit", "-qm", "first")
    assert commit(folder) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    file.write_text("2")
    assert commit(folder)["dirty"] is True


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert commit() == NOWHERE
