"""The options of `understudy serve`, and the configurations that they come to."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, replace
from pathlib import Path

from understudy.commands.config_file import with_file
from understudy.commands.model_arguments import add_drafters, add_model_arguments, engine_config
from understudy.commands.speculative_config import read_speculative_config
from understudy.config import DEFAULT_DRAFTERS, DRAFTERS, MODEL, TRAINED_DRAFTERS, EngineConfig
from understudy.control.policy_file import read_policy
from understudy.core.control import Policy
from understudy.errors import ConfigError
from understudy.server.config import ServerConfig
from understudy.server.keys import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE, collect_keys
from understudy.server.store import default_state_file

_DEFAULTS = ServerConfig()
DEFAULT_CONTROL_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """A server as it was asked for, checked."""

    model: str | None
    engine: EngineConfig
    server: ServerConfig


def declare_serve(parser: argparse.ArgumentParser) -> None:
    """Declare every option."""
    _declare_engine(parser)
    _declare_door(parser)
    _declare_load(parser)
    _declare_checks(parser)
    _declare_files(parser)


def _declare_engine(parser: argparse.ArgumentParser) -> None:
    models = add_model_arguments(parser, positional=True)
    add_drafters(models)
    models.add_argument("--max-context", type=int, metavar="N", help="longest text, prompt and answer")
    models.add_argument("--kv-tokens", type=int, metavar="N", help="room for keys and values, in tokens")
    models.add_argument(
        "--speculative-config",
        metavar="JSON",
        help="vLLM's way to say who drafts: method, model, num_speculative_tokens",
    )


def _declare_door(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("who is let in").add_argument
    add("--host", default=_DEFAULTS.host, help=f"the address to listen on (default: {_DEFAULTS.host})")
    add("--port", type=int, default=_DEFAULTS.port, metavar="N", help="0 takes any free one (default: 8000)")
    add("--api-key-file", type=Path, metavar="FILE", help=f"keys, one on each line; or set {API_KEY_VARIABLE}")
    add("--admin-key-file", type=Path, metavar="FILE", help=f"keys for /admin; or set {ADMIN_KEY_VARIABLE}")
    add("--insecure", action=argparse.BooleanOptionalAction, help="listen on a public address without a key")
    add("--strict", action=argparse.BooleanOptionalAction, help="refuse unknown fields of requests")
    add("--served-model-name", metavar="NAME", help="what the model is called in requests and answers")


def _declare_load(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("how much is taken on").add_argument
    add("--max-running", type=int, default=_DEFAULTS.max_running, metavar="N", help="answers at once (default: 64)")
    add("--max-waiting", type=int, default=_DEFAULTS.max_waiting, metavar="N", help="queue (default: 256)")
    add("--max-per-key", type=int, metavar="N", help="requests of one key, running and waiting")
    add(
        "--queue-timeout",
        type=float,
        default=_DEFAULTS.queue_timeout_s,
        metavar="S",
        help="longest wait for a place (default: 30)",
    )
    add("--request-timeout", type=float, metavar="S", help="longest time from a request to its whole answer")
    add(
        "--drain",
        type=float,
        default=_DEFAULTS.drain_s,
        metavar="S",
        help="how long answers may go on after SIGTERM (default: 30)",
    )


def _declare_checks(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what is checked").add_argument
    add(
        "--control-share",
        type=float,
        default=DEFAULT_CONTROL_SHARE,
        metavar="P",
        help="of the time, that in which everybody is served plainly, to tell the gain (default: 0.02; 0: none)",
    )
    add(
        "--shadow-share",
        type=float,
        default=_DEFAULTS.shadow_share,
        metavar="P",
        help="of the answers, those computed again when idle, with and without drafts (default: 0.01; 0: none)",
    )


def _declare_files(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("files").add_argument
    add("--config", type=Path, metavar="FILE", help="options by their long names, in YAML, TOML or JSON")
    add("--policy", type=Path, metavar="FILE", help="what to begin with for each class, as `advise --policy` writes it")
    add("--switch-file", type=Path, metavar="FILE", help="watched: what it says about speculation holds")
    add("--audit-log", type=Path, metavar="FILE", help="every flip of a switch, as JSON lines")
    add("--state", metavar="FILE", help="what was learned and decided, over a restart (default: by model); or none")
    add("--record", type=Path, metavar="DIR", help="keep requests and answers, as token ids")
    add(
        "--record-max-bytes",
        type=int,
        default=_DEFAULTS.record_max_bytes,
        metavar="N",
        help="the oldest records go beyond this (default: 1 GiB)",
    )
    add(
        "--record-max-age",
        type=float,
        default=_DEFAULTS.record_max_age_s,
        metavar="S",
        help="older records go (default: a week)",
    )


def serve_settings(arguments: argparse.Namespace) -> ServeSettings:
    """Put the options of the command line, of the file and of the environment into configurations."""
    if arguments.config is not None:
        arguments = with_file(arguments.config, arguments.written[1:], declare_serve)
    max_depth = _obey_speculative_config(arguments)
    policy = None if arguments.policy is None else _policy(arguments.policy)
    engine = replace(
        _with_drafters_of(policy, engine_config(arguments), chosen=arguments.drafters is not None),
        max_context=arguments.max_context,
        kv_tokens=arguments.kv_tokens,
        max_sequences=arguments.max_running,
        control_share=arguments.control_share,
        policy=policy,
    )
    server = ServerConfig(
        host=arguments.host,
        port=arguments.port,
        served_name=arguments.served_model_name,
        api_keys=collect_keys(os.environ, API_KEY_VARIABLE, arguments.api_key_file),
        admin_keys=collect_keys(os.environ, ADMIN_KEY_VARIABLE, arguments.admin_key_file),
        insecure=bool(arguments.insecure),
        strict=bool(arguments.strict),
        max_running=arguments.max_running,
        max_waiting=arguments.max_waiting,
        max_per_key=arguments.max_per_key,
        queue_timeout_s=arguments.queue_timeout,
        request_timeout_s=arguments.request_timeout,
        drain_s=arguments.drain,
        max_depth=max_depth,
        switch_file=arguments.switch_file,
        audit_file=arguments.audit_log,
        state_file=_state_file(arguments),
        shadow_share=arguments.shadow_share,
        record_dir=arguments.record,
        record_max_bytes=arguments.record_max_bytes,
        record_max_age_s=arguments.record_max_age,
    )
    return ServeSettings(arguments.model, engine, server)


def _state_file(arguments: argparse.Namespace) -> Path | None:
    if arguments.state == "none":
        return None
    if arguments.state is not None:
        return Path(arguments.state)
    return default_state_file(arguments.served_model_name or arguments.model or "embedded", os.environ)


def _policy(path: Path) -> Policy:
    """Read a policy. A drafter that does not exist is a mistake in it; one that this server lacks is only not asked."""
    policy = read_policy(path).policy
    for name, of_class in policy.classes.items():
        unknown = [drafter for drafter in of_class.drafters or () if drafter not in DRAFTERS]
        if unknown:
            raise ConfigError(
                f"{path}: class {name}: there is no drafter named {unknown[0]!r}.",
                f"Choose from {', '.join(DRAFTERS)}.",
            )
    return policy


def _with_drafters_of(policy: Policy | None, config: EngineConfig, *, chosen: bool) -> EngineConfig:
    """The configuration with the drafters that a policy asks for, unless somebody chose them or they need a draft."""
    if policy is None or chosen:
        return config
    wanted = {name for of_class in policy.classes.values() for name in of_class.drafters or ()}
    known = (*DEFAULT_DRAFTERS, MODEL, *TRAINED_DRAFTERS)
    added = [name for name in DRAFTERS if name in wanted and name not in known]
    return replace(config, drafters=(*config.drafters, *added))


def _obey_speculative_config(arguments: argparse.Namespace) -> int | None:
    """Turn vLLM's words into ours; return the deepest that a draft may reach."""
    if arguments.speculative_config is None:
        return None
    if arguments.draft is not None or arguments.drafters is not None:
        raise ConfigError("--speculative-config says who drafts.", "Leave out --draft and --drafters.")
    said = read_speculative_config(arguments.speculative_config)
    arguments.drafters, arguments.draft = said.drafter, said.draft
    return said.max_depth
