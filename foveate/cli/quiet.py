"""What a command leaves out of its output."""

import warnings


def quiet() -> None:
    """Keep Transformers' loading bars and warnings out of the output, and warnings to their text."""
    from huggingface_hub.utils import disable_progress_bars
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bars()
    warnings.formatwarning = lambda message, *where, **line: f"note: {message}\n"
