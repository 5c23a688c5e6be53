"""Policy files: what is written is what is read, and whatever else a file may hold is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from understudy.control.classes import label_of
from understudy.control.policy_file import Evidence, PolicyFile, read_policy, write_policy
from understudy.core.control import ClassPolicy, Policy
from understudy.errors import ConfigError

FILE = PolicyFile(
    model="a model",
    system_fingerprint="fp_1",
    date="2026-11-15T12:00:00+00:00",
    classes={
        "code": ClassPolicy(max_depth=4, drafters=("suffix", "model"), reason="1.4 times as fast; naïve"),
        "chat": ClassPolicy(enabled=False, reason="it does not pay"),
        "other": ClassPolicy(),
    },
    evidence={"code": Evidence(speedup=1.4, low=1.3, high=1.5, acceptance=0.6, break_even=0.2)},
)

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
labels = st.text("abc09_-", min_size=1, max_size=12).filter(lambda name: label_of(name) == name)
class_policies = st.builds(
    ClassPolicy,
    enabled=st.booleans(),
    max_depth=st.none() | st.integers(0, 64),
    drafters=st.none() | st.lists(texts, min_size=1, max_size=4).map(tuple),
    reason=st.just("") | texts,
)
numbers = st.none() | st.floats(0.0, 100.0)
evidence = st.builds(
    Evidence, speedup=numbers, low=numbers, high=numbers, acceptance=numbers, break_even=numbers
)  # fmt: skip


def written(values: object, tmp_path: Path) -> Path:
    file = tmp_path / "policy.json"
    file.write_text(json.dumps(values))
    return file


def values_of(file: PolicyFile, tmp_path: Path) -> dict[str, Any]:
    write_policy(tmp_path / "whole.json", file)
    values: dict[str, Any] = json.loads((tmp_path / "whole.json").read_text())
    return values


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    write_policy(path, FILE)
    assert read_policy(path) == FILE
    assert [entry.name for entry in tmp_path.iterdir()] == ["policy.json"], "nothing is left beside it"
    policy = read_policy(path).policy
    assert policy == Policy(classes=dict(FILE.classes), model="a model", system_fingerprint="fp_1")
    assert policy.of("code").max_depth == 4
    assert policy.of("unheard-of") == ClassPolicy()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(classes=st.dictionaries(labels, st.tuples(class_policies, st.none() | evidence), max_size=6), model=texts)
def test_round_trip(
    tmp_path: Path, classes: dict[str, tuple[ClassPolicy, Evidence | None]], model: str
) -> None:  # fmt: skip
    file = PolicyFile(
        model=model,
        system_fingerprint="fp",
        date="2026-11-15",
        classes={name: policy for name, (policy, _) in classes.items()},
        evidence={name: found for name, (_, found) in classes.items() if found is not None},
    )
    write_policy(tmp_path / "p", file)
    assert read_policy(tmp_path / "p") == file


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("version",), 2, "version is 2"),
        (("version",), True, "version is true"),
        (("model",), "", "model"),
        (("model",), 7, "model is 7"),
        (("model",), "\ud800", "surrogate"),
        (("date",), "soon", "no date"),
        (("classes",), [], "classes is []"),
        (("classes",), {f"c{i}": {} for i in range(40)}, "40 classes"),
        (("classes", "Bad Name"), {}, "is no class"),
        (("classes", ""), {}, "is no class"),
        (("classes", "code"), 3, "class code is 3"),
        (("classes", "code", "enabled"), "yes", "enabled"),
        (("classes", "code", "max_depth"), 65, "max_depth is 65"),
        (("classes", "code", "max_depth"), 2.5, "max_depth"),
        (("classes", "code", "max_depth"), True, "max_depth"),
        (("classes", "code", "max_depth"), 10**50, "max_depth"),
        (("classes", "code", "drafters"), "suffix", "drafters"),
        (("classes", "code", "drafters"), [], "drafters is []"),
        (("classes", "code", "drafters"), [1], "drafters is 1"),
        (("classes", "code", "reason"), None, "reason"),
        (("classes", "code", "reason"), "x" * 5000, "reason"),
        (("classes", "code", "depth"), 3, 'nothing named "depth"'),
        (("classes", "code", "evidence", "speedup"), "fast", "speedup"),
        (("classes", "code", "evidence", "speedup"), -1, "speedup"),
        (("classes", "code", "evidence", "hope"), 1, 'nothing named "hope"'),
        (("comment",), "x", 'nothing named "comment"'),
    ],
)
def test_whatever_is_wrong_is_named(tmp_path: Path, path: tuple[str, ...], value: object, said: str) -> None:
    values = values_of(FILE, tmp_path)
    place = values
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    with pytest.raises(ConfigError) as caught:
        read_policy(written(values, tmp_path))
    assert said in caught.value.message
    assert caught.value.remedy
    assert len(str(caught.value)) < 400, "a hostile file cannot flood a terminal"


@pytest.mark.parametrize("missing", ["version", "model", "system_fingerprint", "date", "classes"])
def test_whatever_is_missing_is_named(tmp_path: Path, missing: str) -> None:
    values = values_of(FILE, tmp_path)
    del values[missing]
    with pytest.raises(ConfigError, match=missing):
        read_policy(written(values, tmp_path))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"version": NaN}',
        b'{"version": 1, "version": 1}',
        b" " * (1 << 21),
        b"9" * 10_000,
    ],
    ids=range(10),
)
def test_files_that_are_none(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "policy.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_policy(file)
    assert "policy.json" in caught.value.message


def test_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_policy(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_policy(tmp_path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(
    path=st.sampled_from(
        [(), ("classes",), ("classes", "code"), ("classes", "code", "drafters"), ("classes", "code", "evidence")]
    ),
    value=json_values,
)
def test_hostile_values_are_refused_or_valid(tmp_path: Path, path: tuple[str, ...], value: object) -> None:
    values: Any = values_of(FILE, tmp_path)
    if not path:
        values = value
    else:
        place = values
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value
    try:
        read_policy(written(values, tmp_path))
    except ConfigError as error:
        assert error.remedy


def test_file_that_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    bad = PolicyFile(model="m", system_fingerprint="f", date="2026-01-01", classes={"No Label": ClassPolicy()})
    with pytest.raises(ConfigError):
        write_policy(tmp_path / "p.json", bad)
    assert not list(tmp_path.iterdir())


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.json"
    write_policy(path, FILE)
    before = path.read_bytes()

    def fails(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fails)
    with pytest.raises(OSError, match="No space"):
        write_policy(path, FILE)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["p.json"]


def test_doubt_about_another_model() -> None:
    policy = FILE.policy
    assert policy.doubt("a model", "fp_1") == ""
    assert "a model" in policy.doubt("another", "fp_1")
    assert "fp_2" in policy.doubt("a model", "fp_2")
    assert Policy().doubt("another", "fp_2") == ""
