"""Rules of the tree that no type checker sees: who imports what, how large the core is."""

from __future__ import annotations

import ast
import importlib.util
import io
import json
import re
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_CORE_LINES = 3500
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
LAYOUT += (tokenize.ENCODING, tokenize.ENDMARKER)

# Imports each module where torch and triton cannot be imported; prints {module: what it asked for}.
PROBE = """
import importlib, json, sys

class Forbidden:
    asked = {}
    module = None

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton"):
            self.asked.setdefault(self.module, name)
            raise ImportError(name)

finder = Forbidden()
sys.meta_path.insert(0, finder)
for module in sys.argv[1:]:
    finder.module = module
    try:
        importlib.import_module(module)
    except ImportError:
        if module not in finder.asked:
            raise
print(json.dumps(finder.asked))
"""


def python_files(*folders):
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def heavy_imports(*modules, path=ROOT):
    """Which of `modules` ask for torch or triton when a fresh interpreter imports them."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *modules],
        capture_output=True,
        text=True,
        cwd=path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def offer_modules():
    """Every module whose import the registry, `--list` or another offer may cause."""
    from core.registry import Registry

    offers = Registry().offers
    targets = [o.target.partition(":")[0] for named in offers.values() for o in named.values()]
    packages = [module_name(path) for path in (ROOT / "plugins").rglob("__init__.py")]
    return sorted({"plugins.builtin", *targets, *packages})


def test_importing_a_plugin_module_imports_neither_torch_nor_triton():
    assert heavy_imports(*offer_modules()) == {}


def test_the_host_shell_imports_neither_torch_nor_triton():
    """So that --list, --help and every refusal of names and options answer at once."""
    shell = "hookspecs config conform registry plan show run inputs sampling seams batch".split()
    assert heavy_imports("core", *(f"core.{name}" for name in shell)) == {}


def test_the_probe_sees_a_hidden_import(tmp_path):
    (tmp_path / "shy.py").write_text("try:\n    import triton.language\nexcept ImportError: pass")
    (tmp_path / "fine.py").write_text("def later():\n    import torch")
    assert heavy_imports("fine", "shy", path=tmp_path) == {"shy": "triton"}


def imported(source):
    """Top-level packages that `source` imports, wherever the import stands."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("path", python_files("core"), ids=module_name)
def test_core_imports_no_plugin(path):
    assert not imported(path.read_text()) & {"plugins", "evals", "tests"}


@pytest.mark.parametrize("path", python_files("plugins"), ids=module_name)
def test_plugins_import_no_evals_and_no_tests(path):
    assert not imported(path.read_text()) & {"evals", "tests"}


def test_imports_are_found_wherever_they_stand():
    source = "import a.b\ndef f():\n    from c.d import e\nfrom . import g\n"
    assert imported(source) == {"a", "c"}


def test_what_is_imported_is_declared():
    """A fresh installation has what the metadata names, and no more."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in project["dependencies"]}
    needed = {
        name: path.name
        for path in python_files("core", "plugins", "evals")
        for name in imported(path.read_text())
        if "testing" not in path.parts
    }
    known = declared | set(sys.stdlib_module_names) | {"core", "plugins", "evals"}
    assert {name: file for name, file in needed.items() if name not in known} == {}


def test_every_folder_of_the_packages_is_a_package():
    """Without __init__.py a folder of that name elsewhere on the path would win."""
    folders = {path.parent for path in python_files("core", "plugins", "evals")}
    assert [str(f) for f in sorted(folders) if not (f / "__init__.py").exists()] == []


def code_lines(source):
    """Lines with code on them: no blank lines, no comments, no docstrings."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and body:
            first = body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                lines -= set(range(first.lineno, (first.end_lineno or 0) + 1))
    return len(lines)


def test_what_counts_as_a_line_of_code():
    source = '''"""Module.

    Docstring.
    """

    # a comment
    def f(
        x,
    ):
        """Docstring."""
        text = """two
        lines"""
        return x  # trailing

    '''
    assert code_lines(re.sub("^    ", "", source, flags=re.M)) == 6


def test_the_core_is_small():
    files = [path for path in python_files("core") if "testing" not in path.parts]
    sizes = {path.name: code_lines(path.read_text()) for path in files}
    assert sum(sizes.values()) <= MAX_CORE_LINES, sizes


def test_nothing_speaks_of_the_machine_it_was_written_on():
    # Character classes keep this file from finding itself.
    forbidden = re.compile(
        r"/wor[k]/|/op[t]/lab|/roo[t]/|/hom[e]/\w|pypi\.or[g]|pythonhoste[d]|\bTOD[O]\b|\bFIXM[E]\b"
    )
    texts = [*python_files("core", "plugins", "evals", "tests"), ROOT / ".ci" / "run"]
    texts += [*ROOT.glob("*.toml"), *ROOT.glob("*.md")]
    for folder in ("core", "plugins", "evals", "tests"):
        texts += [p for kind in ("*.md", "*.toml", "*.sh") for p in (ROOT / folder).rglob(kind)]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in texts
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if forbidden.search(line)
    ]
    assert found == []


def test_nobody_imports_the_command_line():
    """`core/run.py` runs as __main__: imported too, it would exist twice."""
    for path in python_files("core", "plugins", "evals"):
        assert not re.search(
            r"^\s*(from core\.run import|import core\.run)", path.read_text(), re.M
        )
    assert importlib.util.find_spec("core.run") is not None
