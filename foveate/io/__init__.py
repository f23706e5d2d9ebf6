"""Files: one reader, one writer, JSON without surprises, digests, published forms of data; circumstances of a run."""
