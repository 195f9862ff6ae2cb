"""Studies of evals.speed.ablate that the documents show, kept small.

    python -m evals.speed.results LADDER NAME

keeps what is in the folder LADDER as results/NAME beside this module: result.json without what
draws charts, describes engines and stands behind the tables, numbers to five digits, and the
result.md that is made of it. `evals.speed.figures` makes the tables of the documents of them.

Exit code 0: kept; 2: LADDER holds no complete study, or NAME is no name or taken.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence as Seq
from pathlib import Path
from typing import Any

from core.errors import UserError, explained
from evals import records
from evals.arguments import Parser
from evals.speed.figures import table
from evals.speed.ladder import markdown
from evals.speed.ladder.findings import RATE, TTFT
from evals.speed.ladder.study import read

RESULTS = Path(__file__).with_name("results")
_LEFT_OUT = ("charts", "engines")


def result(name: str) -> dict[str, Any]:
    """One that is kept, by its name."""
    return read(RESULTS / name / "result.json")


def names() -> list[str]:
    """Of all that are kept."""
    return sorted(path.parent.name for path in RESULTS.glob("*/result.json"))


def small(document: Mapping[str, Any]) -> dict[str, Any]:
    """A study without what its tables do not need."""
    kept = {key: value for key, value in document.items() if key not in _LEFT_OUT}
    kept["command"] = _repeatable(kept["command"])
    found: dict[str, Any] = _rounded(kept)
    return found


def _repeatable(command: str) -> str:
    """A command without where its results went, and without that it went on with others."""
    words = shlex.split(command)
    kept = []
    for before, word in zip(["", *words], words, strict=False):
        if "--out" not in (before, word) and word != "--resume" and not word.startswith("--out="):
            kept.append(word)
    return shlex.join(kept)


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def keep(folder: Path, name: str) -> Path:
    """The folder in which it lies now. Raises UserError where there is nothing to keep."""
    path = folder / "result.json"
    if not path.is_file():
        raise UserError(f"{path} is not there: give the --out of an ablation")
    document = read(path)
    if "ladder" not in document:
        raise UserError(f"{path} is of no ablation: give the --out of one")
    if not document["complete"]:
        raise UserError(f"{path} is of a study that is not complete: finish it with --resume")
    if Path(name).name != name or name[:1] in ("", "."):
        raise UserError(f"'{name}' is no name of a folder: give one without slashes")
    kept = small(document)
    out = RESULTS / name
    if out.exists():
        raise UserError(f"{out} is kept already: give another name, or remove it first")
    with explained(f"{out} cannot be made", "keep results in a checkout of the project"):
        out.mkdir(parents=True, exist_ok=True)
    records.write_text(out / "result.json", json.dumps(kept, ensure_ascii=False) + "\n")
    records.write_text(out / "result.md", markdown.text(kept))
    return out


# -------- for the documents


def load_table(found: Mapping[str, Any], load: str) -> str:
    """Of each arm at one load TTFT p50 and what its rung did to it; last the whole ladder."""
    block = found["blocks"][load]
    rows = [_row(block, arm) for arm in found["ladder"] if arm["name"] in block["arms"]]
    if (whole := block["whole"].get(TTFT)) is not None:
        rows.append(
            ("the whole ladder", found["ladder"][0]["name"], "", markdown.interval(whole), "", "")
        )
    share = load.removeprefix("load-")
    head = (f"at {share}", "beside", "TTFT p50 ms", "ratio [95 %]", "share", "verdict")
    return table(head, rows)


def capacity_table(found: Mapping[str, Any]) -> str:
    """Output tokens a second of each arm in a closed loop, and its change; all that it is where
    the arm below it was not measured."""
    arms = found["blocks"]["capacity"]["arms"]
    rows = []
    for arm in found["ladder"]:
        if (name := arm["name"]) in arms:
            known = arm if arm["before"] in arms else {**arm, "before": None}
            rows.append((name, markdown.change(known), f"{arms[name]['figures'][RATE]:,.4g}"))
    return table(("arm", "change", "capacity, tok/s"), rows)


def tables(name: str) -> list[str]:
    """Those of a study that is kept: capacity, one a load, and that of rungs left out."""
    found = result(name)
    blocks = found["blocks"]
    made = [capacity_table(found)]
    made += [load_table(found, load) for load in blocks if load.startswith("load-")]
    made += [markdown.left_out_table(of) for name, of in blocks.items() if name == "leave-one-out"]
    return [one for one in made if one]


def _row(block: Mapping[str, Any], arm: Mapping[str, Any]) -> tuple[str, ...]:
    name, figures = arm["name"], block["figures"][TTFT]
    middle = f"{block['arms'][name]['figures'][TTFT]:,.4g}"
    if (step := figures["steps"].get(name)) is None:
        before = arm["before"] if arm["before"] in block["arms"] else ""
        return name, before, middle, "", "", figures["refused"].get(name, "")
    share = block.get("shares", {}).get(name)
    part = "" if share is None else f"{share:.0%}"
    return name, arm["before"], middle, markdown.interval(step), part, step["verdict"]


def main(argv: Seq[str] | None = None) -> int:
    parser = Parser("evals.speed.results", __doc__)
    parser.add_argument("folder", type=Path, metavar="LADDER", help="--out of evals.speed.ablate")
    parser.add_argument("name", metavar="NAME")
    args = parser.parse_args(argv)
    try:
        print(keep(args.folder, args.name))
    except UserError as error:
        print(f"outweigh: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
