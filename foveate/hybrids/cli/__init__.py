"""The commands that train."""

import typer

from foveate.hybrids.cli.train import app as train_app
from foveate.hybrids.cli.train_lte import lte

app = typer.Typer()
train_app.command()(lte)
app.add_typer(train_app, name="train")
