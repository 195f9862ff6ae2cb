"""`outweigh gate --base REV`: a working tree held to its budgets, and its speed to a revision's.

First the exact counts of the file of budgets, then the gates of the base that are gone, then times:
the base is checked out beside the tree (git worktree), measured against itself (A/A), which says
how many rounds it takes, and then against the tree, in turn, in processes of their own. Times are
recorded in --json and judged by nobody; what is judged is their ratio. `core.testing.gates` says
what the file holds. Exit codes: 0 all is well; 1 a gate has failed: a count, a slow-down, or one
that is missing; 2 for what the caller can mend; 3 it cannot be decided here.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from core import show
from core.errors import UserError
from core.testing import gate_worker
from core.testing.gates import Budgets, Gate, Outcome, exit_code

DEFAULT = Path("tests/bench/budgets.toml")


class Worker(AbstractContextManager["Worker"]):
    """A process that imports packages from `tree` (its folder `path`), and answers."""

    def __init__(self, tree: Path, path: str) -> None:
        roots = list(dict.fromkeys(str(p.resolve()) for p in (tree / path, tree)))
        names = [p.stem for p in (tree / path).glob("*") if _is_importable(p)]
        alone = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1"}
        behind = filter(None, [os.environ.get("PYTHONPATH")])  # where packages may lie too
        environment = {**alone, **os.environ, "PYTHONPATH": os.pathsep.join([*roots, *behind])}
        self._process = subprocess.Popen(
            [sys.executable, "-P", gate_worker.__file__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, cwd=tree, env=environment,
        )  # fmt: skip
        self.ask(open={"roots": roots, "names": names})

    def ask(self, **question: Any) -> dict[str, Any]:
        """The answer; a process that has died is an error, as an answer."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            print(json.dumps(question), file=stdin, flush=True)
        except BrokenPipeError:
            return {"error": "the process has ended"}
        line = stdout.readline()
        if not line:
            return {"error": f"the process ended with status {self._process.wait()}"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __exit__(self, *_: object) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _is_importable(path: Path) -> bool:
    return path.suffix == ".py" or (path / "__init__.py").is_file()


def main(argv: Sequence[str]) -> int:
    """Run every gate that the arguments leave, print a row for each, and give the exit code."""
    args = _parser().parse_args(argv)
    tree = Path(git(Path(), "rev-parse", "--show-toplevel"))
    file = (args.budgets or tree / DEFAULT).resolve()
    budgets = Budgets.read(file)
    if not budgets.gates:
        raise UserError(f"{file} has no gate: add one, or name another file by --budgets")
    if args.base is None and not args.counts:
        raise UserError("there is no base to compare times with: give --base REV, or --counts")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise UserError(f"{args.json} cannot be written, its folder is not there: make it first")
    outcomes, record = [], dict[str, Any]()
    gates = list(budgets.gates.values())
    if args.base is not None:
        revision = git(tree, "rev-parse", "--verify", "--quiet", f"{args.base}^{{commit}}")
        outcomes += budgets.lost_from(budgets_of(tree, revision, file))
    with Worker(tree, budgets.path) as worker:
        able, unable = usable(gates, worker, args.device)
        outcomes += unable
        with show.progress_bar(sys.stderr) as progress:
            outcomes += counted([g for g in able if g.kind == "counts"], worker, progress)
        timed = [gate for gate in able if gate.kind == "times"]
        missing = {gate.name: said for gate in timed if (said := unprepared(gate, worker))}
    outcomes += [
        gate.outcome("failed", missing[gate.name]) for gate in timed if gate.name in missing
    ]
    timed = [gate for gate in timed if gate.name not in missing]
    if args.counts:
        outcomes += [gate.outcome("left out", "--counts asks for no times") for gate in timed]
    elif timed:
        # By name: statistics are of evals, of which core imports nothing.
        revisions = importlib.import_module("evals.speed.revisions")
        with checked_out(tree, revision) as base, show.progress_bar(sys.stderr) as progress:
            trees = {"base": base, "tree": tree}
            found, record = revisions.compared(timed, trees, budgets.path, args.rounds, progress)
            outcomes += found
    show.print_rows([outcome._asdict() for outcome in outcomes], sys.stdout)
    code = exit_code(outcomes)
    if args.json is not None:
        rows = [outcome._asdict() for outcome in outcomes]
        document = {"base": args.base, "exit_code": code, "gates": rows, **record}
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return code


def usable(
    gates: list[Gate], worker: Worker, device: str | None
) -> tuple[list[Gate], list[Outcome]]:
    """The gates that can be measured here, and what became of the others."""
    why = worker.ask(cuda=True) if any(gate.needs == "cuda" for gate in gates) else {"found": None}
    reason = why.get("found", why.get("error"))
    able, unable = [], []
    for gate in gates:
        if gate.needs == "cuda" and device == "cpu":
            unable.append(gate.outcome("left out", "it needs CUDA, and --device cpu was given"))
        elif gate.needs == "cuda" and reason:
            said = f"{reason}: run it where there is one, or leave it out by --device cpu"
            unable.append(gate.outcome("refused", said))
        else:
            able.append(gate)
    return able, unable


def counted(gates: list[Gate], worker: Worker, progress: show.Progress) -> list[Outcome]:
    """Each count of the tree beside its budget."""
    outcomes = []
    for i, gate in enumerate(gates):
        progress("count", i, len(gates))
        answer = worker.ask(count=gate.measure, **{"with": gate.options})
        if "error" in answer:
            outcomes.append(gate.outcome("failed", f"it was not counted: {answer['error']}"))
        else:
            outcomes.append(gate.judged(answer["found"]))
    return outcomes


def unprepared(gate: Gate, worker: Worker) -> str | None:
    """Why a time cannot be taken in the tree, base or none; None where it can."""
    error = worker.ask(prepare=gate.measure, **{"with": gate.options}).get("error")
    return error and f"it cannot be timed: {error}"


# -------- revisions


def git(folder: Path, *command: str) -> str:
    """What git prints. Raises UserError with what it complains of."""
    try:
        done = subprocess.run(
            ["git", *command], cwd=folder, capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise UserError(f"git does not run ({error.strerror}): install it") from error
    if done.returncode:
        what = f"git {' '.join(command)} failed"
        said = " ".join(done.stderr.split()) or "it knows no such revision"
        raise UserError(f"{what} ({said}): name a commit of this repository")
    return done.stdout.strip()


def budgets_of(tree: Path, revision: str, file: Path) -> Budgets:
    """The file of budgets as it was; without gates where it was not there."""
    try:
        inside = file.relative_to(tree).as_posix()
    except ValueError as error:
        raise UserError(f"{file} is not in {tree}: name a file of the repository") from error
    listed = git(tree, "ls-tree", "--name-only", revision, "--", inside)
    return Budgets.of(git(tree, "show", f"{revision}:{inside}") if listed else "", file)


@contextmanager
def checked_out(tree: Path, revision: str) -> Iterator[Path]:
    """A worktree of `revision` in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="outweigh-gate-") as folder:
        path = Path(folder, "base")
        git(tree, "worktree", "add", "--detach", "--quiet", str(path), revision)
        try:
            yield path
        finally:
            git(tree, "worktree", "remove", "--force", str(path))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("outweigh gate", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--base", metavar="REV", help="the revision that times are compared with")
    add("--counts", action="store_true", help="the exact counts alone")
    add("--budgets", type=Path, metavar="FILE", help=f"default: {DEFAULT}, of the repository")
    add("--device", choices=("cpu",), help="leave out the gates that need another")
    add("--rounds", type=int, default=30, metavar="N", help="the most that are measured; even")
    add("--json", type=Path, metavar="FILE", help="outcomes, and times as they were measured")
    return parser
