"""What the documents show is run: every Python block, every command that needs no real model."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def commands():
    """Commands of the README that run as they stand: no installation, no model of the reader's."""
    lines = [line.split("  #")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    parts = [part.strip() for line in lines for part in line.split("&&")]
    runs = [p for p in parts if p.startswith(("python -m core.run", "outweigh run"))]
    return [p for p in runs if not {"DIR", "--model"} & set(shlex.split(p))]


def run(argv, cwd):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        argv, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )


def test_the_readme_shows_commands_and_code():
    assert len(commands()) >= 4
    assert len(blocks("python")) >= 2


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_readme(command, tmp_path):
    words = shlex.split(command)
    module = {"outweigh": ["-m", "core.run"]}.get(words[0], [])
    rest = words[2:] if words[0] == "outweigh" else words[1:]
    done = run([sys.executable, *module, *rest], tmp_path)
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
