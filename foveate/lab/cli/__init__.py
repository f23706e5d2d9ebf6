"""The commands that measure."""

import typer

from foveate.lab.bench.commands import app as bench
from foveate.lab.cli import asking, chat, checking, doctor, fetching, report
from foveate.lab.report.commands import app as plot

app = typer.Typer()
for _command in (
    doctor.doctor,
    asking.generate,
    chat.chat,
    checking.check,
    asking.compare,
    asking.calibrate,
    asking.tune,
    report.report,
    fetching.salad,
    fetching.fetch,
):
    app.command()(_command)
app.add_typer(bench, name="bench")
app.add_typer(plot, name="plot")
