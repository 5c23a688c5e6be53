"""The engine: the same words whatever is drafted, and whatever runs beside them."""
