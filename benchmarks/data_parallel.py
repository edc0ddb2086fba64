"""What averaging the gradients costs: a step of DistributedDataParallel against the same step without messages.

    python benchmarks/data_parallel.py [--ranks 2] [--repeats 7]

Each rank is a process with one thread; gloo on the loopback device. "alone" is the step inside `no_sync`: the same
arithmetic, no message. The difference is the communication that backward did not hide. Medians over the repeats, of
rank 0, in seconds; the kinds of step take turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import torch
from torch import distributed, multiprocessing
from torch.nn.parallel import DistributedDataParallel

from lowtide.models import densenet121, densenet_bc
from lowtide.nn import SyncBatchNorm

NETWORKS = {
    "BC-100 k12, batch 16, 32x32": (lambda level: densenet_bc(100, 12, recompute=level), (16, 3, 32, 32)),
    "densenet121, batch 4, 96x96": (lambda level: densenet121(recompute=level), (4, 3, 96, 96)),
}


def rank_main(rank: int, ranks: int, repeats: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    for title, (build, shape) in NETWORKS.items():
        x = torch.randn(shape)
        networks = {}
        for level in ("none", "pointwise", "layer"):
            torch.manual_seed(0)
            networks[level] = DistributedDataParallel(
                build(level), forward_sync_buffers=False, gradient_as_bucket_view=True
            )
        torch.manual_seed(0)
        networks["pointwise, SyncBatchNorm"] = DistributedDataParallel(
            SyncBatchNorm.convert_sync_batchnorm(build("pointwise")),
            forward_sync_buffers=False,
            gradient_as_bucket_view=True,
        )
        times: dict[tuple[str, str], list[float]] = {}
        for repeat in range(repeats + 2):  # two to warm up: the first orders the buckets
            for level, network in networks.items():
                for kind in ("averaged", "alone"):
                    network.zero_grad()
                    distributed.barrier()
                    started = time.perf_counter()
                    if kind == "alone":
                        with network.no_sync():
                            network(x).square().mean().backward()
                    else:
                        network(x).square().mean().backward()
                    distributed.barrier()
                    if repeat >= 2:
                        times.setdefault((level, kind), []).append(time.perf_counter() - started)
        if rank == 0:
            size = sum(p.numel() * p.element_size() for p in networks["none"].parameters())
            print(f"{title}, {ranks} ranks, gradients {size / 2**20:.1f} MiB")
            for level in networks:
                averaged, alone = (statistics.median(times[level, kind]) for kind in ("averaged", "alone"))
                print(f"  {level:<26} averaged {averaged:.3f}  alone {alone:.3f}  difference {averaged - alone:+.3f}")
    distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(rank_main, (given.ranks, given.repeats, folder), nprocs=given.ranks)


if __name__ == "__main__":
    main()
