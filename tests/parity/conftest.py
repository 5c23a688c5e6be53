from pathlib import Path

import pytest

from tests.tiny_models import write_tiny_model
from understudy.assembly import Target, load_target
from understudy.bench.prompts import Prompt
from understudy.core.weights import WEIGHTS_ON
from understudy.parity.settings import Setting
from understudy.parity.verify import Targets

TEXTS = (
    "the cat and the dog and the other one went there then, the cat and the dog",
    "def add(a, b):\n    return a + b\n\nfor index in range(10):\n    print(index)\n",
    "one two three one two three one two three four",
    "the rest of them stayed at home and the rest of them went there",
    "a cat, a dog, a cat, a dog, a cat, a dog, and then the other one stayed",
    "for index in range(10):\n    print(index)\nfor other in range(10):\n    print(other)\n",
    "and the dog and the cat and the dog and the cat went home then",
    "return a + b, return b + a, return a + b, return b + a, return a",
)
PROMPTS = [Prompt("code" if "print" in text else "chat", text=text) for text in TEXTS]


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Targets:
    """A tiny model that repeats itself often, but not always: drafts are accepted and rejected."""
    folder: Path = write_tiny_model(tmp_path_factory.mktemp("parity") / "tiny", num_hidden_layers=4)
    loaded = {name: load_target(folder, weights=name, draft="layers:1", num_threads=1) for name in WEIGHTS_ON["cpu"]}
    return lambda setting, progress: loaded[setting.weights]


@pytest.fixture(scope="session")
def target(targets: Targets) -> Target:
    """The same with fp32 weights."""
    return targets(Setting(("suffix",), 0.0, 1, False, False, "fp32"), lambda done, total: None)
