"""docs/models.md: a row for every family, and of large models what their published numbers come to."""

from collections.abc import Iterable

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_cache_interface import MambaSpec

from tests.vllm.e2e import test_families as families
from tests.vllm.large_models import LARGE_MODELS, PLANNED, planned_geometry
from tests.vllm.models_doc import END_TO_END, LARGE, check_row, rows
from tests.vllm.overhead import bytes_on_disk_over_live

RATIO_MAX = 1.02


def test_every_family_that_runs_end_to_end_has_a_row_and_nothing_else() -> None:
    cases = [case for case in vars(families).values() if isinstance(case, type) and "model" in vars(case)]
    assert list(rows(END_TO_END)) == [f"`{case.model}`" for case in cases]


@pytest.mark.parametrize("name", LARGE_MODELS)
def test_a_large_models_row_is_what_its_numbers_come_to(name: str, pytestconfig: pytest.Config) -> None:
    check_row(LARGE, large_row(name), write=pytestconfig.getoption("--write-models-doc"))


def test_every_large_model_has_a_row_and_nothing_else() -> None:
    assert list(rows(LARGE)) == list(LARGE_MODELS)


def large_row(name: str) -> list[str]:
    """What docs/models.md says of a model of fixtures/models/."""
    model = LARGE_MODELS[name]()
    about = (LARGE_MODELS[name].__doc__ or "").splitlines()[0].rstrip(".")
    planned = PLANNED[name]
    advice = blocks_per_chunk(name)
    figures = bytes_on_disk_over_live(planned_geometry(name, advice), chunks_at_once=1)
    chunks = [figure.chunk_bytes for figure in figures.values()]
    ratios = sorted(figure.ratio for figure in figures.values())
    ranks = f", each of {model.tp_size} ranks the same" if model.replicated else ""
    return [
        name,
        f"{about}; {len(planned)} group{'s' * (len(planned) > 1)}{ranks}",
        _once(f"{tokens:,}" for tokens, _, _ in planned),
        _once(f"{block_bytes:,}" for _, _, block_bytes in planned),
        str(advice),
        _once(f"{chunk / (1 << 20):.2f}" for chunk in chunks),
        " to ".join(dict.fromkeys(f"{ratio:.3f}" for ratio in (ratios[0], ratios[-1]))),
    ]


def blocks_per_chunk(name: str) -> int:
    """1 with recurrent states, else the least with which chunks take 2 % more than their bytes, one in a pack alone."""
    if any(isinstance(spec, MambaSpec) for spec in LARGE_MODELS[name]().specs.values()):
        return 1
    return next(
        count
        for count in (1, 2, 4, 8, 16, 32, 64)
        if all(
            figure.ratio <= RATIO_MAX
            for figure in bytes_on_disk_over_live(planned_geometry(name, count), chunks_at_once=1).values()
        )
    )


def _once(cells: Iterable[str]) -> str:
    """Equal neighbours as one, with how many: "3 x 64; 256"."""
    runs: list[tuple[str, int]] = []
    for cell in cells:
        if runs and runs[-1][0] == cell:
            runs[-1] = cell, runs[-1][1] + 1
        else:
            runs.append((cell, 1))
    return "; ".join(f"{count} x {cell}" if count > 1 else cell for cell, count in runs)
