"""The error that the command line prints as one line."""


class UserError(ValueError):
    """Bad input: an unknown name, a missing folder, a length out of range. The command line prints it as one line."""
