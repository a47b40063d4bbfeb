#!/usr/bin/env python3
"""Writes down what kvdisk meets of one vLLM: interfaces, their callers' calls, and the names that kvdisk imports.

    python scripts/extract_vllm_interface.py DIR > tests/vllm/fixtures/interface-0.33.0.json

DIR holds the package `vllm` (an unpacked wheel, or site-packages). Sources are parsed and never imported, so any
version can be read, of any build. tests/vllm/test_interfaces.py holds kvdisk against these files, so that its tests
know a vLLM that is not installed. The JSON has

    version
    classes   class -> bases and methods: method -> kind, abstract, parameters as [name, kind, has a default]
    records   dataclass -> fields, as [name, has a default]
    functions function -> parameters
    uses      what vLLM's connector and tiering manager do with an instance: class, member, and for a call its arguments
    names     module -> what it defines or imports, of the modules that kvdisk/vllm imports from; null: no such module
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KVDISK = Path(__file__).resolve().parents[1] / "kvdisk" / "vllm"
CONNECTOR = "distributed/kv_transfer/kv_connector/v1/offloading"
INTERFACES = {
    "OffloadingManager": "v1/kv_offload/base.py",
    "OffloadingWorker": "v1/kv_offload/base.py",
    "OffloadingSpec": "v1/kv_offload/base.py",
    "SecondaryTierManager": "v1/kv_offload/tiering/base.py",
}
RECORDS = {
    "OffloadingEvent": "v1/kv_offload/base.py",
    "PrepareStoreOutput": "v1/kv_offload/base.py",
    "RequestOffloadingContext": "v1/kv_offload/base.py",
    "ReqContext": "v1/kv_offload/base.py",
    "TransferResult": "v1/kv_offload/base.py",
    "ScheduleEndContext": "v1/kv_offload/base.py",
    "OffloadingCounterMetadata": "v1/kv_offload/base.py",
    "OffloadingGaugeMetadata": "v1/kv_offload/base.py",
    "OffloadingMetricMetadata": "v1/kv_offload/base.py",
    "JobResult": "v1/kv_offload/tiering/base.py",
    "TransferJob": "v1/kv_offload/tiering/base.py",
}
FUNCTIONS = {
    "swap_blocks_batch": "_custom_ops.py",
    "host_register": "v1/kv_offload/cpu/host_register.py",
    "host_unregister": "v1/kv_offload/cpu/host_register.py",
}
# Who uses an instance, and under which names.
USERS = [
    (f"{CONNECTOR}/scheduler.py", {"manager": "OffloadingManager", "spec": "OffloadingSpec"}),
    (f"{CONNECTOR}/worker.py", {"worker": "OffloadingWorker", "spec": "OffloadingSpec"}),
    (f"{CONNECTOR}/metrics.py", {"_spec_cls": "OffloadingSpec", "spec_cls": "OffloadingSpec"}),
    (f"{CONNECTOR}_connector.py", {"spec": "OffloadingSpec", "manager": "OffloadingManager"}),
    ("v1/kv_offload/tiering/manager.py", {"tier": "SecondaryTierManager"}),
    ("v1/kv_offload/tiering/metrics.py", {"tier": "SecondaryTierManager"}),
    ("v1/kv_offload/tiering/spec.py", {"tier": "SecondaryTierManager", "tier_cls": "SecondaryTierManager"}),
    ("v1/kv_offload/tiering/factory.py", {"tier_cls": "SecondaryTierManager"}),
]


def extract(package: Path) -> dict[str, Any]:
    """The facts of the vLLM whose package directory is `package`."""
    return {
        "version": _version(package),
        "classes": {name: _interface(_top(package / path, name)) for name, path in INTERFACES.items()},
        "records": {name: _fields(package / path, name) for name, path in RECORDS.items()},
        "functions": {name: _parameters(_top(package / path, name).args) for name, path in FUNCTIONS.items()},
        "uses": [use for path, names in USERS for use in _uses(package / path, names)],
        "names": {module: _names(package, module) for module in sorted(_imported_by_kvdisk())},
    }


def _version(package: Path) -> str:
    found = re.search(r"version = '([^']+)'", (package / "_version.py").read_text())
    if found is None:
        raise ValueError(f"{package} does not say which version it is")
    return found[1]


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), path)


def _top(path: Path, name: str) -> Any:
    """The class or function `name` of a module."""
    for node in _parse(path).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return node
    raise ValueError(f"{path} defines no {name}")


def _interface(node: ast.ClassDef) -> dict[str, Any]:
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
    constants = [item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and _is_name(item.target)]
    assigned = {  # in __init__: what an instance has besides
        target.attr
        for method in methods
        if method.name == "__init__"
        for item in ast.walk(method)
        if isinstance(item, (ast.Assign, ast.AnnAssign))
        for target in (item.targets if isinstance(item, ast.Assign) else [item.target])
        if isinstance(target, ast.Attribute) and _is_name(target.value, "self")
    }
    return {
        "methods": {method.name: _method(method) for method in methods},
        "attributes": sorted({*constants, *assigned}),
    }


def _is_name(node: ast.expr, name: str | None = None) -> bool:
    return isinstance(node, ast.Name) and name in (None, node.id)


def _method(node: ast.FunctionDef) -> dict[str, Any]:
    marks = {mark.id for mark in node.decorator_list if isinstance(mark, ast.Name)}
    kinds = [kind for kind in ("property", "classmethod", "staticmethod") if kind in marks]
    return {
        "kind": kinds[0] if kinds else "method",
        "abstract": "abstractmethod" in marks,
        "parameters": _parameters(node.args),
    }


def _parameters(args: ast.arguments) -> list[tuple[str, str, bool]]:
    """Without self or cls."""
    positional = [*args.posonlyargs, *args.args]
    first_default = len(positional) - len(args.defaults)
    found = [(arg.arg, "positional", i >= first_default) for i, arg in enumerate(positional)]
    if found and found[0][0] in ("self", "cls"):
        del found[0]
    if args.vararg:
        found.append((args.vararg.arg, "rest", True))
    found += [
        (arg.arg, "keyword", default is not None)
        for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    if args.kwarg:
        found.append((args.kwarg.arg, "keywords", True))
    return found


def _fields(path: Path, name: str) -> list[tuple[str, bool]]:
    """Of a dataclass or NamedTuple, those of its bases first."""
    node = _top(path, name)
    fields = [
        field
        for base in node.bases
        if isinstance(base, ast.Name) and base.id not in ("ABC", "NamedTuple")
        for field in _fields(path, base.id)
    ]
    for item in node.body:
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        if "ClassVar" not in ast.unparse(item.annotation) and "init=False" not in ast.unparse(item):
            fields.append((item.target.id, item.value is not None))
    return fields


def _uses(path: Path, names: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Attributes of things called `names`, each way of using one once."""
    tree = _parse(path)
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    seen = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
            continue
        owner = node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", None)
        if owner not in names or node.attr.startswith("__"):
            continue
        use: dict[str, Any] = {"class": names[owner], "member": node.attr, "by": path.stem}
        if call := calls.get(id(node)):
            if any(isinstance(arg, ast.Starred) for arg in call.args) or any(k.arg is None for k in call.keywords):
                use["call"] = None  # with arguments that cannot be counted
            else:
                use["call"] = {"positional": len(call.args), "keywords": sorted(str(k.arg) for k in call.keywords)}
        mark = json.dumps(use, sort_keys=True)
        if mark not in seen:
            seen.add(mark)
            yield use


def _imported_by_kvdisk() -> set[str]:
    nodes = [node for path in KVDISK.glob("*.py") for node in ast.walk(_parse(path))]
    found = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    found |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {module for module in found if module.partition(".")[0] == "vllm"}


def _names(package: Path, module: str) -> list[str] | None:
    """What `from module import name` finds: definitions, imports, and modules in a package. Conditional ones count."""
    place = package.joinpath(*module.split(".")[1:])
    path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    if not path.exists():
        return None
    found = {child.stem for child in place.glob("*.py")} | {c.name for c in place.glob("*/") if c.is_dir()}
    for node in _statements(_parse(path).body):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    if module == "vllm":  # looked up when asked for: a table of names
        found |= set(re.findall(r'"(\w+)": "', path.read_text()))
    return sorted(name for name in found if not name.startswith("__") or name == "__version__")


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """A module's own statements, those under its `if`s and `try`s, too."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody"):
            if isinstance(node, (ast.If, ast.Try)):
                yield from _statements(getattr(node, part, []))
        for handler in getattr(node, "handlers", []):
            yield from _statements(handler.body)


def _lines(facts: Any) -> str:
    """One line an entry: short, and a difference between two versions can be read."""
    if isinstance(facts, dict):
        return "{\n" + ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(facts.items())) + "}"
    if isinstance(facts, list):
        return "[\n" + ",\n".join(f" {json.dumps(fact, sort_keys=True)}" for fact in facts) + "]"
    return json.dumps(facts)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "vllm" / "v1").is_dir():
        sys.exit(__doc__)
    facts = extract(Path(sys.argv[1]) / "vllm")
    print("{")
    print(",\n".join(f'"{part}": {_lines(facts[part])}' for part in facts))
    print("}")
