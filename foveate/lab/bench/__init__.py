"""Questions, one file each: programs that `foveate bench` runs, which check what they measure and write rows."""
