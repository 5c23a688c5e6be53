"""Models by name, fetched from the Hugging Face hub, and only if a name says so.

    hub:owner/name              a repository's safetensors, with its configuration and tokenizer
    hub:owner/name@revision     the same at a branch, a tag or a commit
    hub:owner/name/file.gguf    one GGUF file of a repository

Files lie in the hub's own cache, shared with other programs; what is there is not fetched again. Weights come as
safetensors or GGUF: pickles, which can run code, are not even downloaded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from understudy.errors import ModelError

PREFIX = "hub:"
FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model*.safetensors",
    "model.safetensors.index.json",
)
_FORM = re.compile(
    r"hub:(?P<repository>[\w.-]+/[\w.-]+)(?:/(?P<file>[\w./+-]+\.gguf))?(?:@(?P<revision>[\w./-]+))?", re.ASCII
)
_LOG_IN = "Log in with `hf auth login`, or set HF_TOKEN."


@dataclass(frozen=True, slots=True)
class HubName:
    """What is asked for."""

    repository: str
    """owner/name"""
    file: str | None
    """A GGUF file of the repository; without one its safetensors are meant."""
    revision: str | None

    @classmethod
    def parse(cls, text: str) -> HubName:
        """Read a name that begins with `hub:`."""
        form = _FORM.fullmatch(text)
        if form is None or ".." in text:
            raise ModelError(
                f"{text!r} is not a name on the hub.",
                "Write hub:owner/name, hub:owner/name@revision or hub:owner/name/file.gguf.",
            )
        return cls(form["repository"], form["file"], form["revision"])


def fetch(name: HubName) -> Path:
    """Download what is not in the hub's cache yet, and give the folder or the GGUF file."""
    import huggingface_hub  # only now: nothing else needs it

    try:
        if name.file is not None:
            return Path(huggingface_hub.hf_hub_download(name.repository, name.file, revision=name.revision))
        folder = Path(
            huggingface_hub.snapshot_download(name.repository, revision=name.revision, allow_patterns=list(FILES))
        )
    except Exception as error:  # of the hub's own kinds, of the network's, or of the disk's
        raise _explained(name, error) from None
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{name.repository} has no safetensors.",
            "Choose a repository that has them, or name one of its GGUF files: hub:owner/name/file.gguf.",
        )
    return folder


def _explained(name: HubName, error: Exception) -> ModelError:
    """Say in one line what went wrong, and what to do."""
    from huggingface_hub import errors

    repository = name.repository
    kinds: tuple[tuple[type[Exception], str, str], ...] = (
        (
            errors.GatedRepoError,
            f"{repository} is only for those who accepted its terms.",
            f"Accept them on its page. {_LOG_IN}",
        ),
        (
            errors.RepositoryNotFoundError,
            f"There is no model {repository} on the hub, or it is private.",
            f"Check the name. If it is private: {_LOG_IN}",
        ),
        (
            errors.RevisionNotFoundError,
            f"{repository} has no revision {name.revision}.",
            "Give a branch, a tag or a commit of it.",
        ),
        (errors.RemoteEntryNotFoundError, f"{repository} has no file {name.file}.", "See the files on its page."),
        (errors.HFValidationError, f"{repository!r} cannot be a name on the hub.", "Write hub:owner/name."),
    )
    for kind, message, remedy in kinds:
        if isinstance(error, kind):
            return ModelError(message, remedy)
    if _is_offline(error):
        return ModelError(
            f"{repository} is not whole in the cache, and the hub may not be asked (HF_HUB_OFFLINE).",
            "Download it once while online, or give a folder.",
        )
    if isinstance(error, OSError) and error.errno is not None:
        return ModelError(f"{repository} cannot be written: {error.strerror}.", "Make room, or set HF_HOME.")
    cause = error.__cause__ or error
    first_line = str(cause).strip().partition("\n")[0]
    return ModelError(
        f"{repository} could not be fetched from the hub: {first_line or type(cause).__name__}",
        "Check the connection and try again, or give a folder that holds the model.",
    )


def _is_offline(error: BaseException | None) -> bool:
    from huggingface_hub.errors import OfflineModeIsEnabled

    while error is not None:
        if isinstance(error, OfflineModeIsEnabled):
            return True
        error = error.__cause__
    return False
