"""What the documents show is run: every Python block, every command that needs no real model."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from evals.quality.tables import quality_tables
from evals.speed.figures import PRODUCTS, SPANS, readme_tables, record, speed_tables
from plugins.fusion.triton import MAX_FEW_ROWS, MAX_TILE_ROWS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


SCRIPT = "import sys; from core.run import main; sys.exit(main(sys.argv[1:]))"  # what `outweigh` is


def commands():
    """Commands of the README that run offline, with random weights where they say DIR."""
    lines = [line.split("  #")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    parts = [
        part.strip().replace("DIR", "random:tiny") for line in lines for part in line.split("&&")
    ]
    known = ("python -m core.", "outweigh ")
    return [p for p in parts if p.startswith(known) and "Qwen/" not in p]


def run(argv, cwd):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        argv, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(
    ("document", "tables"),
    [
        ("README.md", readme_tables),
        ("evals/speed/README.md", speed_tables),
        ("evals/quality/README.md", quality_tables),
    ],
    ids=["README", "evals/speed", "evals/quality"],
)
def test_the_tables_of_the_documents_are_those_of_the_records(document, tables):
    text = (ROOT / document).read_text(encoding="utf-8")
    missing = [table for table in tables() if table not in text]
    assert not missing, f"{document} lacks:\n{missing[0]}"


def test_a_span_is_used_only_where_it_is_faster_than_its_nodes():
    rows = [row for name in (SPANS, PRODUCTS) for row in record(name)["rows"]]
    slower = [row for row in rows if row.get("verdict", "faster") != "faster"]
    assert not slower, f"{slower[0]['span']} at {slower[0]['tokens']} tokens"
    timed = {(row["span"], row["tokens"]) for row in rows if row["status"] == "timed"}
    assert {("linear", MAX_FEW_ROWS), ("linear_add_norm", MAX_TILE_ROWS)} <= timed


def test_the_readme_shows_commands_and_code():
    assert len(commands()) >= 8
    assert len(blocks("python")) >= 2


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_readme(command, tmp_path):
    words = shlex.split(command)
    start = ["-c", SCRIPT] if words[0] == "outweigh" else []
    done = run([sys.executable, *start, *words[1:]], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("code", blocks("python"))
def test_a_python_block_of_the_readme(code, tmp_path):
    """A block that opens with `# FILE   COMMAND` is saved as FILE and COMMAND is run."""
    head = re.match(r"# (\S+\.py)\s+python (.+)\n", code)
    name = head[1] if head else "example.py"
    (tmp_path / name).write_text(code, encoding="utf-8")
    argv = shlex.split(head[2]) if head else [name]
    done = run([sys.executable, *argv], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout
