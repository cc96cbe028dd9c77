"""Which room may import which, read from the syntax trees, so imports inside functions count too."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {
    "pallas_kernels": set(),
    "planner": set(),
    "calib": {"pallas_kernels"},
    "pwjax": {"pallas_kernels", "planner", "calib"},
    # A benchmark of one room may import it past the public API; nobody imports an experiment.
    "experiments": {"pwjax", "pallas_kernels", "planner", "calib"},
}
PACKAGES = ("pallas_kernels", "planner", "calib", "pwjax")
OURS = set(ROOMS) | {"tests"}
# They come with extras, some only where a GPU is: a base installation must import every module without them.
OPTIONAL = {
    "jax_triton", "triton", "torch", "transformers", "matplotlib", "lm_eval", "rouge_score", "jieba", "jinja2",
    "psutil",
}  # fmt: skip
# A plan is a function of numbers: no devices, and no clock that would make it unrepeatable.
FORBIDDEN = {"planner": {"jax", "jaxlib", "flax", "optax", "orbax", "time", "datetime", "random"}}


def modules(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def imported(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, top-level package) of every absolute import below ``tree``, ``import_module("...")`` included."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name.split(".")[0]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.append((node.lineno, node.module.split(".")[0]))
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", None))
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                found.append((node.lineno, node.args[0].value.split(".")[0]))
    return found


def at_import_time(tree: ast.Module) -> ast.Module:
    """The part of a module that runs when it is imported: no function bodies, no ``if TYPE_CHECKING``."""

    class Strip(ast.NodeTransformer):
        def visit_FunctionDef(self, node):
            return None

        visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef

        def visit_If(self, node):
            return None if "TYPE_CHECKING" in ast.dump(node.test) else self.generic_visit(node)

    return Strip().visit(tree)


@pytest.mark.parametrize("room", ROOMS)
def test_room_imports_only_what_it_may(room):
    wrong = []
    for path in modules(room):
        for line, name in imported(ast.parse(path.read_text(), str(path))):
            if name in (OURS - ROOMS[room] - {room}) | FORBIDDEN.get(room, set()):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", PACKAGES)
def test_optional_packages_are_imported_lazily(room):
    wrong = []
    for path in modules(room):
        for line, name in imported(at_import_time(ast.parse(path.read_text(), str(path)))):
            if name in OPTIONAL:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name} when it is imported")
    assert not wrong, "\n".join(wrong)


def test_every_folder_of_modules_is_a_package():
    # The wheel is built from packages: a folder without __init__.py works in a clone and is missing for users.
    folders = {path.parent for room in PACKAGES for path in modules(room)}
    missing = [str(f.relative_to(ROOT)) for f in sorted(folders) if not (f / "__init__.py").is_file()]
    assert not missing, f"no __init__.py in {', '.join(missing)}"


def test_every_module_imports_without_the_extras():
    names = []
    for room in PACKAGES:
        for path in modules(room):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if "data" not in parts and parts[-1] != "__main__":
                names.append(".".join(parts).removesuffix(".__init__"))
    code = (
        "import importlib, sys\n"
        f"for name in {sorted(OPTIONAL)}: sys.modules[name] = None\n"
        f"for name in {names}: importlib.import_module(name)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_checker_sees_lazy_imports():
    source = "def f():\n    import pwjax.engine\n    importlib.import_module('planner.solve')\n"
    assert [name for _, name in imported(ast.parse(source))] == ["pwjax", "planner"]
    assert imported(at_import_time(ast.parse(source))) == []
