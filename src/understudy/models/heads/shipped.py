"""Drafts that come with the package: trained for models that many will use, each a folder of `data/drafts`.

A draft is of use with one target only, so the one that is taken unasked says of itself that it is for this very
target. What is not in the folder does not come with this copy of the package, and is passed over.
"""

from __future__ import annotations

from pathlib import Path

from understudy.errors import ModelError
from understudy.models.heads.files import SPEC_FILE, is_head_folder, read_declaration

SHIPPED = ("smollm2-135m-block", "smollm2-135m-eagle", "smollm2-135m-medusa")
"""Names of drafts, those for one target with the best first."""


def drafts_folder() -> Path:
    """Where the drafts that come with the package lie."""
    return Path(__file__).parents[2] / "data" / "drafts"


def shipped_drafts() -> list[Path]:
    """The folders of those that are here, in order."""
    folders = [drafts_folder() / name for name in SHIPPED]
    return [folder for folder in folders if is_head_folder(folder)]


def shipped_draft(kind_or_name: str, target_hash: str | None = None) -> Path | None:
    """A draft by its name, or the first of its kind: one for this target if there is one, else for any other."""
    folders = shipped_drafts()
    named = [folder for folder in folders if folder.name == kind_or_name]
    of_kind = [folder for folder in folders if read_declaration(folder / SPEC_FILE).get("kind") == kind_or_name]
    fitting = [folder for folder in of_kind if _target_hash(folder) == target_hash]
    return next(iter([*named, *fitting, *of_kind]), None)


def default_draft_for(target_hash: str) -> Path | None:
    """The best draft for a target with this `source_hash`; None if none comes with the package."""
    return next((folder for folder in shipped_drafts() if _target_hash(folder) == target_hash), None)


def kinds_for(target_hash: str) -> list[str]:
    """The kinds of which there is a draft for a target, the best first."""
    fitting = [folder for folder in shipped_drafts() if _target_hash(folder) == target_hash]
    return list(dict.fromkeys(str(read_declaration(folder / SPEC_FILE).get("kind")) for folder in fitting))


def _target_hash(folder: Path) -> str:
    """Whose draft it is, by what it says of itself."""
    target = read_declaration(folder / SPEC_FILE).get("target")
    if not isinstance(target, dict) or not isinstance(target.get("hash"), str):
        raise ModelError(f"{folder / SPEC_FILE} does not say which target it is for.", "Install the package again.")
    return str(target["hash"])
