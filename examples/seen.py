"""What `make demo` saw, in words: who found the numbers that were hidden in the novel, and what each read for it.

python examples/seen.py runs/demo.jsonl
"""

import argparse
import json
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="file of `foveate compare --task niah`")
    given = parser.parse_args()

    rows = [json.loads(line) for line in given.rows.read_text(encoding="utf-8").splitlines()]
    (dense,) = (row for row in rows if row["spec"] == "dense")
    others = sorted((row for row in rows if row is not dense), key=lambda row: -row["score"])

    def found(row: dict) -> int:
        return round(row["n"] * row["score"] / 100)

    print(f"Seen: dense attention reads all keys and finds {found(dense)} of {dense['n']} hidden numbers.")
    for words, some in (
        ("As many or more", [row for row in others if found(row) >= found(dense)]),
        ("Some", [row for row in others if 0 < found(row) < found(dense)]),
        ("None", [row for row in others if not found(row)]),
    ):
        named = ", ".join(f"{_name(row)} ({found(row)}, {row['keys_read_share']:.0%} of the keys)" for row in some)
        print(f"{words}: {named or 'no method'}.")


def _name(row: dict) -> str:
    if row["method"] != "kascade":
        return row["method"]
    return f"kascade with {'calibrated' if row['settings'].get('calibration') else 'evenly spaced'} anchors"


if __name__ == "__main__":
    main()
