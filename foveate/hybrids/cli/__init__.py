"""The commands that train."""

import typer

from foveate.hybrids.cli.train import app as train
from foveate.hybrids.cli.train_lte import lte

app = typer.Typer()
train.command()(lte)
app.add_typer(train, name="train")
