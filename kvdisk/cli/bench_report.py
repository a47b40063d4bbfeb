"""What `kvdisk bench` says about a run: the environment, what makes a figure doubtful, fio's JSON, a plot.

The JSON is described in docs/bench.md. Its `jobs[].read` and `jobs[].write` have fio's names and units (bw in KiB/s,
times in ns or ms as fio has them), so that tools which read fio's output read this one.
"""

import os
import platform
import shutil
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvdisk.cli.bench_workload import Result, Workload
from kvdisk.cli.machine import file_system, summary
from kvdisk.memory import available_bytes
from kvdisk.units import GIB, format_size

PERCENTILES = (1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 99.5, 99.9, 99.95, 99.99)  # fio's default list
SCHEMA_VERSION = 1
EIO = 5


def environment(workload: Workload) -> dict[str, str]:
    """What the figures depend on, in the order it is shown."""
    service = workload.service
    info, config = service.engine_info, service.store.config
    name = f"{info.name}, {'direct' if info.direct else 'buffered'}"
    where = "in a process" if workload.plane_pid is not None else f"on a thread, iodepth {service.engine.iodepth}"
    return {
        "machine": f"{summary()}, {format_size(_memory_bytes())} of memory, Python {platform.python_version()}",
        "load average": f"{os.getloadavg()[0]:.2f}",
        "file system": file_system(workload.root),
        "device": device(workload.root),
        "free space": format_size(shutil.disk_usage(workload.root).free),
        "engine": f"{name}, {where}" + (f" ({info.detail})" if info.detail else ""),
        "arena": f"{format_size(workload.memory.size)}, {workload.memory.pages} pages, "
        + ("registered" if info.registered else "not registered"),
        "alignment": str(config.alignment),
        "segments": f"{sum(config.segments_max)} of {format_size(config.segment_bytes)}",
        "checksums": "on" if workload.setup.checksums else "off: nothing is verified",
    }


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def device(path: Path) -> str:
    """The block device under `path` and what sysfs says of it: "vda (virtio), scheduler none, max_sectors_kb 512"."""
    number = os.stat(path).st_dev
    node = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not node.exists():
        return "none that the kernel names (a network, overlay or memory file system)"
    node = node.resolve()
    disk = node if (node / "queue").exists() else node.parent  # a partition's queue is its disk's
    words = [node.name]
    model = _read(disk / "device" / "model")
    if model or disk.name.startswith("vd"):
        words.append(f"({model or 'virtio'})")
    if _read(disk / "queue" / "rotational") == "1" and not disk.name.startswith("vd"):
        words.append("rotational")
    scheduler = _read(disk / "queue" / "scheduler")
    chosen = scheduler.partition("[")[2].partition("]")[0] or scheduler
    largest = _read(disk / "queue" / "max_sectors_kb")
    return (
        " ".join(words)
        + (f", scheduler {chosen}" if chosen else "")
        + (f", max_sectors_kb {largest}" if largest else "")
    )


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def warnings(workload: Workload, results: Sequence[Result] = ()) -> Iterator[str]:
    """Why a figure of this run may not mean what it seems to; each with the remedy."""
    setup, info = workload.setup, workload.service.engine_info
    total = setup.chunk_count * setup.bs
    kind = file_system(workload.root).partition(" ")[0]
    if kind in ("tmpfs", "ramfs"):
        yield f"{workload.root} is on {kind}: this measures memory. Name a directory on the disk with --root"
    elif kind == "overlay":
        yield "an overlay file system copies and caches: use a volume, not the container's own file system"
    if not info.direct:
        yield f"I/O is buffered: the page cache takes part. {info.detail or 'It was asked for by --direct=0'}"
        if total < 2 * _memory_bytes():
            need = format_size(2 * _memory_bytes())
            yield f"buffered I/O with less data than twice the memory measures memory: raise --size to {need}"
    if "huge" not in workload.memory.pages:
        yield "the arena is on 4 KiB pages, which costs bandwidth and CPU: enable transparent huge pages (madvise)"
    if info.name == "io_uring" and not info.registered:
        yield f"the arena is not registered with io_uring: {info.detail}"
    if workload.setup.engine == "auto" and info.name != "io_uring":
        yield "io_uring is not available here; threads cost more CPU. --engine io_uring says why"
    if os.getloadavg()[0] > 0.5 * len(os.sched_getaffinity(0)):
        yield f"others use this machine (load average {os.getloadavg()[0]:.1f}): figures vary; repeat when it is idle"
    if sys.flags.dev_mode or hasattr(sys, "gettotalrefcount") or sys.gettrace() is not None:
        yield "Python runs in development or debug mode, or under a tracer: CPU figures mean nothing"
    if device(workload.root).startswith("vd"):
        yield "a virtual disk: the host may cache, and writes may end in its memory; ratios in one run still hold"
    short = dict.fromkeys(r.direction for r in results if r.elapsed_ns < 1e9)
    if short:
        yield f"less than a second of {' and '.join(short)}: raise --size or use --runtime with --time-based"
    if setup.arena_bytes > available_bytes() + setup.arena_bytes // 2:
        yield "the arena takes most of the free memory: the system may be swapping"


# ---- fio's JSON


def to_json(workload: Workload, runs: Sequence[tuple[str, dict[str, Result]]], notes: Sequence[str]) -> dict[str, Any]:
    """The whole run: `runs` are (name of --rw, results by direction)."""
    setup = workload.setup
    return {
        "kvdisk bench": {"schema": SCHEMA_VERSION, "environment": environment(workload), "warnings": list(notes)},
        "global options": {
            "bs": str(setup.bs),
            "size": str(setup.size),
            "numjobs": str(setup.numjobs),
            "ioengine": workload.service.engine_info.name,
            "direct": str(int(workload.service.engine_info.direct)),
            "directory": str(workload.root.parent),
        },
        "jobs": [_job(name, results) for name, results in runs],
    }


def _job(name: str, results: dict[str, Result]) -> dict[str, Any]:
    any_result = next(iter(results.values()))
    elapsed_s = max(r.elapsed_ns for r in results.values()) / 1e9
    user, system = any_result.cpu_s
    errors = sum(r.errors for r in results.values())
    return {
        "jobname": name,
        "error": EIO if errors else 0,
        "total_err": errors,
        "elapsed": max(1, round(elapsed_s)),
        "job_runtime": round(elapsed_s * 1e3),
        "usr_cpu": 100 * user / max(elapsed_s, 1e-9),
        "sys_cpu": 100 * system / max(elapsed_s, 1e-9),
        "job options": {"rw": name, "iodepth": str(any_result.iodepth)},
        "read": _direction(results.get("read")),
        "write": _direction(results.get("write")),
        "trim": _direction(None),
    }


def _direction(result: Result | None) -> dict[str, Any]:
    """One direction in fio's words, all zero where there was none."""
    count = len(result.clat_ns) if result else 0
    size = result.bytes if result else 0
    runtime_ms = result.elapsed_ns / 1e6 if result else 0.0
    bytes_per_s = result.bytes_per_s if result and size else 0.0
    speeds = [kib for _, kib in bandwidth_series(result)] if result else []
    section: dict[str, Any] = {
        "io_bytes": size,
        "io_kbytes": size // 1024,
        "bw_bytes": round(bytes_per_s),
        "bw": round(bytes_per_s / 1024),
        "iops": count / runtime_ms * 1e3 if runtime_ms else 0.0,
        "runtime": round(runtime_ms),
        "total_ios": count,
        "short_ios": 0,
        "drop_ios": 0,
        "slat_ns": _spread(result.slat_ns if result else (), percentiles=False),
        "clat_ns": _spread(result.clat_ns if result else (), percentiles=True),
        "lat_ns": _spread(result.clat_ns if result else (), percentiles=False),
        "bw_min": round(min(speeds, default=0)),
        "bw_max": round(max(speeds, default=0)),
        "bw_agg": 100.0 if size else 0.0,
        "bw_mean": statistics.fmean(speeds) if speeds else 0.0,
        "bw_dev": statistics.pstdev(speeds) if speeds else 0.0,
        "bw_samples": len(speeds),
    }
    if result:
        section["kvdisk"] = {
            "errors": result.errors,
            "cpu_s_per_gib": result.cpu_s_per_gib,
            "bw_series": [[round(at, 3), round(kib)] for at, kib in bandwidth_series(result)],
        }
    return section


def _spread(values: Sequence[int], *, percentiles: bool) -> dict[str, Any]:
    numbers = np.array(values, np.int64)
    some = len(numbers) > 0
    spread: dict[str, Any] = {
        "min": int(numbers.min()) if some else 0,
        "max": int(numbers.max()) if some else 0,
        "mean": float(numbers.mean()) if some else 0.0,
        "stddev": float(numbers.std()) if some else 0.0,
        "N": len(numbers),
    }
    if percentiles and some:
        found = np.percentile(numbers, PERCENTILES, method="higher")
        spread["percentile"] = {f"{percent:.6f}": int(value) for percent, value in zip(PERCENTILES, found, strict=True)}
    return spread


def bandwidth_series(result: Result) -> list[tuple[float, float]]:
    """(seconds, KiB/s since the sample before) over the run."""
    series, at, moved = [], 0.0, 0
    for seconds, size in result.samples:
        if seconds - at > 1e-3:
            series.append((seconds, (size - moved) / 1024 / (seconds - at)))
            at, moved = seconds, size
    return series


# ---- for people


def line(name: str, result: Result) -> dict[str, str]:
    """The cells of one direction's line."""
    speed = result.bytes_per_s
    return {
        "rw": f"{name} {result.direction}" if name in ("rw", "randrw") else name,
        "MB/s": f"{speed / 1e6:,.0f}",
        "MiB/s": f"{speed / 2**20:,.0f}",
        "IOPS": f"{len(result.clat_ns) / max(1, result.elapsed_ns) * 1e9:,.0f}",
        "CPU\ns/GiB": f"{result.cpu_s_per_gib:.3f}",
        **{f"p{percent:g}\nms": _ms(result.percentile_ns(percent)) for percent in (50, 90, 99, 99.9)},
        "errors": str(result.errors),
    }


def _ms(nanoseconds: int) -> str:
    ms = nanoseconds / 1e6
    return f"{ms:.2f}" if ms < 10 else f"{ms:.0f}"


def plot(path: Path, title: str, runs: Sequence[tuple[str, dict[str, Result]]]) -> None:
    """Bandwidth over time, and the distribution of completion latencies.

    Raises:
        ModuleNotFoundError: no matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (over_time, latency) = pyplot.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    for name, results in runs:
        for result in results.values():
            label = line(name, result)["rw"]
            series = bandwidth_series(result)
            over_time.plot([at for at, _ in series], [kib * 1024 / 1e6 for _, kib in series], label=label)
            clat = np.sort(np.array(result.clat_ns, np.int64)) / 1e6
            if len(clat):
                latency.plot(clat, np.arange(1, len(clat) + 1) / len(clat), label=label)
    over_time.set(xlabel="seconds", ylabel="MB/s", title="bandwidth", ylim=(0, None))
    latency.set(xlabel="completion latency of a chunk, ms", ylabel="share of chunks", title="latency", xscale="log")
    for axes in (over_time, latency):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def title(workload: Workload) -> str:
    """Of a plot or a table."""
    setup, info = workload.setup, workload.service.engine_info
    total = setup.chunk_count * setup.bs
    moved = f"{total / GIB:g} GiB" if total >= GIB else format_size(total)
    return f"kvdisk bench: {format_size(setup.bs)} chunks, {moved}, {info.name}, {workload.memory.pages}"
