"""Speed questions, one file each: programs that `foveate bench` runs, which check what they time and write rows."""
