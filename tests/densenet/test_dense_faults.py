"""Planted faults: wrong lean implementations, each of which the comparison of whole runs must reject."""

from __future__ import annotations

import pytest
import torch
from dense_runs import at_level, errors, network, run

from lowtide.lean import batch_norm, dense_block, dropout, segment, transition


def _no_correction(monkeypatch):
    monkeypatch.setattr(dense_block.Corrections, "settle", lambda *_: None)


def _correction_of_later_layers_lost(monkeypatch):
    def add(self, slope, offset):
        self.slope[: len(slope)] = slope
        self.offset[: len(offset)] = offset
        self.pending = True

    monkeypatch.setattr(dense_block.Corrections, "add", add)


def _buffers_moved_twice(monkeypatch):
    def twice(norm, moments):
        batch_norm.update_running(norm, moments)
        batch_norm.update_running(norm, moments)

    monkeypatch.setattr(dense_block, "update_running", twice)


def _biased_running_variance(monkeypatch):
    real = batch_norm.update_running
    monkeypatch.setattr(dense_block, "update_running", lambda norm, moments: real(norm, moments._replace(size=1e30)))


def _another_epsilon_in_the_tail(monkeypatch):
    real = batch_norm.affine
    monkeypatch.setattr(segment, "norm_affine", lambda norm, m, like: real(norm, m._replace(var=m.var * 1.001), like))


def _one_buffer_for_two_bottlenecks(monkeypatch):
    real = dense_block.forward_layers

    def shared(*args, **keywords):
        kept = real(*args, **keywords)
        return [kept[0]] * len(kept) if kept and kept[0].shape == kept[-1].shape else kept

    monkeypatch.setattr(segment, "forward_layers", shared)


def _mask_of_the_present_generator(monkeypatch):
    real = dropout.draw
    monkeypatch.setattr(dropout, "draw", lambda *args, replay: real(*args, replay=False))


def _random_state_not_put_back(monkeypatch):
    def draw(layer, new, tools, state, *, replay):
        if replay:
            torch.set_rng_state(state)
        return real(layer, new, tools, state, replay=False)

    real = dropout.draw
    monkeypatch.setattr(dropout, "draw", draw)


def _activation_a_little_too_large(monkeypatch):
    real = transition._activated
    monkeypatch.setattr(transition, "_activated", lambda tools, x, at, dtype=None: real(tools, x, at, dtype) * 1.0001)


def _head_forgets_the_number_of_positions(monkeypatch):
    real = segment.head_backward
    monkeypatch.setattr(segment, "head_backward", lambda t, f, g, dy, *rest: real(t, f, g, dy * f.shape[2], *rest))


FAULTS = {f.__name__.strip("_"): f for f in (
    _no_correction, _correction_of_later_layers_lost, _buffers_moved_twice, _biased_running_variance,
    _another_epsilon_in_the_tail, _one_buffer_for_two_bottlenecks, _mask_of_the_present_generator,
    _random_state_not_put_back, _activation_a_little_too_large, _head_forgets_the_number_of_positions,
)}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_seen(fault, monkeypatch):
    model = network(drop_rate=0.2)
    x = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    plain = run(at_level(model, "none"), x, 2)
    assert max(errors(run(at_level(model, "pointwise"), x, 2), plain).values()) <= 1e-9
    FAULTS[fault](monkeypatch)
    assert max(errors(run(at_level(model, "pointwise"), x, 2), plain).values()) > 1e-6
