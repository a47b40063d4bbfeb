"""Both vLLMs' interfaces, installed or not: what they ask of kvdisk it has, and what it asks of them they have.

The facts were extracted from vLLM's sources, see scripts/extract_vllm_interface.py. With KVDISK_VLLM033_SRC (a folder
that holds the package `vllm` of 0.33, such as an unpacked wheel) they are checked against those sources, and all other
tests in this folder run over 0.33's own scheduler, connector and tiering.
"""

import ast
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
import vllm

from kvdisk.vllm import SUPPORTED, KVDiskOffloadingSpec, KVDiskTier
from kvdisk.vllm.manager import KVDiskManager
from kvdisk.vllm.worker import KVDiskWorker

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ADAPTER = ROOT / "kvdisk" / "vllm"
SCRIPT = ROOT / "scripts" / "extract_vllm_interface.py"
OURS = {
    "OffloadingManager": KVDiskManager,
    "OffloadingWorker": KVDiskWorker,
    "OffloadingSpec": KVDiskOffloadingSpec,
    "SecondaryTierManager": KVDiskTier,
}
FIXTURES = {
    path.stem.partition("-")[2]: json.loads(path.read_text()) for path in (HERE / "fixtures").glob("inter*.json")
}
every_version = pytest.mark.parametrize("version", sorted(FIXTURES))
every_class = pytest.mark.parametrize("name", OURS)
SOURCE_033 = os.environ.get("KVDISK_VLLM033_SRC", "")


def signature(parameters: list[list[Any]]) -> inspect.Signature:
    kinds = {
        "positional": inspect.Parameter.POSITIONAL_OR_KEYWORD,
        "rest": inspect.Parameter.VAR_POSITIONAL,
        "keyword": inspect.Parameter.KEYWORD_ONLY,
        "keywords": inspect.Parameter.VAR_KEYWORD,
    }
    return inspect.Signature(
        [
            inspect.Parameter(name, kinds[kind], default=None if optional and kind[-1] not in "ts" else inspect._empty)
            for name, kind, optional in parameters
        ]
    )


def own(cls: type, member: str) -> Any:
    """What kvdisk itself defines; None if vLLM's base does, in whatever version is installed here."""
    for base in cls.__mro__:
        if member in vars(base):
            return inspect.getattr_static(cls, member) if base.__module__.startswith("kvdisk") else None
    return None


def parameters_of(function: Any) -> inspect.Signature:
    """Of a method as it is called, without self or cls."""
    if isinstance(function, (classmethod, staticmethod)):
        function = function.__func__
    found = list(inspect.signature(function).parameters.values())
    return inspect.Signature(found[1:])


def test_every_supported_version_has_its_facts() -> None:
    assert {tuple(map(int, version.split(".")[:2])) for version in FIXTURES} == set(SUPPORTED)


@every_version
@every_class
def test_every_abstract_method_is_implemented(version: str, name: str) -> None:
    methods = FIXTURES[version]["classes"][name]["methods"]
    abstract = [method for method, facts in methods.items() if facts["abstract"]]
    assert abstract, "found none: the test looks in the wrong place"
    assert [method for method in abstract if own(OURS[name], method) is None] == []


@every_version
@every_class
def test_every_override_takes_what_the_interface_takes(version: str, name: str) -> None:
    """By position and by name; what it takes beyond that has a default."""
    wrong = []
    for method, facts in FIXTURES[version]["classes"][name]["methods"].items():
        mine = own(OURS[name], method)
        if mine is None or facts["kind"] == "property" or method in ("__init__", "__init_subclass__"):
            continue
        expected = [parameter for parameter, kind, _ in facts["parameters"] if kind in ("positional", "keyword")]
        try:
            parameters_of(mine).bind(*expected)
            parameters_of(mine).bind(**dict.fromkeys(expected))
        except TypeError as error:
            wrong.append(f"{method}({', '.join(expected)}): {error}")
    assert wrong == []


@every_version
@every_class
def test_every_use_that_vllm_makes_is_possible(version: str, name: str) -> None:
    """What its connector and tiering manager call, with those arguments, and what they read."""
    known = FIXTURES[version]["classes"][name]
    uses = [use for use in FIXTURES[version]["uses"] if use["class"] == name]
    assert len(uses) > 3
    wrong = []
    for use in uses:
        member, call = use["member"], use.get("call")
        mine = own(OURS[name], member)
        if mine is None and member not in known["methods"] and member not in known["attributes"]:
            wrong.append(f"{use['by']} wants {member}")
        if call is None or mine is None:
            continue
        try:
            parameters_of(mine).bind(*range(call["positional"]), **dict.fromkeys(call["keywords"]))
        except TypeError as error:
            wrong.append(f"{use['by']} calls {member} with {call}: {error}")
    assert wrong == []


@every_version
def test_an_expedited_load_is_told_to_the_worker_and_nothing_else_is_new(version: str) -> None:
    """The one call whose arguments differ between the versions."""
    calls = [
        u["call"] for u in FIXTURES[version]["uses"] if (u["class"], u["member"]) == ("OffloadingWorker", "submit_load")
    ]
    assert any(call["keywords"] == ["expedited"] for call in calls) == (version >= "0.33")


def trees() -> Iterator[tuple[Path, ast.AST]]:
    for path in sorted(ADAPTER.glob("*.py")):
        yield path, ast.parse(path.read_text(), path)


@every_version
def test_every_name_that_is_imported_exists(version: str) -> None:
    names = FIXTURES[version]["names"]
    missing = []
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "vllm":
                assert node.module in names, f"{node.module} is new: run {SCRIPT.name} for every version"
                found = names[node.module]
                missing += [
                    f"{path.name}: {node.module}.{alias.name}"
                    for alias in node.names
                    if found is None or alias.name not in found
                ]
    assert missing == []


@every_version
def test_everything_that_is_built_of_vllms_takes_these_arguments(version: str) -> None:
    """Records and functions; `**` and `*` are for what only one version has, and not looked at."""
    facts = FIXTURES[version]
    targets = {
        name: signature([[f, "positional", optional] for f, optional in fields])
        for name, fields in facts["records"].items()
    }
    targets.update({name: signature(parameters) for name, parameters in facts["functions"].items()})
    checked, wrong = set(), []
    for path, tree in trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", None))
            if name not in targets or any(isinstance(argument, ast.Starred) for argument in node.args):
                continue
            keywords = [keyword.arg for keyword in node.keywords if keyword.arg is not None]
            try:
                targets[name].bind(*node.args, **dict.fromkeys(keywords))
            except TypeError as error:
                wrong.append(f"{path.name}:{node.lineno} {name}: {error}")
            checked.add(name)
    assert wrong == []
    assert {"OffloadingEvent", "PrepareStoreOutput", "TransferResult", "JobResult", "host_register"} <= checked


def test_the_differences_between_versions_are_asked_for_in_one_place() -> None:
    """hasattr of something of vLLM's, or a comparison of versions."""
    found = {
        path.name
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "__version__"
    }
    assert found <= {"version.py", "facts.py"}, "facts.py: the version is part of whose data it is"


def extracted(package: Path) -> Any:
    run = subprocess.run([sys.executable, SCRIPT, package], capture_output=True, text=True, check=True, timeout=60)
    return json.loads(run.stdout)


def test_the_facts_of_the_installed_version_are_as_extracted() -> None:
    """Or the extraction is wrong, and so is what it says of the other version."""
    version = str(vllm.__version__).partition("+")[0]
    if version not in FIXTURES:
        pytest.skip(f"no facts of vLLM {version}")
    assert extracted(Path(vllm.__file__).parents[1]) == FIXTURES[version]


# ---- over the sources themselves

with_sources = pytest.mark.skipif(not SOURCE_033, reason="KVDISK_VLLM033_SRC names no sources of vLLM 0.33")


@with_sources
def test_the_facts_of_the_sources_are_as_extracted() -> None:
    assert extracted(Path(SOURCE_033)) == FIXTURES["0.33.0"]


@with_sources
@pytest.mark.timeout(1800)
def test_everything_here_passes_over_the_sources(tmp_path: Path) -> None:
    """0.33's scheduler, connector and tiering drive kvdisk; what is compiled in vLLM is not needed for that."""
    facts = tmp_path / "vllm-0.33.0.dist-info"  # makes vLLM choose its CPU platform
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.0+cpu\n")
    code = "import vllm; assert vllm.__version__ == '0.33.0', (vllm.__version__, vllm.__file__)"
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), SOURCE_033)), "KVDISK_VLLM033_SRC": ""}
    subprocess.run([sys.executable, "-c", code], env=variables, check=True, timeout=120)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(HERE)]
    command += ["--ignore", str(HERE / "e2e")]
    run = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-6000:]
