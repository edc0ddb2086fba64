"""Built-in pairs: every part of lowtide, and networks from outside, by name alone."""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.cli import run
from lowtide.cli.shapes import random_inputs
from lowtide.errors import ArgumentError, ConversionError
from lowtide.models.built_in import PARTS
from lowtide.models.pairs import default_input, list_pairs, resolve_pair

LEVELS = dict(zip(PARTS, cycle(("pointwise", "layer", "block")), strict=False))


def pair_of(name: str, level: Any) -> tuple[nn.Module, nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    plain, lean, form = resolve_pair(f"lowtide:{name}", level)
    assert form == f"recompute={level}"
    shape = default_input(f"lowtide:{name}")
    assert shape is not None
    return plain, lean, random_inputs(shape)


@pytest.mark.parametrize("name", PARTS)
def test_each_part_passes(name: str) -> None:
    plain, lean, inputs = pair_of(name, LEVELS[name])
    lowtide.verify(plain, lean, inputs, steps=1).raise_if_failed()


@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_is_one_percent_off_fails(name: str) -> None:
    plain, lean, inputs = pair_of(name, "layer")
    lean.register_forward_hook(lambda module, args, output: output * 1.01)
    report = lowtide.verify(plain, lean, inputs, steps=1, dtype=torch.float64)
    assert "output" in {failure.kind for failure in report.failures}


@pytest.mark.parametrize("name", PARTS)
def test_the_lean_form_of_each_part_keeps_less(name: str) -> None:
    plain, lean, inputs = pair_of(name, "layer")
    kept = [lowtide.measure(lambda *x, f=f: f(*x), *inputs, repeats=1).saved_bytes for f in (plain, lean)]
    assert kept[1] < kept[0]


def test_the_list_names_what_can_be_built(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", "--list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows == list_pairs()
    assert {f"lowtide:{name}" for name in PARTS} <= {row["name"] for row in rows}
    families = ("dense_block-", "densenet-1d", "densenet-2d", "densenet-3d", "transition-", "densely_connected",
                "norm_act_conv-", "long_conv", "sgconv-", "sequence_model-")  # fmt: skip
    assert all(any(name.startswith(family) for name in PARTS) for family in families)
    assert run(["verify", "--list"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 1 + len(rows)
    assert all(row["name"] in line and row["input"] in line for row, line in zip(rows, table[1:], strict=True))


@pytest.mark.parametrize(
    ("name", "form", "converted"),
    [
        ("torchvision:densenet121", "memory_efficient=True", False),
        ("timm:densenet121", "memory_efficient=True", False),
        ("torchvision:resnet18", "converted, scope=all, recompute=layer", True),
        ("timm:resnet10t", "converted, scope=all, recompute=layer", True),
        ("monai:densenet121", "converted, recompute=layer", True),
        ("monai:densenet121-1d", "converted, recompute=layer", True),
        ("monai:densenet121-3d", "converted, recompute=layer", True),
    ],
)
def test_networks_from_outside_have_the_form_that_they_name(name: str, form: str, converted: bool) -> None:
    plain, lean, got = resolve_pair(name, "layer", convert=lowtide.convert)
    assert got == form
    assert hasattr(lean, "set_recompute") is converted
    assert not hasattr(plain, "set_recompute")
    assert list(plain.state_dict()) == list(lean.state_dict())
    assert default_input(name) is not None


def test_a_converted_network_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--input", "2x1x64", "--steps", "1", "--recompute", "layer", "--dtype", "float64"]
    assert run(["verify", "monai:densenet121-1d", *arguments]) == 0
    assert "candidate monai:densenet121-1d (converted, recompute=layer)" in capsys.readouterr().out


OWN = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.Conv2d(4, 2, 3)), torch.randn(2, 3, 9, 8)

def nothing():
    return nn.Linear(4, 2)

def function():
    return torch.sin
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "own_network.py"
    path.write_text(OWN)
    return str(path)


def test_a_network_of_one_s_own_against_its_converted_form(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", f"{own}:net", "--convert"]) == 0
    assert "net (converted, scope=all, recompute=pointwise)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["OWN:nothing", "--convert"],
            "expected something to convert, got a Linear without dense blocks, long convolutions",
        ),
        (["OWN:function", "--convert"], "expected a torch.nn.Module, got builtin_function"),
        (["OWN:net", "OWN:net", "--convert"], "one model with --convert, got two"),
        (["OWN:net"], "or --convert to verify one against its converted form"),
        ([], "expected a model, got none"),
        (["lowtide:sgconv-none"], "lowtide verify --list names them"),
    ],
)
def test_wrong_calls(own: str, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    assert run(["verify", *(a.replace("OWN", own) for a in arguments)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert text in error


def test_without_a_converter_there_may_be_no_second_form() -> None:
    with pytest.raises(ArgumentError, match="lean or memory-efficient form"):
        resolve_pair("monai:densenet121-3d")


def test_what_the_converter_refuses_is_its_error() -> None:
    def refuses(*_: Any) -> None:
        raise ConversionError("nothing")

    with pytest.raises(ConversionError, match="nothing"):
        resolve_pair("torchvision:resnet18", convert=refuses)
