"""The only code that knows an engine."""
