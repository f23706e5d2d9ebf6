"""`python -m foveate.lab.lm_eval ...`: lm-eval's command line, with the model `foveate`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run lm-eval's command line; ends with one line where lm-eval is not installed."""
    try:
        import foveate.lab.lm_eval_model  # noqa: F401 registers the model
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}")
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
