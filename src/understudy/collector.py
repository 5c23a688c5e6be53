"""The garbage collector of a process that serves: it looks at what requests leave behind, not at the model."""

from __future__ import annotations

import gc

_NEW_OBJECTS = 50_000
"""Objects between two looks. A step with hundreds of texts makes thousands, and nearly all are gone by its end."""


def calm_collector() -> None:
    """Leave all that is there now out of every look to come, and look less often. For whoever owns the process.

    With 512 texts in a step looking took a third of the host's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, 20, 50)
