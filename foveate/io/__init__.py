"""Files: one reader, one writer, JSON without surprises, digests."""
