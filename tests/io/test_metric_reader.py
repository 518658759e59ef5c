"""Metrics that are read a few steps late: in order, and none is lost."""

from __future__ import annotations

import pytest
import torch

from funcamp import MetricReader
from funcamp._io import metric_reader
from tests.support.helpers import assert_same


class Late:
    """An event that has not happened until it is waited for, or released."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


def test_metrics_arrive_late_in_order_and_none_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Late] = []

    def recorded(_: object) -> Late:
        events.append(Late())
        return events[-1]

    monkeypatch.setattr(metric_reader, "_record_event", recorded)
    monkeypatch.setattr(metric_reader, "_on_device", lambda leaf: True)
    reader = MetricReader(limit=4)
    for index in range(3):
        reader.put({"loss": torch.tensor(float(index)), "row": torch.ones(2) * index, "name": "a"})
    events[1].done = True
    assert reader.ready() == []  # the first has not arrived
    events[0].done = True
    assert [row["loss"] for row in reader.ready()] == [0.0, 1.0]
    for index in range(3, 8):
        reader.put({"loss": torch.tensor(float(index))})
    assert len(reader) == 6
    assert [event.done for event in events] == [True] * 4 + [False] * 4  # of those in flight the oldest are waited for
    assert [row["loss"] for row in reader.drain()] == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert (len(reader), reader.drain()) == (0, [])


def test_metrics_on_a_cpu_arrive_at_once() -> None:
    reader, scale = MetricReader(), torch.tensor(2.0)
    reader.put((torch.tensor(2), torch.tensor(True), None, torch.ones(2), scale))
    scale.mul_(2)  # as a donated step writes its state
    ((*numbers, row, found),) = reader.ready()
    assert (numbers, found) == ([2, True, None], 2.0)
    assert_same(row, torch.ones(2))
    for limit, error in ((0, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match="MetricReader: limit must be"):
            MetricReader(limit=limit)  # type: ignore[arg-type]
