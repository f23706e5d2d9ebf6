"""`python -m foveate.cli`, as `foveate`."""

from foveate.cli import main

if __name__ == "__main__":
    main()
