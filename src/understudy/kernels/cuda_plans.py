"""How a linear layer is cut up on a GPU: the split, which its bits depend on, and the tile, which they do not.

Both follow from the weight's shape and the number of rows by a few rules, which were measured on an H200: docs/GPU.md
has the table and the command that makes it.
"""

from __future__ import annotations

from dataclasses import dataclass

_PROCESSORS = 132
"""Multiprocessors of an H200. The rules are tuned for it, and for the shared memory that Hopper has."""
_ENOUGH_PROGRAMS = 120
_MOST_PARTS = 12
_NARROW_OUTPUTS = 64
_LONG_INPUTS = 2048
_LONG_UNIT = 128
_MANY_OUTPUTS = 16384


@dataclass(frozen=True, slots=True)
class Split:
    """The order in which the inputs of a weight are added up: one after the other within a part."""

    unit: int
    """A part has a multiple of so many inputs; a tile takes as many at a time, or a half or a quarter"""
    num_parts: int
    """Sums that are computed apart, and added in order by whoever reads them"""

    def part_inputs(self, num_inputs: int) -> int:
        """Inputs of one part; the last ones of the last part may be padding."""
        return -(-num_inputs // (self.unit * self.num_parts)) * self.unit

    def padded(self, num_inputs: int) -> int:
        """Inputs with the padding of the last part."""
        return self.part_inputs(num_inputs) * self.num_parts


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program of a launch computes."""

    outputs: int
    rows: int
    inputs: int
    """Inputs of one step"""
    num_warps: int
    num_stages: int
    """Steps whose weights are on their way at once"""
    by_box: bool = False
    """Whether each step's weights and rows are fetched as whole boxes, which Hopper has an engine for"""


def split_for(num_outputs: int, num_inputs: int) -> Split:
    """The split of a weight [outputs, inputs]: as few parts as give every multiprocessor a program.

    More would cost memory traffic with many rows; fewer would leave processors idle with few.
    """
    unit = _LONG_UNIT if num_inputs >= _LONG_INPUTS else 64
    num_units = -(-num_inputs // unit)
    num_tiles = -(-num_outputs // _NARROW_OUTPUTS)
    even = [parts for parts in range(1, min(num_units, _MOST_PARTS) + 1) if num_units % parts == 0]
    enough = [parts for parts in even if num_tiles * parts >= _ENOUGH_PROGRAMS]
    return Split(unit, enough[0] if enough else even[-1])


def tile_for(num_rows: int, *, num_outputs: int, split: Split) -> Tile:
    """The tile of a launch over this many rows."""
    num_programs = -(-num_outputs // _NARROW_OUTPUTS) * split.num_parts
    is_wide = num_outputs >= _MANY_OUTPUTS
    if split.unit < _LONG_UNIT:
        tiles = _SHORT_WIDE if is_wide else _SHORT
    elif is_wide:
        tiles = _WIDE
    else:
        tiles = _ONE_WAVE if num_programs <= _PROCESSORS else _WAVES
    return _smallest(tiles, num_rows)


def gated_tile_for(num_rows: int, *, split: Split) -> Tile:
    """The tile of a launch over gate and up: each program computes as many outputs of both."""
    return _smallest(_GATED if split.unit == _LONG_UNIT else _SHORT_GATED, num_rows)


def _smallest(tiles: dict[int, Tile], num_rows: int) -> Tile:
    """The tile of the smallest bucket that holds so many rows."""
    return tiles[min((most for most in tiles if most >= num_rows), default=max(tiles))]


# Most rows -> tile; the last bucket also serves all above it. Where one program has a multiprocessor for itself, it
# may keep as many stages in its memory as there is room for; else several share it and hide each other's waits.
# Boxes leave the threads nothing but products to do, which pays where there are many rows to multiply.

_ONE_WAVE = {
    16: Tile(64, 16, 128, 4, 6),
    32: Tile(64, 32, 128, 4, 5),
    64: Tile(64, 64, 128, 4, 5, by_box=True),
    128: Tile(64, 128, 128, 4, 4, by_box=True),
    256: Tile(128, 128, 64, 4, 5, by_box=True),
    512: Tile(256, 128, 64, 8, 4, by_box=True),
}
_WAVES = {
    16: Tile(64, 16, 64, 4, 6),
    32: Tile(64, 32, 64, 4, 5),
    64: Tile(64, 64, 128, 4, 3),
    128: Tile(64, 128, 64, 4, 4, by_box=True),
    256: Tile(128, 128, 64, 4, 3, by_box=True),
    512: Tile(128, 128, 64, 4, 5, by_box=True),
    1024: Tile(256, 128, 64, 8, 4, by_box=True),
}
_WIDE = {
    16: Tile(128, 16, 128, 8, 4, by_box=True),
    32: Tile(64, 32, 128, 4, 4, by_box=True),
    64: Tile(128, 64, 64, 4, 3, by_box=True),
    128: Tile(128, 128, 64, 4, 6, by_box=True),
    256: Tile(256, 128, 64, 8, 4, by_box=True),
}
_SHORT = {
    16: Tile(64, 16, 64, 4, 6),
    32: Tile(64, 32, 64, 4, 5),
    64: Tile(64, 64, 64, 4, 4),
    128: Tile(64, 64, 64, 4, 3, by_box=True),
}
_SHORT_WIDE = {
    16: Tile(128, 16, 64, 4, 6),
    32: Tile(128, 32, 64, 4, 3),
    64: Tile(128, 64, 64, 4, 3),
    128: Tile(64, 128, 64, 4, 3, by_box=True),
    256: Tile(128, 128, 64, 4, 3, by_box=True),
}
_GATED = {
    16: Tile(64, 16, 128, 4, 4),
    32: Tile(64, 32, 128, 4, 4),
    64: Tile(64, 64, 128, 4, 4, by_box=True),
    128: Tile(64, 128, 64, 4, 3, by_box=True),
    384: Tile(128, 128, 64, 8, 4, by_box=True),
    512: Tile(64, 128, 64, 4, 5, by_box=True),
    1024: Tile(128, 128, 64, 8, 4, by_box=True),
}
_SHORT_GATED = {
    16: Tile(64, 16, 64, 4, 5),
    128: Tile(64, 32, 64, 4, 5),
    256: Tile(64, 64, 64, 4, 5),
    512: Tile(64, 64, 64, 4, 4, by_box=True),
}
