"""The short examples: what they return, what they write, and no host read in the loop that logs."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)

from funcamp._io import metric_reader
from tests.support.host_reads import host_reads
from tests.support.programs import import_example
from tests.support.quiet_lightning import IGNORED

accelerate_loop = import_example("accelerate_loop")
lightning_mixed = import_example("lightning_mixed")
log_metrics = import_example("log_metrics")
numerics_gpt = import_example("numerics_gpt")

STEPS = 40

pytestmark = [*IGNORED, pytest.mark.usefixtures("fresh_accelerate")]


def read(file: Path) -> list[dict[str, float]]:
    with file.open(newline="") as lines:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(lines)]


def check(rows: list[dict[str, float]], numbers: dict[str, float], first_step: int) -> None:
    """Every step once and in order, a scale that follows the rule, and what the example said of it."""
    assert [row["step"] for row in rows] == list(range(first_step, first_step + STEPS))
    assert numbers["steps"] == STEPS
    assert 5 < numbers["skipped"] < STEPS / 2
    assert numbers["skipped"] == sum(row["found_inf"] for row in rows)
    assert numbers["loss_first"] == rows[0]["loss"]
    assert numbers["loss_last"] == rows[-1]["loss"] < rows[0]["loss"]
    scale, clean = 2.0**24, 0
    for row in rows:
        clean = 0 if row["found_inf"] else clean + 1
        scale *= 0.5 if row["found_inf"] else 1.0
        assert (row["scale"], row["growth_tracker"]) == (scale, clean)


def test_log_metrics_writes_every_step_to_csv_and_tensorboard(tmp_path: Path) -> None:
    numbers = log_metrics.main(STEPS, tmp_path)
    rows = read(tmp_path / "metrics.csv")
    check(rows, numbers, first_step=0)
    board = EventAccumulator(str(tmp_path)).Reload()
    assert sorted(board.Tags()["scalars"]) == ["found_inf", "growth_tracker", "loss", "scale"]
    for name in board.Tags()["scalars"]:
        assert [(event.step, event.value) for event in board.Scalars(name)] == [
            (row["step"], pytest.approx(row[name], rel=1e-6)) for row in rows
        ]


class Late:
    """What a GPU's event would say: that a row has arrived, once three later ones are under way."""

    made: list[Late]
    waits: list[int]

    def __init__(self, _: object) -> None:
        Late.made.append(self)

    def query(self) -> bool:
        return Late.made.index(self) + 3 < len(Late.made)

    def synchronize(self) -> None:
        Late.waits.append(Late.made.index(self))


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> type[Late]:
    """A reader whose rows arrive late, as from a GPU."""
    Late.made, Late.waits = [], []
    monkeypatch.setattr(metric_reader, "_record_event", Late)
    monkeypatch.setattr(metric_reader, "_on_device", lambda leaf: True)
    return Late


def test_log_metrics_reads_nothing_on_the_host_before_it_has_arrived(
    late: type[Late], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[int, int]] = []
    write = log_metrics.Log.write

    def noting(log: Any, rows: list[Any]) -> None:
        written.extend((row[0], len(late.made)) for row in rows)
        write(log, rows)

    monkeypatch.setattr(log_metrics.Log, "write", noting)
    with host_reads() as reads:
        numbers = log_metrics.main(STEPS, tmp_path)
    # the reader's own reads are of copies that lie on the host
    assert {place.split(" at ")[1].split(":")[0] for place in reads} == {metric_reader.__file__}
    assert len(reads) == 4 * STEPS
    assert written == [(step, min(step + 4, STEPS)) for step in range(STEPS)]
    assert late.waits == list(range(STEPS - 3, STEPS))  # by `drain`, after the last step
    check(read(tmp_path / "metrics.csv"), numbers, first_step=0)


# Forty steps; the callback goes to the logger itself, at every one.
@pytest.mark.filterwarnings(
    "ignore:The number of training batches \\(40\\) is smaller than the logging interval:UserWarning"
)
def test_lightning_example_logs_every_step_without_a_wait_in_the_loop(late: type[Late], tmp_path: Path) -> None:
    numbers = lightning_mixed.main(STEPS, str(tmp_path))
    check(read(tmp_path / "lightning_logs" / "version_0" / "metrics.csv"), numbers, first_step=1)
    assert late.waits == list(range(STEPS - 3, STEPS))


@pytest.mark.parametrize("fused", [True, False])
def test_accelerate_examples_schedule_counts_applied_steps(fused: bool) -> None:
    numbers = accelerate_loop.main(STEPS, fused)
    assert 5 < numbers["skipped"] < STEPS / 2
    assert numbers["scheduled"] == STEPS - numbers["skipped"]
    assert numbers["scale"] == 2.0 ** (24 - numbers["skipped"])
    assert numbers["loss_last"] < numbers["loss_first"]


@pytest.mark.slow
def test_numerics_example_looks_inside_the_demo() -> None:
    found = numerics_gpt.main(["--steps=21", "--width=16"])
    assert [step for step, _ in found["history"]] == [0, 20]
    assert found["before"].loss_scale == 2.0**12
    assert found["after"].first_nonfinite() is None
    assert {"blocks.0.qkv", "head"} <= set(found["history"][0][1])
