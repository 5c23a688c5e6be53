"""The picture of the bench's page, docs/bench.png: from a record, or from the made-up one.

python -m tests.bench.screenshot docs/bench.png [RECORD.json]
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.bench.sample_record import sample_record
from tests.chromium import Tab, chromium
from understudy.bench.page import write_page

WIDTH, HEIGHT = 1280, 1790


def take_screenshot(tab: Tab, record: Mapping[str, Any], file: Path, folder: Path) -> None:
    """Photograph the top of a record's page; the page itself is left in the folder."""
    page = folder / "bench.html"
    write_page(record, page)
    tab.open(page, width=WIDTH)
    tab.screenshot(file, height=HEIGHT)


def main(out: str, source: str = "") -> None:
    record = json.loads(Path(source).read_text(encoding="utf-8")) if source else sample_record()
    with tempfile.TemporaryDirectory() as folder, chromium(Path(folder) / "profile") as tab:
        take_screenshot(tab, record, Path(out), Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
