"""score: how much each key, page or block matters to a query."""

from foveate.ops.score.reference import column_mass, query_mass, tile_mass

__all__ = ["column_mass", "query_mass", "tile_mass"]
