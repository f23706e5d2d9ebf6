"""What each optional path of LuKA's decode step buys: attention of a layer with one path after the other switched off.

    python benchmarks/luka_paths.py --out benchmarks/results/luka-paths.jsonl

Three pages of 16 tokens are refined, the setting in which all of these paths are taken. The rows are those of `foveate
bench decode`; `path` in their case names what is switched off. Rows of other paths stay in the file. Needs a GPU.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from foveate.bench import decode
from foveate.ops.summaries import plan
from foveate.results import measurements, outfile
from foveate.results.errors import UserError

METHODS = ("luka:page_size=16,top_k=3,score=spread", "luka:page_size=16,top_k=3,score=summary,prior=0.0")
OFF = {
    "none": {},
    "bounds": {"_NO_BOUNDS": 1 << 30},
    "selects in each program": {"_FEW_OF": 0},
    "replaces": {"_FEW": 0},
}
"""The paths: what of :mod:`foveate.ops.summaries.plan` switches each of them off."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--context", type=int, nargs="+", default=[32768, 131072], help="tokens so far")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32], help="sequences")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args(arguments)
    outfile.check(given.out)
    for path, off in OFF.items():
        print(f"off: {path}", flush=True)
        with mock.patch.dict(vars(plan), off):
            found = decode.run(decode.Plan(METHODS, given.context, given.batch, device=given.device))
        rows = [row | {"case": row["case"] | {"path": path}} for row in found if row["case"]["method"] in METHODS]
        measurements.write(given.out, rows)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
