"""The documentation as a site, with search and the reference of docstrings: `make docs`.

Pages link to each other, and to rows, tables and programs beside them, as they do in a checkout. The site therefore
has the layout of the checkout: the README, docs/, and each file that these link to, copied to build/docs. A folder that
a page links to becomes a page that lists its files. mkdocs then refuses links and anchors that lead nowhere.
"""

import ast
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
STAGED = CHECKOUT / "build" / "docs"
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
CODE = re.compile(r"```.*?```|``.*?``|`[^`\n]*`", re.DOTALL)
API = {"foveate": "foveate", "foveate.lab": "foveate.lab", "foveate.methods": "Methods of your own"}
"""Packages whose public names the reference lists, with the titles of their pages."""


def links(text: str) -> Iterator[str]:
    """The targets of a page's links to files, without anchors; code has no links."""
    for target in LINK.findall(CODE.sub("", text)):
        path = target.partition("#")[0]
        if path and "://" not in path and not path.startswith("mailto:"):
            yield path


def spaced(text: str) -> str:
    """A page with lists as mkdocs reads them: after a blank line where they follow a paragraph, and the lines of an
    item indented twice as far."""
    lines, fence, begins = [], None, ""
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip())
        if line.lstrip().startswith("```"):
            line, fence = " " * (indent if fence is None else fence) + line, indent if fence is None else None
        elif fence is not None:
            line = " " * fence + line if line else line
        elif not line.strip():
            begins = ""
        else:
            if re.match(r"\s*(- |\d+\. )", line) and begins and not re.match(r"\s*(- |\d+\. )", begins):
                lines.append("")
                begins = ""
            begins = begins or line
            line = " " * indent + line
        lines.append(line)
    return "\n".join(lines)


def public(package: str) -> list[str]:
    """The names in a package's ``__all__``."""
    tree = ast.parse((CHECKOUT.joinpath(*package.split(".")) / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise LookupError(f"{package} has no __all__")


def stage() -> None:
    """Copy the pages and what they link to into build/docs, and write the pages of the reference."""
    shutil.rmtree(STAGED, ignore_errors=True)
    left = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").rglob("*.md"))]
    seen = set(left)
    while left:
        source = left.pop()
        staged = STAGED / source.relative_to(CHECKOUT)
        staged.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            files = sorted(one for one in source.iterdir() if one.is_file() and not one.name.startswith("."))
            found = [f"- [{one.name}]({one.name})" for one in files]
            staged.mkdir(exist_ok=True)
            (staged / "README.md").write_text("\n".join([f"# {source.name}", "", *found, ""]), encoding="utf-8")
        elif source.suffix == ".md":
            text = source.read_text(encoding="utf-8")
            found = sorted({(source.parent / one).resolve() for one in links(text)})
            files = [one for one in found if one.exists() and one.is_relative_to(CHECKOUT)]
            for folder in {one for one in links(text) if (source.parent / one).is_dir()}:
                text = text.replace(f"]({folder})", f"]({posixpath.join(folder, 'README.md')})")
            staged.write_text(spaced(text), encoding="utf-8")
            files = [one / "README.md" if (one / "README.md").exists() else one for one in files]
        else:
            shutil.copyfile(source, staged)
            continue
        left += [one for one in files if one not in seen]
        seen.update(files)
    shutil.copyfile(CHECKOUT / ".ci" / "docs.css", STAGED / "docs.css")
    (STAGED / "api").mkdir()
    for package, title in API.items():
        lines = [
            f"# {title}",
            "",
            f"::: {package}",
            "    options:",
            "      members: false",
            "      show_root_heading: false",
            "",
        ]
        for name in public(package):
            if package == "foveate" and name in ("methods", *public("foveate.methods")):
                lines += [f"`{name}`: [its page](foveate.methods.md)", ""]
            else:
                lines += [f"::: {package}.{name}", ""]
        (STAGED / "api" / f"{package}.md").write_text("\n".join(lines), encoding="utf-8")


def main() -> None:
    """Stage the pages and build the site in site/; ends with mkdocs' exit code."""
    stage()
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean", *sys.argv[1:]]
    sys.exit(subprocess.run(command, cwd=CHECKOUT, check=False).returncode)


if __name__ == "__main__":
    main()
