"""The architecture as rules over the syntax tree: floors, budgets, documentation, and what never stands in this code.

A rule maps one source to its violations. Every rule is run on the package, and on sources that break it.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# From the ground up; a module imports from lower floors only. A package counts as one module, except that encodings do
# not see each other, nor do families. The public root ("") stands on top.
FLOORS = [
    *(
        "errors provenance",
        "registry positions scaling",
        "temperature",
        "hooks",
        "config family",
        "gating rotation",
        "encodings families",
        "caching joint kernels length scores",
        "toeplitz reach",
        "blocks flash flex stretches",
        "written",
        "operators",
        "forms",
        "interposer",
        "declared inputs",
    ),
    *(
        "anatomy modeling trial",
        "planning",
        "surgery",
        "verify",
        "patching",
        "export",
        "data collators evaluation pairs",
        "plots",
        "report",
        "hub",
        "conversion",
    ),
    *("workload", "benchmark catalogue harness inspection metric quickstart", "cli"),
]
HEIGHT = {unit: height for height, floor in enumerate([*FLOORS, " "]) for unit in floor.split(" ")}
ENGINE = {
    "caching",
    "kernels",
    "scores",
    "interposer",
    "declared",
    "trial",
    "inputs",
    "modeling",
    "planning",
    "surgery",
    "verify",
    "patching",
    "export",
    "hub",
}
MEASURES = {"data", "evaluation", "pairs", "plots", "report"}  # one code for base and patched model
STRANGERS = {"encodings": {"transformers"}, "families": {"torch", "transformers"}}
SEAM = re.compile(r"\bAttentionInterface\b|\bALL_ATTENTION_FUNCTIONS\b")
VAGUE = {"common", "helper", "helpers", "misc", "util", "utils"}
MACHINE = re.compile(r"/(?:work|root|opt)/\w|pypi\.org|pythonhosted\.org|download\.pytorch\.org")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One file: its dotted name below the package (empty for the package itself) and its text."""

    name: str
    text: str

    @property
    def unit(self) -> str:
        return self.name.partition(".")[0]

    def nodes(self) -> Iterator[ast.AST]:
        return ast.walk(ast.parse(self.text))

    def imports(self) -> Iterator[tuple[str, bool]]:
        """Yield every imported dotted name, and whether it is imported only when a function runs."""
        lazy = {ast.dump(n, include_attributes=True) for f in self.nodes() if isinstance(f, Function) for n in f.body}
        for node in self.nodes():
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            yield from ((name, ast.dump(node, include_attributes=True) in lazy) for name in names)


def floors(source: Source) -> list[str]:
    """Own modules come from below; the root, lazily, may also serve those above the engine. Strangers stay outside."""
    found = [] if source.unit in HEIGHT else [f"{source.unit} stands on no floor"]
    for name, lazy in source.imports():
        root, _, rest = name.partition(".")
        unit = rest.partition(".")[0]
        if root in STRANGERS.get(source.unit, ()):
            found.append(f"{source.unit} imports {root}")
        within = unit == source.unit and unit not in STRANGERS
        if root != "hf_posenc" or within or (lazy and not rest and source.unit not in ENGINE):
            continue
        if HEIGHT.get(unit, 99) >= HEIGHT.get(source.unit, 99) or (source.unit in MEASURES and unit in ENGINE):
            found.append(f"{source.name} imports {name}")
    return found + (["names the attention seam"] if source.unit != "interposer" and SEAM.search(source.text) else [])


def budgets(source: Source) -> list[str]:
    """300 lines a file, 60 a function, 8 arguments a constructor; more than two, or a default, are keyword-only."""
    found = ["more than 300 lines"] if source.text.count("\n") > 300 else []
    for node in source.nodes():
        if isinstance(node, Function) and (node.end_lineno or 0) - node.lineno >= 60:
            found.append(f"{node.name} has more than 60 lines")
        public = isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        for method in node.body if isinstance(node, ast.ClassDef) and public else []:
            if isinstance(method, Function) and method.name == "__init__":
                positional = method.args.posonlyargs + method.args.args[1:]
                if len(positional) > 2 or method.args.defaults:
                    found.append(f"{node.name}() takes positional arguments")
                if len(positional + method.args.kwonlyargs) > 8:
                    found.append(f"{node.name}() takes more than 8 arguments")
    return found


def documented(source: Source) -> list[str]:
    """Every public module, class, function and method has a docstring; annotations are mypy's to check."""
    found, todo = [], [(source.name, ast.parse(source.text))]
    for name, node in todo:
        found += [] if ast.get_docstring(node) else [f"{name} has no docstring"]
        for child in [] if isinstance(node, Function) else node.body:
            if isinstance(child, Function | ast.ClassDef) and not child.name.startswith("_"):
                todo.append((f"{name}.{child.name}", child))
    return found


def forbidden(source: Source) -> list[str]:
    """No vague module name, no `assert`, no buffer, and nothing assigned to what transformers owns."""
    found = [f"{part} says nothing" for part in source.name.split(".") if part in VAGUE]
    theirs = [n for n in source.nodes() if isinstance(n, ast.ImportFrom) and "transformers" in (n.module or "")]
    foreign = {alias.asname or alias.name for node in theirs for alias in node.names}
    for node in source.nodes():
        if isinstance(node, ast.Assert) or (isinstance(node, ast.Attribute) and node.attr == "register_buffer"):
            found.append(f"assert or buffer in line {node.lineno}")
        stored = isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store)
        if stored and isinstance(node.value, ast.Name) and node.value.id in foreign:
            found.append(f"assigns to {node.value.id} in line {node.lineno}")
    return found


def test_scripts_only_parse_call_and_print() -> None:
    assert [path.name for path in (ROOT / "scripts").glob("*.py") if path.read_text().count("\n") > 120] == []


def test_tracked_files_name_no_machine() -> None:
    assert MACHINE.search("/" + "work/x")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    paths = [ROOT / name for name in listed.stdout.split("\0") if name] or pytest.skip("not a git checkout")
    assert [p for p in paths if p.is_file() and MACHINE.search(p.read_text(errors="ignore"))] == []


Rule = Callable[[Source], list[str]]
PATHS = sorted((ROOT / "hf_posenc").rglob("*.py"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: str(path.relative_to(ROOT)))
@pytest.mark.parametrize("rule", [floors, budgets, documented, forbidden])
def test_package(rule: Rule, path: Path) -> None:
    parts = path.relative_to(ROOT / "hf_posenc").with_suffix("").parts
    assert rule(Source(".".join(part for part in parts if part != "__init__"), path.read_text())) == []


@pytest.mark.parametrize(
    ("rule", "name", "text", "violations"),
    [
        (floors, "errors", "from hf_posenc.registry import Registry", 1),
        (floors, "encodings.alibi", "import hf_posenc.encodings.rope\nimport torch, transformers", 2),
        (floors, "families.gpt2", "def f():\n    import torch.nn", 1),
        (floors, "evaluation.curve", "import hf_posenc\ndef f():\n    from hf_posenc.patching import patch", 2),
        (floors, "evaluation.curve", "import hf_posenc.evaluation.windows\ndef f():\n    import hf_posenc", 0),
        (floors, "patching", "from transformers import AttentionInterface\ndef f():\n    import hf_posenc", 2),
        (floors, "brandnew", "import torch", 1),
        (budgets, "data", "\n" * 301, 1),
        (budgets, "data", "def f():\n" + "    x = 1\n" * 60, 1),
        (budgets, "data", "class C:\n    def __init__(self, a=0, *, b, c, d, e, f, g, h, i): ...", 2),
        (budgets, "data", "class C:\n    def __init__(self, a, b, *, c, d, e, f, g, h): ...", 0),
        (documented, "data", "class C:\n    def f(self): ...\n    def _g(self): ...", 3),
        (forbidden, "evaluation.utils", "assert self.register_buffer", 3),
        (forbidden, "inputs", "from transformers import A\nA.b = A['c'] = a.d = A", 2),
    ],
)
def test_rules_can_fail(rule: Rule, name: str, text: str, violations: int) -> None:
    assert len(rule(Source(name, text))) == violations
