"""`kvdisk bench` at tiny sizes: every mode runs, its JSON has fio's fields and adds up, and mistakes are told."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("click", reason="the command line's packages are not installed")
pytest.importorskip("rich", reason="the command line's packages are not installed")

from click.testing import CliRunner, Result

from kvdisk.cli import bench_report
from kvdisk.cli.bench import bench
from kvdisk.cli.bench_workload import Setup, Workload
from kvdisk.resident import Resident
from kvdisk.units import KIB, MIB

BS, SIZE = 128 * KIB, 4 * MIB
TINY = ["--bs", "128KiB", "--size", "4MiB", "--arena", "16MiB", "--segment-bytes", "1MiB"]

# What fio 3's own plotting and fio-parsing tools read of a direction.
FIO_DIRECTION = {
    "io_bytes", "io_kbytes", "bw_bytes", "bw", "iops", "runtime", "total_ios", "short_ios", "drop_ios", "slat_ns",
    "clat_ns", "lat_ns", "bw_min", "bw_max", "bw_agg", "bw_mean", "bw_dev", "bw_samples",
}  # fmt: skip


def invoke(root: Path, *arguments: str) -> Result:
    return CliRunner().invoke(bench, ["--root", str(root), *TINY, *arguments])


def report(root: Path, *arguments: str) -> dict[str, Any]:
    """The JSON of a run that succeeds."""
    path = root / "report.json"
    done = invoke(root, *arguments, "--json", str(path))
    assert done.exit_code == 0, done.output
    return dict(json.loads(path.read_text()))


def test_every_mode_has_one_job_whose_directions_are_those_of_the_mode(tmp_path):
    jobs = report(tmp_path, "--rw", "write,read,randread,rw,randrw")["jobs"]
    moved = {job["jobname"]: (job["read"]["io_bytes"], job["write"]["io_bytes"]) for job in jobs}
    assert moved == {
        "write": (0, SIZE),
        "read": (SIZE, 0),
        "randread": (SIZE, 0),
        "rw": (SIZE, SIZE),
        "randrw": (SIZE, SIZE),
    }


def test_the_json_has_the_fields_of_fio(tmp_path):
    for job in report(tmp_path)["jobs"]:
        assert {"jobname", "error", "elapsed", "usr_cpu", "sys_cpu", "job options", "read", "write", "trim"} <= {*job}
        for direction in ("read", "write", "trim"):
            assert {*job[direction]} >= FIO_DIRECTION


def test_the_figures_of_a_direction_agree_with_each_other(tmp_path):
    for job in report(tmp_path, "--numjobs", "2")["jobs"]:
        side = job["write" if job["jobname"] == "write" else "read"]
        assert side["total_ios"] * BS == side["io_bytes"] == 2 * SIZE
        assert side["clat_ns"]["N"] == side["total_ios"]
        assert side["io_kbytes"] == side["io_bytes"] // 1024
        assert side["bw"] == pytest.approx(side["bw_bytes"] / 1024, abs=1)
        assert side["bw_bytes"] * side["runtime"] == pytest.approx(
            1e3 * side["io_bytes"], rel=0.5 / side["runtime"] + 0.01
        )
        assert side["iops"] * BS == pytest.approx(side["bw_bytes"], rel=0.01)


def test_percentiles_rise_and_lie_between_the_least_and_the_most(tmp_path):
    clat = report(tmp_path, "--rw", "write")["jobs"][0]["write"]["clat_ns"]
    values = list(clat["percentile"].values())
    assert values == sorted(values)
    assert clat["min"] <= values[0]
    assert values[-1] <= clat["max"]
    assert "99.900000" in clat["percentile"]


@pytest.mark.parametrize("more", [["--engine", "posix"], ["--direct", "0"], ["--mem", "4k"], ["--no-checksums"],
                                  ["--overwrite", "1"], ["--iodepth", "1"]])  # fmt: skip
def test_every_option_moves_the_same_bytes(tmp_path, more):
    write, read = report(tmp_path, *more)["jobs"]
    assert write["write"]["io_bytes"] == read["read"]["io_bytes"] == SIZE
    assert not write["error"]


def test_buffered_io_and_small_pages_are_warned_of(tmp_path):
    found = " ".join(report(tmp_path, "--direct", "0", "--mem", "4k")["kvdisk bench"]["warnings"])
    assert "page cache" in found
    assert "4 KiB pages" in found


def test_a_runtime_is_filled_with_further_passes(tmp_path):
    (job,) = report(tmp_path, "--rw", "write", "--runtime", "3", "--time-based")["jobs"]  # ample for two passes
    assert job["write"]["io_bytes"] > SIZE


def test_nothing_is_left_behind(tmp_path):
    assert invoke(tmp_path).exit_code == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("arguments", "words"), [
    (["--rw", "randwrite"], "sequential"),
    (["--rw", "sideways"], "none of"),
    (["--bs", "100000"], "multiple of 4096"),
    (["--bs", "8MiB"], "less than one chunk"),
    (["--time-based"], "--runtime"),
    (["--size", "900TiB", "--bs", "1GiB", "--arena", "8GiB", "--segment-bytes", "4GiB"], "free"),
])  # fmt: skip
def test_a_mistake_is_told_before_anything_is_measured(tmp_path, arguments, words):
    done = invoke(tmp_path, *arguments)
    assert done.exit_code != 0
    assert words in done.output
    assert list(tmp_path.iterdir()) == []


def test_chunks_that_fail_are_errors_and_no_samples(tmp_path, monkeypatch):
    with Workload(tmp_path, Setup(BS, SIZE, arena_bytes=16 * MIB, segment_bytes=MIB)) as workload:
        workload.write_all()
        (segment,) = [p for p in sorted(workload.root.rglob("*")) if p.is_file() and p.stat().st_size == MIB][:1]
        raw = bytearray(segment.read_bytes())
        for at in range(8192, len(raw), 4096):
            raw[at] ^= 1
        segment.write_bytes(raw)
        result = workload.run(workload.readers())["read"]
        assert result.errors > 0
        assert result.errors + len(result.clat_ns) == SIZE // BS
        assert result.bytes == len(result.clat_ns) * BS
        assert bench_report.line("read", result)["errors"] == str(result.errors)


def test_a_read_is_never_served_from_memory(tmp_path):
    with Workload(tmp_path, Setup(BS, SIZE, arena_bytes=16 * MIB, segment_bytes=MIB)) as workload:
        workload.write_all()
        resident = workload.service.store.resident((0).to_bytes(8, "little"))
        assert isinstance(resident, Resident)
        jobs = workload.readers()
        assert workload.service.store.resident((0).to_bytes(8, "little")) is None
        before = workload.service.stats()["bytes_read"]
        workload.run(jobs)
        assert workload.service.stats()["bytes_read"] == int(before) + SIZE
