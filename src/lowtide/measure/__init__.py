"""What a call really keeps, its peak, its time: `measure(fn, *args)`; every number is explained in docs/measure.md."""

from __future__ import annotations

from lowtide.measure.measurement import CudaPeaks as CudaPeaks
from lowtide.measure.measurement import Holder as Holder
from lowtide.measure.measurement import Measurement as Measurement
from lowtide.measure.measurement import Timeline as Timeline
from lowtide.measure.recompute import Operators as Operators
from lowtide.measure.run import measure as measure
from lowtide.measure.targets import load_target as load_target
from lowtide.measure.timing import Timing as Timing
from lowtide.measure.timing import time_interleaved as time_interleaved
from lowtide.measure.units import format_bytes as format_bytes
