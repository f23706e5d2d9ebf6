"""What papers report, to stand beside our measurements."""
