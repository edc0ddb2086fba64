"""Figures of a fresh process: its high-water over its base, the exact allocation peak, seconds per step.

A process's size says what a step costs a machine, libraries' own buffers included, but only a fresh process is
honest: an old one has holes from earlier work that new tensors fill unseen. Each part has a process of its own:

    allocations   `lowtide.measure`, so `peak_bytes` and `saved_bytes`: exact, torch's allocator alone
    mapped        high-water while malloc gives every block of 64 KiB or more back to the system when it is freed:
                  `peak_bytes` plus what libraries take for themselves and the code that is loaded on first use
    process       high-water of one step and seconds of several, as in anybody's run: malloc's holes on top

Linux only: VmHWM of /proc/self/status, reset through /proc/self/clear_refs just before the first step.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from lowtide.errors import ArgumentError, LowtideError, UnsupportedError, describe
from lowtide.measure.targets import load_target

Part = Literal["allocations", "mapped", "process"]
PARTS: tuple[Part, ...] = get_args(Part)
# glibc raises its threshold for separate mappings with every free, up to 32 MiB; set by hand it stays
_MAPPED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


class ChildFigures(TypedDict, total=False):
    """What `run_in_child` found; a key is there if its part was asked for. All bytes are over the base."""

    peak_bytes: int  # allocations: largest sum of allocated bytes, exact
    saved_bytes: int  # allocations: kept for backward by autograd
    outside_autograd_bytes: int  # allocations: kept, but not through autograd
    high_water_bytes: int  # mapped: largest resident size of the process
    library_scratch_bytes: int  # allocations and mapped: high_water_bytes - peak_bytes
    process_high_water_bytes: int  # process: the same with malloc as it comes
    malloc_bytes: int  # mapped and process: process_high_water_bytes - high_water_bytes, holes in malloc's heap
    seconds: float  # process: median over the steps after the first
    times: list[float]  # process: seconds of every step, the first too


def run_in_child(
    target: str,
    kwargs: Mapping[str, Any] | None = None,
    *,
    steps: int = 4,
    parts: Sequence[Part] = PARTS,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 600.0,
) -> ChildFigures:
    """Build a step in fresh processes and measure it there.

    Args:
        target: "module:function" or "file.py:function". `function(**kwargs)` returns what is measured: a callable
            without arguments, or (callable, *arguments). A backward from its result follows as in `lowtide.measure`.
        kwargs: keywords for the function; values that JSON can hold.
        steps: calls in the "process" part. High-waters are those of the first, which is the warm-up of `seconds`
            unless it is the only one.
        parts: which processes to start, see above.
        env: variables that the processes get on top of this one's (OMP_NUM_THREADS, LOWTIDE_KERNELS).
        timeout_s: for each process.

    Raises:
        ArgumentError: an unknown part, steps below 1, kwargs that are not JSON.
        UnsupportedError: not Linux, or the high-water cannot be told from that of start-up.
        LowtideError: the process failed (its error and the last line of its traceback), was killed or ran out of time.
    """
    _check(steps, parts)
    figures: ChildFigures = {}
    for part in parts:
        figures.update(_run_part(part, target, dict(kwargs or {}), steps, dict(env or {}), timeout_s))
    if "high_water_bytes" in figures and "peak_bytes" in figures:
        figures["library_scratch_bytes"] = figures["high_water_bytes"] - figures["peak_bytes"]
    if "high_water_bytes" in figures and "process_high_water_bytes" in figures:
        figures["malloc_bytes"] = figures["process_high_water_bytes"] - figures["high_water_bytes"]
    return figures


def _check(steps: int, parts: Sequence[Part]) -> None:
    if not sys.platform.startswith("linux"):
        raise UnsupportedError(describe(expected="Linux (/proc/self/status)", got=sys.platform, where="run_in_child"))
    if not isinstance(steps, int) or steps < 1:
        raise ArgumentError(describe(expected="steps to be an integer >= 1", got=repr(steps), where="run_in_child"))
    unknown = [p for p in parts if p not in PARTS]
    if unknown or not parts or isinstance(parts, str):
        expected = f"parts among {', '.join(PARTS)}"
        raise ArgumentError(describe(expected=expected, got=repr(parts), where="run_in_child"))


def _run_part(
    part: Part, target: str, kwargs: dict[str, Any], steps: int, env: dict[str, str], timeout_s: float
) -> ChildFigures:
    request = {"part": part, "target": target, "kwargs": kwargs, "steps": steps, "path": sys.path}
    try:
        text = json.dumps(request)
    except TypeError as error:
        raise ArgumentError(describe(expected="kwargs of JSON values", got=str(error), where="run_in_child")) from None
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # the profiler warns on stderr about blocks from before it started
    environment = quiet | dict(os.environ) | (_MAPPED if part == "mapped" else {}) | env
    with tempfile.TemporaryDirectory(prefix="lowtide-") as folder:
        asked, answered = Path(folder, "request.json"), Path(folder, "answer.json")
        asked.write_text(text)
        command = [sys.executable, "-m", "lowtide.measure.child", str(asked), str(answered)]
        # -m looks the module up on the path: it must be the very lowtide that runs here
        environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        try:
            done = subprocess.run(command, env=environment, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            raise LowtideError(f"{target}: not done after {timeout_s:g} s in its own process ({part})") from None
        if not answered.exists():
            raise LowtideError(f"{target}: its process ({part}) ended with {_describe_exit(done.returncode)}")
        answer = json.loads(answered.read_text())
    if "error" in answer:
        kind = {"UnsupportedError": UnsupportedError, "ArgumentError": ArgumentError}.get(answer["kind"], LowtideError)
        raise kind(f"{target} in its own process ({part}): {answer['error']}")
    return answer


def _describe_exit(code: int) -> str:
    if code == -9:
        return "signal 9: killed, out of memory perhaps"
    return f"signal {-code}" if code < 0 else f"exit code {code} and no answer"


def main(asked: str, answered: str) -> None:
    """The child: read the request, measure, write the answer."""
    os.dup2(2, 1)  # what the target prints is no part of anybody's output
    request = json.loads(Path(asked).read_text())
    sys.path[:] = request["path"]
    answer: Any
    try:
        answer = _answer(request)
    except LowtideError as error:
        answer = {"error": str(error), "kind": type(error).__name__}
    except Exception as error:
        traceback.print_exc()
        place = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{type(error).__name__}: {error} ({place.filename}:{place.lineno}); its traceback is on stderr"
        answer = {"error": message, "kind": "LowtideError"}
    part = Path(f"{answered}.part")
    part.write_text(json.dumps(answer))
    part.replace(answered)


def _answer(request: dict[str, Any]) -> ChildFigures:
    from lowtide.measure.call import Call, choose_device
    from lowtide.measure.run import measure
    from lowtide.measure.timing import Timing, time_once

    build = load_target(request["target"])
    if not callable(build):
        raise ArgumentError(
            describe(expected="a function that builds the step", got=type(build).__name__, where=request["target"])
        )
    built = build(**request["kwargs"])
    fn, *args = built if isinstance(built, tuple) else (built,)
    if not callable(fn):
        expected = "a callable or (callable, *arguments) to be returned"
        raise ArgumentError(describe(expected=expected, got=type(fn).__name__, where=request["target"]))
    if request["part"] == "allocations":
        m = measure(fn, *args, repeats=1, device="cpu")
        return {
            "peak_bytes": m.peak_bytes, "saved_bytes": m.saved_bytes, "outside_autograd_bytes": m.outside_autograd_bytes
        }  # fmt: skip
    call = Call(fn, args, choose_device(fn, args, "cpu"))
    _warm_up()
    high_water = HighWater()
    times = [time_once(call.run, call.device)]
    over_base = high_water.over_base()
    if request["part"] == "mapped":
        return {"high_water_bytes": over_base}
    times += [time_once(partial(call.run, reuse_gradients=True), call.device) for _ in range(request["steps"] - 1)]
    median = Timing(tuple(times[1:] or times)).median
    return {"process_high_water_bytes": over_base, "seconds": median, "times": times}


def _warm_up() -> None:
    """What any first step of torch starts and imports (thread pool, sympy by way of `backward(gradient)`) is base."""
    import torch

    x = torch.randn(256, 256, requires_grad=True)
    (x @ x).backward(torch.ones(256, 256))


class HighWater:
    """The largest resident size of this process from now on, over its size now."""

    def __init__(self) -> None:
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc: give the holes of start-up back first
        if trim is not None:
            trim(0)
        self._was_reset = _reset_high_water()
        self._base_bytes = _status_bytes("VmRSS")
        self._start_up_bytes = _status_bytes("VmHWM")

    def over_base(self) -> int:
        high_water = _status_bytes("VmHWM")
        if not self._was_reset and high_water == self._start_up_bytes:
            raise UnsupportedError(
                describe(
                    expected="/proc/self/clear_refs to be writable, or a step larger than the start-up",
                    got=f"a high-water of {high_water} bytes that was reached before the step",
                    where="process high-water",
                    fix="measure a larger input",
                )
            )
        return high_water - self._base_bytes


def _reset_high_water() -> bool:
    """Set VmHWM to the size now; some containers forbid it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise UnsupportedError(
        describe(expected=f"{name} in /proc/self/status", got="no such line", where="process high-water")
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
