"""Drafts that come with the package: which one is taken for whom. There may be none at all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import understudy
from understudy.config import TRAINED_DRAFTERS
from understudy.errors import ModelError
from understudy.models.heads import shipped
from understudy.models.heads.files import FORMAT, SPEC_FILE, load_head
from understudy.models.heads.shipped import SHIPPED, default_draft_for, drafts_folder, kinds_for, shipped_draft
from understudy.models.heads.spec import HEAD_KINDS

FIRST, SECOND, THIRD = SHIPPED


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shipped, "drafts_folder", lambda: tmp_path)
    return tmp_path


def declare(folder: Path, name: str, kind: str, target_hash: object) -> Path:
    (folder / name).mkdir()
    declared = {"format": FORMAT, "kind": kind, "target": {"hash": target_hash}}
    (folder / name / SPEC_FILE).write_text(json.dumps(declared))
    return folder / name


def test_a_configuration_knows_every_kind() -> None:
    assert set(TRAINED_DRAFTERS) == set(HEAD_KINDS)


def test_they_are_part_of_the_package() -> None:
    assert drafts_folder().is_relative_to(Path(understudy.__file__).parent / "data")


def test_those_that_are_there_are_sound_and_small() -> None:
    """Weights of one file, and of all together, have their limits."""
    folders = shipped.shipped_drafts()
    sizes = [file.stat().st_size for folder in folders for file in folder.iterdir()]
    assert sum(sizes) <= 24 * 10**6
    assert all(size < 16 * 10**6 for size in sizes)
    for found in folders:
        load_head(found)


@pytest.mark.parametrize("name", [".", "nowhere"])
def test_nothing_is_there(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(shipped, "drafts_folder", lambda: folder / name)
    assert default_draft_for("a") is None
    assert shipped_draft("eagle") is None
    assert shipped_draft(FIRST) is None
    assert kinds_for("a") == []


def test_the_first_for_a_target_is_taken(folder: Path) -> None:
    declare(folder, FIRST, "block", "other")
    second, third = (declare(folder, name, kind, "mine") for name, kind in ((SECOND, "eagle"), (THIRD, "medusa")))
    assert default_draft_for("mine") == second
    assert default_draft_for("nobody's") is None
    assert kinds_for("mine") == ["eagle", "medusa"]
    assert shipped_draft("medusa") == shipped_draft(THIRD) == third
    assert shipped_draft("model") is None


def test_of_a_kind_the_one_for_the_target_is_taken(folder: Path) -> None:
    first, second = declare(folder, FIRST, "block", "other"), declare(folder, SECOND, "block", "mine")
    assert shipped_draft("block", "mine") == second
    assert shipped_draft("block", "nobody's") == first, "which is refused by name when it is loaded"


def test_what_is_not_on_the_list_is_not_taken(folder: Path) -> None:
    declare(folder, "left-over", "block", "mine")
    assert default_draft_for("mine") is None
    assert shipped_draft("left-over") is None


def test_a_damaged_declaration_is_refused_by_name(folder: Path) -> None:
    place = declare(folder, FIRST, "block", None) / SPEC_FILE
    with pytest.raises(ModelError, match=FIRST):
        default_draft_for("mine")
    place.write_text("{")
    with pytest.raises(ModelError, match=f"{FIRST}.*is not JSON"):
        default_draft_for("mine")


def test_reading_one_does_not_import_the_compiler_of_torch() -> None:
    """That would make every start of an engine two seconds longer."""
    reads = "from understudy.models.heads import files, shipped; files.load_head(shipped.shipped_draft('block'))"
    code = f"import sys; {reads}; print('torch._dynamo' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
