"""Imports point one way. The table is the architecture: who may import whom, and which packages from outside.

Every import in src/understudy is read from its source, those inside functions and under TYPE_CHECKING too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import understudy

ROOT = Path(understudy.__file__).parent

FOUNDATIONS = ("errors", "cache", "upkeep", "threads", "core", "config")

MAY_IMPORT: dict[str, tuple[str, ...]] = {
    # plain data and small foundations: standard library only
    "errors": (),
    "cache": (),
    "threads": (),
    "upkeep": (),
    "core": ("errors",),
    "config": ("errors", "core"),
    "compiled": ("cache",),
    "client": ("errors", "core"),
    # each a room of its own
    "kv": ("errors", "core"),
    "text": ("errors", "core"),
    "control": ("errors", "core", "compiled"),
    "sampling": ("errors", "core", "compiled", "text"),
    "kernels": ("errors", "core", "compiled", "threads"),
    "models": ("errors", "core", "cache", "kernels", "text"),
    # one forward pass, what proposes ahead of it, and the step around both
    "runtime": ("errors", "core", "kv", "kernels", "models"),
    "drafters": ("errors", "core", "control", "text", "compiled", "sampling", "kv", "kernels", "models", "runtime"),
    "engine": (*FOUNDATIONS, "control", "kv", "text", "sampling", "kernels", "runtime", "drafters"),
    # what puts an engine together, and the interface around it
    "target": (*FOUNDATIONS, "kernels", "models", "runtime", "text"),
    "drafts": (*FOUNDATIONS, "control", "models", "text", "target"),
    "assembly": (
        *FOUNDATIONS,
        *("control", "sampling", "kernels", "models", "runtime", "drafters", "engine", "target", "drafts"),
    ),
    "llm": (*FOUNDATIONS, "text", "engine", "assembly"),
    # what is done with one
    "bench": (*FOUNDATIONS, "client", "control", "text", "engine", "assembly", "llm"),
    "parity": (*FOUNDATIONS, "control", "text", "engine", "assembly", "llm", "bench"),
    "advise": (*FOUNDATIONS, "control", "text", "sampling", "drafters", "engine", "assembly", "llm", "bench"),
    "train": (*FOUNDATIONS, "text", "models", "drafters", "engine", "assembly", "llm"),
    # the process around an engine, and the server, which is given a Backend and knows no engine
    "wire": FOUNDATIONS,
    "worker": (*FOUNDATIONS, "engine", "assembly", "wire"),
    "stem": (*FOUNDATIONS, "assembly", "wire", "worker"),
    "server": (*FOUNDATIONS, "control", "text", "wire"),
    "gateway": (*FOUNDATIONS, "control", "server"),
    "terminal": (*FOUNDATIONS, "bench", "parity"),
    "race": (*FOUNDATIONS, "text", "engine", "assembly", "llm", "bench", "parity", "terminal"),
    "commands": (
        *(*FOUNDATIONS, "client", "control", "text", "assembly", "llm", "bench", "parity", "advise", "train"),
        *("server", "gateway", "terminal", "race"),
    ),
    "cli": (*FOUNDATIONS, "text", "assembly", "llm", "bench", "parity", "terminal", "race", "commands"),
    "__main__": ("cli",),
    "__init__": ("errors", "core", "config", "threads", "llm"),
}
"""Folder or file of src/understudy -> what it may import. Each line names only lines above it."""

MAY_USE: dict[str, tuple[str, ...]] = {
    "compiled": ("numba",),
    "text": ("numpy", "tokenizers", "jinja2", "llguidance"),
    "control": ("numpy",),
    "sampling": ("numpy", "numba", "llvmlite", "llguidance"),
    "kernels": ("numpy", "numba", "llvmlite", "torch", "triton"),
    "models": ("numpy", "torch", "safetensors", "gguf", "huggingface_hub"),
    "runtime": ("numpy", "llvmlite"),
    "drafters": ("numpy", "torch"),
    "engine": ("numpy",),
    "bench": ("jinja2", "plotly", "rich"),
    "parity": ("rich",),
    "advise": ("numpy", "rich"),
    "train": ("numpy", "torch", "safetensors", "rich"),
    "wire": ("msgspec",),
    "server": ("msgspec", "fastapi", "starlette", "pydantic", "pydantic_core", "uvicorn", "h11", "prometheus_client"),
    "terminal": ("rich",),
    "race": ("rich",),
    "commands": ("rich", "yaml", "uvloop"),
    "cli": ("rich",),
}
"""Folder or file -> packages from outside that it may use; none where it is not named. Add a line for a new need."""

TORCH_FREE = ("core", "client", "control", "kv", "text", "sampling", "bench", "wire", "server", "gateway")
BARE = ("core", "client")
"""Loaded with torch, numpy and numba out of reach."""
UNCOMPILED = ("wire", "server", "gateway")
"""Loaded with torch and numba out of reach: the process that speaks HTTP must not wait for a compiler to load."""


@dataclass(frozen=True)
class Import:
    """One import statement's one name."""

    file: Path
    line: int
    room: str
    """The folder or file that imports."""
    package: str
    """The outermost package of what it imports; empty for a relative import."""
    target: str
    """The folder or file of ours that it imports, if it is ours."""

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}: {self.room} imports {self.target or self.package}"


def room_of(file: Path) -> str:
    """The folder of src/understudy that a file is in, or the file's own name where it is in none."""
    first = file.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


def imports_in(source: str, file: Path) -> Iterator[Import]:
    """Every import in the source of a file."""
    room = room_of(file)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            names = ["."]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            ours = rest.partition(".")[0] if package == "understudy" else ""
            yield Import(file, node.lineno, room, package, ours)


def exists(room: str) -> bool:
    return bool(room) and ((ROOT / room).is_dir() or (ROOT / f"{room}.py").is_file())


ALL = [found for file in sorted(ROOT.rglob("*.py")) for found in imports_in(file.read_text(), file)]


def test_sources_were_found() -> None:
    assert len(ALL) > 100
    assert {"core", "kv", "engine", "llm"} <= {found.room for found in ALL}


def test_table_points_one_way() -> None:
    lines = list(MAY_IMPORT)
    for place, (room, targets) in enumerate(MAY_IMPORT.items()):
        assert set(targets) <= set(lines[:place]), f"{room} may import something below it"


def test_every_folder_has_its_line() -> None:
    rooms = {room_of(file) for file in ROOT.rglob("*.py")}
    assert rooms <= set(MAY_IMPORT), "add the new folder to the table, in its place"


def against_the_table(imports: Iterable[Import]) -> list[str]:
    return [
        str(found)
        for found in imports
        if exists(found.target) and found.target != found.room and found.target not in MAY_IMPORT.get(found.room, ())
    ]


def test_imports_of_ours_follow_the_table() -> None:
    wrong = against_the_table(ALL)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("core", "from understudy.engine.engine import Engine"),
        ("control", "def late():\n    import understudy.kernels.cpu"),
        ("kv", "from understudy import llm"),
        ("engine", "if TYPE_CHECKING:\n    from understudy.llm import LLM"),
    ],
)
def test_import_that_points_the_wrong_way_is_found(room: str, source: str) -> None:
    assert len(against_the_table(imports_in(source, ROOT / room / "new.py"))) == 1


def test_imports_name_modules_of_ours_that_exist() -> None:
    """`from understudy import __version__` is the only import of the package itself."""
    strange = [str(f) for f in ALL if f.package == "understudy" and not exists(f.target) and f.target != "__version__"]
    assert not strange, "\n".join(strange)


def test_no_import_is_relative() -> None:
    assert not [str(found) for found in ALL if not found.package]


def test_packages_from_outside_follow_the_table() -> None:
    own = {"understudy", "", *sys.stdlib_module_names}
    wrong = [str(found) for found in ALL if found.package not in (*own, *MAY_USE.get(found.room, ()))]
    assert not wrong, "\n".join(wrong)


def modules_of(room: str) -> list[str]:
    if not exists(room):
        return []
    files = [ROOT / f"{room}.py"] if not (ROOT / room).is_dir() else sorted((ROOT / room).rglob("*.py"))
    names = [".".join(file.relative_to(ROOT.parent).with_suffix("").parts) for file in files]
    return [name.removesuffix(".__init__") for name in names]


def load_without(blocked: tuple[str, ...], modules: list[str]) -> subprocess.CompletedProcess[str]:
    """Import modules in a new process in which some packages cannot be imported."""
    lines = ["import sys", *(f"sys.modules[{name!r}] = None" for name in blocked), *(f"import {m}" for m in modules)]
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(lines)],
        env={"PYTHONPATH": str(ROOT.parent), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("room", [room for room in TORCH_FREE if exists(room)])
def test_loads_where_torch_is_blocked(room: str) -> None:
    blocked = ("torch", "numpy", "numba") if room in BARE else ("torch", "numba") if room in UNCOMPILED else ("torch",)
    loaded = load_without(blocked, modules_of(room))
    assert loaded.returncode == 0, loaded.stderr


@pytest.mark.parametrize("module", ["classes", "cost", "ledger"])
def test_control_that_decides_nothing_loads_without_a_compiler(module: str) -> None:
    """The process that speaks HTTP uses such modules."""
    loaded = load_without(("torch", "numpy", "numba"), [f"understudy.control.{module}"])
    assert loaded.returncode == 0, loaded.stderr


def test_package_itself_loads_where_torch_is_blocked() -> None:
    loaded = load_without(("torch", "numpy", "numba"), ["understudy", "understudy.config", "understudy.errors"])
    assert loaded.returncode == 0, loaded.stderr


def test_the_cpu_path_loads_without_triton_and_a_decoder_without_a_compiler() -> None:
    loaded = load_without(
        ("triton",), ["understudy.assembly", "understudy.kernels.cpu", "understudy.commands.generate"]
    )
    assert loaded.returncode == 0, loaded.stderr
    loaded = load_without(("triton", "numba"), ["understudy.models.decoder", "understudy.runtime.runner"])
    assert loaded.returncode == 0, loaded.stderr


def test_blocking_works() -> None:
    """The engine does need numpy: were it to load here, the tests above would prove nothing."""
    loaded = load_without(("torch", "numpy"), ["understudy.engine.engine"])
    assert loaded.returncode == 1
    assert "ModuleNotFoundError" in loaded.stderr
