"""The wheel stands by itself: it installs beside nothing but what it asks for, and works from an empty folder.

The environment is new. It borrows the packages that the wheel requires, and no others, from the environment that runs
this file, so that nothing large is fetched; dev dependencies, extras and the editable foveate stay outside.
"""

import os
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path

from packaging.requirements import Requirement

CHECKOUT = Path(__file__).resolve().parents[1]


def call(*command: str | Path, cwd: Path) -> str:
    """What a command prints; its error ends this program."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{done.stdout}{' '.join(str(word) for word in command)}: exit code {done.returncode}")
    return done.stdout


def required(distribution: Distribution, extras: frozenset[str], found: dict[str, set[str]]) -> None:
    """Adds what a distribution requires here, and what that requires, to those found, by name with its extras."""
    for line in distribution.requires or []:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker and not any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            continue
        known = found.setdefault(requirement.name, set())
        if not known or not requirement.extras <= known:
            known |= {"", *requirement.extras}
            required(Distribution.from_name(requirement.name), frozenset(requirement.extras), found)


def borrow(names: set[str], folder: Path) -> None:
    """Links to the modules and the metadata of distributions."""
    for name in names:
        distribution = Distribution.from_name(name)
        for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            link = folder / top
            if not link.exists():
                link.symlink_to(distribution.locate_file(top))


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary).resolve()
        empty, built = work / "empty", work / "dist"
        empty.mkdir()
        pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
        call(*pip, "wheel", "--no-deps", "--wheel-dir", built, CHECKOUT, cwd=empty)
        (wheel,) = built.iterdir()

        environment = work / "environment"
        venv.create(environment, symlinks=True)
        python = environment / "bin" / "python"
        site = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=empty).strip())
        found: dict[str, set[str]] = {}
        (metadata,) = (one for one in zipfile.Path(wheel).iterdir() if one.name.endswith(".dist-info"))
        required(PathDistribution(metadata), frozenset(), found)
        borrow(set(found), site)
        # dependencies are there, so that pip checks them and fetches none
        call(*pip, "--python", python, "install", "--no-index", wheel, cwd=empty)

        said = call(environment / "bin" / "foveate", "doctor", cwd=empty)
        version = wheel.name.split("-")[1]
        if not re.search(rf"\bfoveate {re.escape(version)}\s", said):
            sys.exit(f"foveate doctor does not name version {version}:\n{said}")
        inside = work / "wheel_inside.py"
        inside.write_bytes((CHECKOUT / ".ci" / "wheel_inside.py").read_bytes())
        print(call(python, "-I", inside, CHECKOUT, cwd=empty), end="")


if __name__ == "__main__":
    main()
