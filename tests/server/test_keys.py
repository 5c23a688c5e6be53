"""Where keys come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from understudy.errors import ConfigError
from understudy.server.config import ServerConfig
from understudy.server.keys import KeyRing, collect_keys, read_key_file


def test_variable_and_file_together(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n\n  one  \ntwo\n")
    file.chmod(0o600)
    assert collect_keys({"KEY": "two, three,"}, "KEY", file) == ("two", "three", "one")
    assert collect_keys({}, "KEY", None) == ()


def test_file_that_others_can_read_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n")
    file.chmod(0o600)
    assert read_key_file(file) == ("one",)
    assert not caplog.records
    file.chmod(0o644)
    assert read_key_file(file) == ("one",)
    assert "chmod 600" in caplog.text


@pytest.mark.parametrize("content", [b"", b"# only a remark\n", b"\xff\n", None])
def test_file_without_keys_is_a_mistake(tmp_path: Path, content: bytes | None) -> None:
    """Were it none, the server would be open."""
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match="key file"):
        read_key_file(file)


def test_public_address_needs_a_key() -> None:
    with pytest.raises(ConfigError, match="everybody"):
        ServerConfig(host="0.0.0.0")
    with pytest.raises(ConfigError, match="everybody"):
        ServerConfig(host="0.0.0.0", admin_keys=("a",))
    assert ServerConfig(host="0.0.0.0", api_keys=("a",)).described()["api_keys"] == 1
    assert ServerConfig(host="0.0.0.0", insecure=True)
    with pytest.raises(ConfigError, match="key"):
        ServerConfig(api_keys=("a\nb",))


def test_key_of_both_kinds_is_an_admins() -> None:
    owner = KeyRing(("both", "user"), ("both",)).owner_of(b"both")
    assert owner is not None
    assert owner.is_admin


def test_described_configuration_shows_no_key() -> None:
    config = ServerConfig(api_keys=("very-secret",), admin_keys=("more-secret",), switch_file=Path("x"))
    assert "secret" not in repr(config.described())
    assert config.described()["switch_file"] == "x"
