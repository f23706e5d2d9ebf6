"""Reports: results as tables."""
