"""Reports: result rows as Markdown tables, tables for the terminal, and plots."""
