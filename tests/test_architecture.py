"""The architecture as rules: layers, what may be imported where, and what bytes from disk may never reach.

`LAYERS` mirrors docs/architecture.md. Rules about source text are checked on the syntax tree, so an import inside a
function counts as well; that the core runs without torch and vLLM is tried in a process where they cannot be imported.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "kvdisk"

# Prefixes of module names, the longest match decides. A module imports from its own layer and below.
LAYERS = {
    "kvdisk": 5,  # kvdisk/__init__.py: the public names
    "kvdisk.units": 0,
    "kvdisk.errors": 0,
    "kvdisk.options": 0,
    "kvdisk.layout": 1,
    "kvdisk.geometry": 1,
    "kvdisk.codec": 1,
    "kvdisk.columns": 2,
    "kvdisk.forest": 2,
    "kvdisk.index": 2,
    "kvdisk.plan": 2,
    "kvdisk.stats": 2,
    "kvdisk.eviction": 2,
    "kvdisk.rotation": 2,
    "kvdisk.writer": 2,
    "kvdisk.slots": 2,
    "kvdisk.reads": 2,
    "kvdisk.resets": 2,
    "kvdisk.replaced": 2,
    "kvdisk.recovery": 2,
    "kvdisk.bounce": 2,
    "kvdisk.calls": 2,
    "kvdisk.open_files": 2,
    "kvdisk.directory": 2,
    "kvdisk.instance": 2,
    "kvdisk.processes": 2,
    "kvdisk.epoch": 2,
    "kvdisk.private_files": 2,
    "kvdisk.commands": 2,
    "kvdisk.hash_threads": 2,
    "kvdisk.segments": 2,
    "kvdisk.resident": 2,
    "kvdisk.arena": 2,
    "kvdisk.memory": 2,
    "kvdisk.io": 2,
    "kvdisk.store": 3,
    "kvdisk.store_config": 3,
    "kvdisk.scan": 3,
    "kvdisk.compression": 3,
    "kvdisk.dataplane": 3,
    "kvdisk.plane": 4,
    "kvdisk.service": 4,
    "kvdisk.api": 5,
    "kvdisk.vllm": 5,
    "kvdisk.cli": 5,
}
EXECUTES_DATA = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
MODULES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer(module: str) -> int:
    """The layer of the longest prefix in LAYERS; a new top-level module has to be given one."""
    if module == "kvdisk":
        return LAYERS["kvdisk"]
    prefixes = [p for p in LAYERS if p != "kvdisk" and (module == p or module.startswith(p + "."))]
    assert prefixes, f"{module} has no layer: add it to LAYERS here and to docs/architecture.md"
    return LAYERS[max(prefixes, key=len)]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of every import in a file; `from x import y` yields x.y where that is a module."""
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(), path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(
                    [*package.split(".")[: len(package.split(".")) - node.level + 1], *filter(None, [base])]
                )
            for alias in node.names:
                full = f"{base}.{alias.name}"
                target = ROOT.joinpath(*full.split("."))
                yield node.lineno, full if target.is_dir() or target.with_suffix(".py").is_file() else base


def calls(path: Path) -> Iterator[tuple[int, str]]:
    """(line, name) of every call of a bare name."""
    for node in ast.walk(ast.parse(path.read_text(), path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.lineno, node.func.id


def below(path: Path, *folders: str) -> bool:
    return path.relative_to(PACKAGE).parts[0] in folders


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_imports_never_go_up_a_layer():
    up = [
        f"{where(path, line)} layer {layer(module_name(path))} imports {name} of layer {layer(name)}"
        for path in MODULES
        for line, name in imports(path)
        if name.partition(".")[0] == "kvdisk" and layer(name) > layer(module_name(path))
    ]
    assert not up, "\n".join(up)


def test_the_two_adapters_do_not_import_each_other():
    """vllm/ must work without the command line's packages, and the command line without vLLM's."""
    crossing = [
        f"{where(path, line)} imports {name}"
        for path in MODULES
        for line, name in imports(path)
        if (below(path, "vllm") and name.startswith("kvdisk.cli"))
        or (not below(path, "vllm", "cli") and name.startswith(("kvdisk.cli", "kvdisk.vllm")))
    ]
    assert not crossing, "\n".join(crossing)


def test_torch_and_vllm_are_imported_in_the_adapter_alone():
    found = [
        f"{where(path, line)} imports {name}"
        for path in MODULES
        for line, name in imports(path)
        if name.partition(".")[0] in {"torch", "vllm"} and not below(path, "vllm")
    ]
    assert not found, "\n".join(found)


def test_only_the_command_line_prints():
    found = [
        where(path, line)
        for path in MODULES
        for line, name in calls(path)
        if name == "print" and not below(path, "cli")
    ]
    assert not found, "\n".join(found)


def test_nothing_that_was_stored_can_be_executed():
    found = [
        f"{where(path, line)} {name}"
        for path in MODULES
        for line, name in [*imports(path), *calls(path)]
        if name.partition(".")[0] in EXECUTES_DATA or name in {"eval", "exec", "compile", "__import__"}
    ]
    assert not found, "\n".join(found)


def test_the_command_line_alone_needs_click_and_rich():
    found = [
        f"{where(path, line)} imports {name}"
        for path in MODULES
        for line, name in imports(path)
        if name.partition(".")[0] in {"click", "rich"} and not below(path, "cli")
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_every_module_says_what_it_is(path):
    tree = ast.parse(path.read_text(), path)
    assert not tree.body or ast.get_docstring(tree), f"{path.relative_to(ROOT)} has no docstring"


def test_the_core_runs_without_torch_and_vllm():
    """Importing every module outside vllm/ and cli/ needs neither, nor the optional engine's binding."""
    core = [module_name(path) for path in MODULES if not below(path, "vllm", "cli")]
    assert len(core) > 3, "found no modules: the test looks in the wrong place"
    blocked = dict.fromkeys(("torch", "vllm", "liburing", "zstandard", "click", "rich"))
    script = f"import sys, importlib; sys.modules.update({blocked!r}); [importlib.import_module(m) for m in {core!r}]"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_command_line_starts_without_torch_and_vllm():
    """`kvdisk --help` must not take the ten seconds that importing vLLM takes; only its subprocesses import it."""
    pytest.importorskip("click")
    pytest.importorskip("rich")
    script = "import sys; sys.modules.update(torch=None, vllm=None); from kvdisk.cli import main; main(['--help'])"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout
