"""Tables in Markdown, one module for each kind of rows."""
