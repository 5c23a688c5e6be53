"""Runs a client in its own environment, away from ours: no path, cache, key or proxy of the caller reaches it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ENVIRONMENTS = Path(__file__).parents[2] / ".venv-clients"
SCRIPTS = Path(__file__).parent / "scripts"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
"""For those who would else ask a hub about files that lie here."""


@dataclass(frozen=True)
class Client:
    """One environment, and a folder that is home to whatever runs in it."""

    environment: str
    home: Path

    def run(
        self, program: str, *arguments: str, timeout_s: float = 120.0, variables: Mapping[str, str] | None = None
    ) -> str:
        """Run a program of the environment to its end and give what it printed; a failure shows both its streams."""
        path = ENVIRONMENTS / self.environment / "bin" / program
        assert path.exists(), f"{path} does not exist. Run: make test-clients"
        process = subprocess.Popen(
            [str(path), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            cwd=self.home,
            env={**self._variables(), **(variables or {})},
            start_new_session=True,  # so that whatever it starts can be ended with it
        )
        try:
            printed, complained = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            printed, complained = process.communicate()
            raise AssertionError(f"{program} took over {timeout_s} s:\n{printed}\n{complained}") from None
        assert process.returncode == 0, f"{program} ended with {process.returncode}:\n{printed}\n{complained}"
        return printed

    def run_script(self, name: str, *arguments: str, timeout_s: float = 120.0) -> str:
        """Run one of our scripts with the environment's Python."""
        return self.run("python", str(SCRIPTS / name), *arguments, timeout_s=timeout_s)

    def _variables(self) -> dict[str, str]:
        return {
            "PATH": f"{ENVIRONMENTS / self.environment / 'bin'}:{os.environ['PATH']}",
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
        }
