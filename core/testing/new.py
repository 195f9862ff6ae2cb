"""`outweigh new SEAM NAME`: a package with a plugin that works, to begin from. Needs no network.

It holds pyproject.toml with the entry point, one module, a test file with the suite of the seam and
a gate, and a README. Everything passes before any edit. With --single-file it is one file for `-p`.
"""

from __future__ import annotations

import argparse
import importlib.resources
import keyword
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

from core.config import did_you_mean
from core.errors import UserError
from core.registry import Registry

_WHAT = {
    "kv": "Key/value manager",
    "fusion": "Fusion set",
    "graphs": "Graph strategy",
    "sched": "Scheduler",
    "eval": "Task",
}


def main(argv: Sequence[str]) -> int:
    """Write what the arguments name, and say what to do next."""
    args = _parser().parse_args(argv)
    seam, name = args.seam, args.name.replace("-", "_")
    if seam not in _WHAT:
        raise UserError(f"there is no seam '{seam}'{did_you_mean(seam, _WHAT, 'seams')}")
    usable = re.fullmatch(r"[a-z][a-z0-9_]*", name) and not keyword.iskeyword(name)
    if not usable or name == "auto":  # which a run decides itself
        what = "begin with a letter and go on with a-z, 0-9 and _"
        raise UserError(f"'{args.name}' cannot name a Python module and an offer: {what}")
    if taken := Registry().offers.get(seam, {}).get(name):
        raise UserError(f"{seam} '{name}' is there already, of {taken.owner}: choose another name")
    words = _words(seam, name)
    files = _single_file(words) if args.single_file else _package(words)
    _write(Path(args.to), files)
    print(*files, sep="\n")
    print(f"\nNext, in {Path(args.to)}:")
    module = f"{name}.py"
    if args.single_file:
        print(*(f"  {line} -p {module}" for line in (words["use"], words["check"])), sep="\n")
    else:
        print(f"  pip install -e {words['dist']}")
        print(*(f"  {line}" for line in (words["use"], words["check"])), sep="\n")
    return 0


def _words(seam: str, name: str) -> dict[str, str]:
    """What stands for the $words of the templates."""
    module = f"outweigh_{seam}_{name}"
    use = f'python -m core.run --{seam} {name} "The sea"'
    check = f"python -m core.check {seam} {name}"
    if seam == "graphs":  # which CUDA alone has
        use = f"python -m core.run --show graphs {name}"
    if seam == "eval":
        task = "--against contiguous --parts tasks --task"
        use = f"python -m evals.quality --kv paged {task} {name}=FILE"
        check = "python -m core.run --list"
    return {
        "seam": seam,
        "name": name,
        "cls": "".join(part.capitalize() for part in name.split("_")),
        "module": module,
        "dist": module.replace("_", "-"),
        "what": _WHAT[seam],
        "use": use,
        "check": check,
    }


def _package(words: Mapping[str, str]) -> dict[str, str]:
    """Path to text of every file of a package."""
    seam, dist = words["seam"], words["dist"]
    made = {
        "pyproject.toml": "pyproject",
        f"{words['module']}.py": seam,
        "tests/conftest.py": "conftest",
        f"tests/test_{words['name']}.py": f"test_{seam}",
        "README.md": "readme",
    }
    return {f"{dist}/{path}": _filled(template, words) for path, template in made.items()}


def _single_file(words: Mapping[str, str]) -> dict[str, str]:
    return {f"{words['name']}.py": _filled(words["seam"], words)}


def _filled(template: str, words: Mapping[str, str]) -> str:
    folder = importlib.resources.files("core.testing") / "templates"
    return Template((folder / f"{template}.txt").read_text(encoding="utf-8")).substitute(words)


def _write(folder: Path, files: Mapping[str, str]) -> None:
    """Write all of `files`, or none where something stands in the way."""
    tops = {folder / path.partition("/")[0] for path in files}
    for top in tops:
        if top.exists():
            raise UserError(f"{top} is there already: remove it, or choose another name or --to")
    for path, text in files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("outweigh new", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("seam", metavar="SEAM", help=", ".join(_WHAT))
    add("name", metavar="NAME", help="what the offer is called, as in --kv NAME")
    add("--single-file", action="store_true", help="one NAME.py for -p, and no package")
    add("--to", default=".", metavar="FOLDER", help="where to write; default: here")
    return parser
