"""The parity cases on the Triton passes in Triton's interpreter: in processes of their own, as Triton reads the switch
when it is imported. And what happens where Triton was asked for and cannot serve.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Protocol

import pytest

from lowtide.kernels import Kernels, TensorCalls

HERE = Path(__file__).parent
# the passes with a convolution or a pool are tensor calls: a case of each kind shows that they are met
TENSOR_CALLS = [
    "test_mix.py::test_forward[triton-torch.float32]",
    "test_mix.py::test_backward[triton-torch.bfloat16]",
    "test_mix.py::test_backward_through_the_next_norm[triton-torch.float64]",
    "test_conv.py::test_backward_in_half_precision[triton-torch.float16]",
    "test_pool.py::test_forward[triton-max-torch.float32]",
    "test_pool.py::test_backward_of_the_average_pool[triton-torch.bfloat16]",
    "test_pool.py::test_of_equal_numbers_the_first_is_taken_and_a_nan_wins[triton]",
]


def environment(**variables: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    return {**clean, "PYTHONPATH": path, "LOWTIDE_KERNELS": "triton", **variables}


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, *command)
    return subprocess.run(
        command, env=environment(**variables), cwd=HERE, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.parametrize(
    ("cases", "least"),
    [
        # strides are arguments of the passes: each dtype in one form or both
        (["test_parity.py", "-k", "planes and (float64 or bfloat16) and not number_of_threads"], 20),
        (["test_parity.py", "-k", "rows and (float16 or float32) and not (several_dtypes or number_of_threads)"], 20),
        (TENSOR_CALLS, len(TENSOR_CALLS)),
    ],
    ids=["planes", "rows", "tensor-calls"],
)
def test_parity_in_the_interpreter(cases: list[str], least: int) -> None:
    # infinities minus infinities, which the interpreter has numpy compute
    numpy_warnings = [f"-Wignore:{what} encountered:RuntimeWarning" for what in ("invalid value", "overflow")]
    options = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", *numpy_warnings]
    done = run("-m", "pytest", *options, *cases, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    counts = dict(re.findall(r"(\d+) (passed|failed|skipped|deselected)", done.stdout.splitlines()[-1]))
    passed = [int(n) for n, what in counts.items() if what == "passed"]
    assert "skipped" not in counts.values(), done.stdout
    assert passed[0] >= least, done.stdout


NETWORK = """
import copy, torch
from lowtide.kernels import select
from lowtide.models import densenet_bc
assert select(torch.zeros(1, 1, 1)).name == "triton"
torch.manual_seed(0)
lean = densenet_bc(10, 4, recompute="layer").double()
plain = copy.deepcopy(lean)
plain.set_recompute("none")
x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
for model in (lean, plain):
    for step in range(2):
        (model(x) * torch.arange(20.0, dtype=torch.float64).view(2, 10)).sum().backward()
def error(ours, oracle):
    return ((ours - oracle).norm() / oracle.norm()).item()
pairs = [(a.grad, b.grad) for a, b in zip(lean.parameters(), plain.parameters(), strict=True)]
pairs += [(a.double(), b.double()) for a, b in zip(lean.buffers(), plain.buffers(), strict=True)]
assert max(error(1.001 * a, b) for a, b in pairs) > 1e-4
print(max(error(a, b) for a, b in pairs))
"""


def test_network_in_the_interpreter() -> None:
    done = run("-c", NETWORK, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-9, done.stdout


def test_which_passes_are_written_in_triton() -> None:
    """These are; whatever else a provider must offer is inherited from the tensor calls on purpose."""
    triton_passes = pytest.importorskip("lowtide.kernels.triton_passes")
    every = [name for name in dir(Kernels) if not name.startswith("_")]
    passes = {name for name in every if callable(getattr(Kernels, name)) and not hasattr(Protocol, name)}
    assert {"norm_act_mix", "norm_act_max_pool", "norm_act_average_pool_backward"} <= passes
    assert passes & set(vars(triton_passes.TritonKernels)) == {
        "supports", "batch_stats", "scale_shift_act", "act_backward_sums_", "act_backward_accumulate", "affine_add_"
    }  # fmt: skip
    assert passes <= set(dir(TensorCalls))
    assert issubclass(triton_passes.TritonKernels, TensorCalls)


ASKED_ON_THE_CPU = """
import torch
from lowtide.kernels import select
print(select(torch.zeros(1, 1, 1)).name, select(torch.zeros(1, 1, 1)).name)
"""


def test_asked_for_on_the_cpu_one_warning_and_tensor_calls() -> None:
    done = run("-c", ASKED_ON_THE_CPU, TRITON_INTERPRET="0")
    assert done.stdout == "tensor tensor\n", done.stderr
    warning = "the triton kernels cannot be used, tensor calls take their place: they run on CUDA, not on cpu"
    assert done.stderr.count("RuntimeWarning") == 1, done.stderr
    assert warning in done.stderr
