"""The scripts in bench/: what they conclude from figures, and that peers are started, measured and cleaned up."""

import ast
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("click", reason="the command line's packages are not installed")
pytest.importorskip("rich", reason="the command line's packages are not installed")

from kvdisk.units import GIB, KIB, MIB

BENCH = Path(__file__).parents[1] / "bench"
BS, SIZE = 128 * KIB, 4 * MIB


@pytest.fixture(autouse=True)
def bench_scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


# ---- bars


def samples(speeds, cpu=0.01):
    return [module("contestants").Sample(speed, cpu) for speed in speeds]


def verdicts(case, by_name, pairs=(), memory_read_s=(0.1,)):
    comparison = module("comparison")
    measured = comparison.Measured(case, by_name, list(memory_read_s))
    return {bar.rule: bar for bar in comparison.verdicts([measured], pairs)}


def test_a_verdict_is_of_the_median_of_the_rounds_that_both_ran():
    case = module("contestants").Case(bs=MIB, total=GIB)
    speeds = {"kvdisk": (100, 90, 80), "fio best": (100, 100, 100), "aiofiles": (200,)}
    by_name = {name: {"load": samples(found)} for name, found in speeds.items()}
    by_name["kvdisk no checksums"] = {"load": samples((100, 100, 100), 0.02)}
    found = verdicts(case, by_name)
    assert found["load, kvdisk over fio"].verdict == "missed"
    assert found["load, kvdisk over fio"].measured == "0.90 [0.80..1.00]"
    assert found["load, kvdisk no checksums over fio"].verdict == "met"
    assert found["load over aiofiles"].measured == "0.50 [0.50..0.50]"
    assert found["load, CPU over aiofiles, neither hashing"].verdict == "missed"


def test_checksums_may_cost_what_reads_cost_in_the_same_rounds():
    case = module("contestants").Case(bs=MIB, total=GIB)
    by_name = {"kvdisk": {"load": samples((100,), 0.14)}}
    assert verdicts(case, by_name, memory_read_s=(0.05, 0.1, 0.2))["load, CPU with checksums"].verdict == "met"
    found = verdicts(case, by_name, memory_read_s=(0.05, 0.05, 0.2))["load, CPU with checksums"]
    assert (found.verdict, found.bar) == ("missed", "<= 0.090 s/GiB")


@pytest.mark.parametrize(("fresh", "op", "bar"), [(True, "store", 1.0), (False, "store", 1.3), (False, "load", 1.3)])
def test_the_fs_tier_is_to_be_beaten_by_more_at_small_chunks_over_written_blocks(fresh, op, bar):
    case = module("contestants").Case(bs=BS, total=GIB, fresh=fresh)
    by_name = {"kvdisk no checksums": {op: samples((100,))}, "vLLM fs tier": {op: samples((100,))}}
    found = verdicts(case, by_name)[f"{op}, kvdisk no checksums over the fs tier"]
    assert found.margin == pytest.approx(1 / bar)


def test_four_kib_pages_are_held_to_no_bar_of_huge_ones():
    case = module("contestants").Case(bs=MIB, total=GIB, pages="4k")
    by_name = {"kvdisk": {"load": samples((1,))}, "fio best": {"load": samples((100,))}}
    assert verdicts(case, by_name) == {}


def test_small_chunks_are_judged_by_passes_that_alternated():
    comparison, case = module("comparison"), module("contestants").Case
    pair = comparison.Pair(
        "small over large",
        (case(BS, GIB), case(8 * MIB, GIB)),
        ({"load": samples((80, 95, 100))}, {"load": samples((100, 100, 100))}),
    )
    (bar,) = comparison.verdicts([], [pair])
    assert (bar.requirement, bar.verdict, bar.measured) == ("small chunks", "met", "0.95 [0.80..1.00]")


def test_other_pairs_have_a_figure_and_no_verdict():
    comparison, case = module("comparison"), module("contestants").Case
    cases = (case(MIB, GIB, pages="4k"), case(MIB, GIB))
    (bar,) = comparison.verdicts([], [comparison.Pair("4k over huge", cases, ({"load": samples((1,))},) * 2)])
    assert bar.verdict == "reported"


# ---- the table


def rows(bars, why_not):
    return {row.what: row for row in module("summary").rows(bars, why_not)}


def test_a_row_shows_its_worst_case_and_how_many_met_the_bar():
    bars = module("bars")
    found = [
        bars.at_least("load", "load over fio", "128 KiB", 0.97, [0.9, 1.0, 1.1]),
        bars.at_least("load", "load over fio", "1 MiB", 0.97, [0.5, 0.6, 0.7]),
        bars.reported("load", "many over one", "1 MiB", "1.1 x"),
    ]
    row = rows(found, {})["load bandwidth, one request and many"]
    assert (row.verdict, row.cases) == ("missed", "1 of 2")
    assert row.measured == "0.60 [0.50..0.70] (load over fio, 1 MiB)"


def test_the_worst_case_is_the_farthest_from_its_own_bar_in_either_direction():
    bars = module("bars")
    found = [
        bars.at_most("cpu", "load", "small", 0.06, [0.07], "s/GiB"),
        bars.at_most("cpu", "load", "large", 0.03, [0.06], "s/GiB"),
    ]
    assert "large" in rows(found, {})["CPU on huge pages, no checksums"].measured


def test_what_was_not_measured_says_why():
    found = rows([], {"compare": "compare failed after 3 s"})
    assert found["load bandwidth, one request and many"][2:] == ("compare failed after 3 s", "", "not measured")
    assert "make test" in found["crashes, torn writes, errnos: wrong bytes, dead engines"].measured


def test_a_report_that_is_missing_or_of_another_version_is_no_failure_of_the_table(tmp_path):
    bars = module("bars")
    (tmp_path / "compare.json").write_text('{"bars": [{"rule": "of old"}]}')
    good = bars.at_most("decode", "decode", "", 2, [1.0], "%")
    (tmp_path / "vllm_ttft.json").write_text(json.dumps({"bars": [good._asdict()]}))
    found, why_not = module("summary").read(tmp_path)
    assert found == [good]
    assert "another version" in why_not["compare"]
    assert "has not run" in why_not["scale"]


def test_every_bar_a_script_can_give_has_a_row():
    names = {one.name for one in module("bars").REQUIREMENTS}
    for path in BENCH.glob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            callee = getattr(getattr(node, "func", None), "id", "")
            if callee in ("at_least", "at_most", "reported") and isinstance(node.args[0], ast.Constant):
                assert node.args[0].value in names, f"{path.name}:{node.lineno}"


def test_results_go_between_their_marks_in_a_document_and_nowhere_else(tmp_path):
    (tmp_path / "scale.md").write_text("# Title\n\n- machine: x\n\n## Part\n\n| a |\n\n## Bars\n\n| bar |\n")
    marked = "<!-- begin {0}.md -->\n{1}\n<!-- end {0}.md -->\n"
    document = "before\n" + marked.format("scale", "old") + "between\n" + marked.format("bars", "kept")
    found = module("summary").into(document, tmp_path)
    assert found == document.replace("old", "- machine: x\n\n#### Part\n\n| a |")
    assert module("summary").into(found, tmp_path) == found


def test_the_document_has_a_place_for_every_report():
    document = (BENCH.parent / "docs" / "performance.md").read_text()
    for name in ("bars", "compare", "interference", "scale", "vllm_ttft"):
        assert document.count(f"<!-- begin {name}.md -->\n") == document.count(f"<!-- end {name}.md -->") == 1


# ---- scripts that judge nothing themselves


def test_figures_of_the_gil_are_judged_by_their_names():
    report = {
        "load average before": 0.1,
        "busy owner, 128 KiB chunks": {
            "store bandwidth, busy owner, switch interval 5 ms": [0.8, 0.95, 0.99],
            "store owner's speed, switch interval 5 ms": [0.9],
            "store bandwidth, busy thread, switch interval 5 ms": [0.1],
        },
        "reads": {"p99 idle, ms": [1.0], "p99 ratio": [1.6]},
    }
    found = module("adapters").bars_of("interference", report)
    assert [(bar.requirement, bar.verdict) for bar in found] == [
        ("busy owner", "met"),
        ("owner speed", "missed"),
        ("read p99", "missed"),
    ]


def test_where_both_kinds_of_data_plane_were_measured_only_the_process_is_judged():
    name = "store bandwidth, busy owner, switch interval 5 ms"
    report = {"busy owner": {f"thread: {name}": [0.3], f"process: {name}": [0.95]}}
    found = module("adapters").bars_of("interference", report)
    assert [bar.verdict for bar in found] == ["reported", "met"]


def test_figures_of_the_gil_become_a_table_a_part():
    report = {
        "environment": {"machine": "x"},
        "load average before": 0.1,
        "reads": {"process: p99 ratio": [1.0, 2.0, 3.0]},
    }
    found = module("adapters").interference_markdown(report)
    assert "## reads" in found
    assert "| process: p99 ratio | 2.00 [1.00..3.00] |" in found
    assert "load average" not in found


def test_of_the_compression_only_what_is_shipped_is_shown():
    row = {"source": "made up", "ratio": 1.25, "pack_mb_s": 900.0, "unpack_mb_s": 2000.0}
    found = module("adapters").bars_of("compression", [{**row, "candidate": "kvdisk"}, {**row, "candidate": "zstd 1"}])
    assert [bar.measured for bar in found] == ["1.25 x smaller, faster below 2,000 MB/s (loads) and 900 MB/s (stores)"]


# ---- growth


@pytest.mark.parametrize(("power", "factor"), [(0, 7.0), (1, 0.001), (2, 1.0)])
def test_the_exponent_of_a_power_is_that_power(power, factor):
    sizes = [10_000, 100_000, 1_000_000]
    assert module("scale").exponent(sizes, [factor * size**power for size in sizes]) == pytest.approx(power)


def test_a_store_without_a_disk_stores_evicts_and_promotes():
    planes = module("scale_planes")
    found = planes.store_figures(2000, 256)
    assert min(found["store, us"] + found["store and evict, us"] + found["promote, us"]) > 0
    assert 1 < found["written over live"] < 1.02


def test_made_up_segments_are_found_whole_when_a_store_is_opened(tmp_path):
    (first, second) = module("scale_recovery").openings(tmp_path, 100, MIB, 32 * MIB, 2)
    assert (first.chunk_count, second.chunk_count) == (100, 100)
    assert first.segment_count == 4
    assert list(tmp_path.iterdir()) == []


# ---- all of it


@pytest.mark.parametrize(("code", "outcome"), [("pass", "done"), ("raise SystemExit(3)", "x failed with exit status 3"),
                                               ("import time; time.sleep(60)", "x was ended after 3 s")])  # fmt: skip
def test_a_script_that_fails_or_takes_too_long_says_so_in_its_rows(tmp_path, monkeypatch, code, outcome):
    run = module("run")
    (tmp_path / "x.py").write_text(code)
    monkeypatch.setattr(run, "HERE", tmp_path)
    found = run.run(run.Step("x", [], 1), full=False)
    assert found.startswith(outcome)
    (tmp_path / "run.json").write_text(json.dumps({"steps": [{"script": "scale", "outcome": found}]}))
    _, why_not = module("summary").read(tmp_path)
    assert why_not["scale"] == (found if found != "done" else "bench/scale.py has not run")


# ---- peers


def test_a_second_fio_has_as_much_memory_as_everybody_else(monkeypatch):
    contestants = module("contestants")
    monkeypatch.setattr(contestants.shutil, "which", lambda _: "fio")
    monkeypatch.setattr(contestants, "_free_huge_bytes", lambda: GIB)
    fio = contestants.Fio("fio, much memory", 512 * MIB)
    for bs in (128 << 10, MIB, 8 * MIB):
        found = list(fio._settings(contestants.Case(bs=bs, total=GIB)))
        assert {settings[-1] for settings in found} == {f"--iodepth={512 * MIB // bs}"}
        assert any("--mem=mmaphuge" in settings for settings in found)


def test_fio_goes_on_with_other_memory_when_the_huge_pages_are_gone(tmp_path, monkeypatch):
    contestants = module("contestants")
    monkeypatch.setattr(contestants.shutil, "which", lambda _: "fio")
    monkeypatch.setattr(contestants, "_free_huge_bytes", lambda: GIB)
    fio, pool = contestants.Fio("fio best"), [True]

    def one_pass(rw, settings):
        if "--mem=mmaphuge" in settings and not pool:
            raise RuntimeError("fio: Bad address")
        return contestants.Sample(200 if "--mem=mmaphuge" in settings else 100, 0.01)

    monkeypatch.setattr(fio, "_run", one_pass)
    fio.prepare(contestants.Case(bs=MIB, total=GIB), tmp_path)
    assert fio.measure("load").mb_per_s == 200
    pool.clear()
    assert fio.measure("load").mb_per_s == 100


@pytest.mark.parametrize(("plane", "pages"), [("thread", "huge"), ("process", "huge"), ("process", "4k")])
def test_a_peer_in_a_process_of_its_own_is_measured_and_cleans_up(tmp_path, plane, pages):
    contestants = module("contestants")
    script = BENCH / "peers" / "kvdisk_store.py"
    one = contestants.ProcessContestant("kvdisk", [sys.executable, str(script), "on", "posix", plane], tmp_path / "log")
    try:
        one.prepare(contestants.Case(bs=BS, total=SIZE, requests=2, pages=pages, fresh=True), tmp_path / "data")
        assert one.measure("store").cpu_s_per_gib > 0
        assert one.measure("load").mb_per_s > 0
        with pytest.raises(RuntimeError, match="kvdisk: "):
            one.measure("sideways")
        one.finish()
    finally:
        one.close()
    assert list((tmp_path / "data").iterdir()) == []


def test_a_peer_that_does_not_start_is_absent_with_its_last_words(tmp_path):
    contestants, environments = module("contestants"), module("environments")
    with pytest.raises(environments.AbsentError, match="no such peer"):
        contestants.ProcessContestant("x", [sys.executable, "-c", "raise SystemExit('no such peer')"], tmp_path / "log")
