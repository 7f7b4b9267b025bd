"""What a rank does in tests/test_ar_ipc_gpu.py: a process that maps its peers through CUDA IPC."""

from __future__ import annotations

import faulthandler
import pathlib
import time

import torch
import torch.distributed as dist

from fastverify.comm import launch as ar
from fastverify.comm.collective import Call
from fastverify.comm.ipc import IpcWorld
from fastverify.comm.layout import Layout
from fastverify.comm.peer import Peer
from fastverify.comm.tuning import tune
from tests import ar_reference as reference
from tests.spawn import Rank


def calls(place: Rank, folder: str, launches: list[ar.Launch], rows: int) -> list[str]:
    """Eager calls, then replays of a graph of an odd number of them; returns what is wrong.

    All ranks share one GPU, which runs their processes in turns of milliseconds.
    """
    faulthandler.dump_traceback_later(80, exit=True)
    torch.cuda.set_device(0)
    store = dist.FileStore(str(pathlib.Path(folder) / "store"), place.world)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world)
    layout = Layout(place.world, 7168, 8)
    group = dist.group.WORLD
    assert group is not None
    world = IpcWorld(layout, group, torch.device("cuda", 0))
    wrong = []
    for launch in launches:
        wrong += _one_launch(world, launch, rows, place)
    world.close()
    return wrong


def tuned(place: Rank, folder: str) -> tuple[str, str, float]:
    """Tune one of our launches, then again from the cache: choices, and seconds of the second."""
    faulthandler.dump_traceback_later(80, exit=True)
    torch.cuda.set_device(0)
    store = dist.FileStore(str(pathlib.Path(folder) / "store"), place.world)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world)
    group = dist.group.WORLD
    assert group is not None
    world = IpcWorld(Layout(place.world, 7168, 8), group, torch.device("cuda", 0))
    peer = Peer(ar.Launch(ar.Algorithm.TWO_SHOT, 4), world.workspace, max_blocks=16)
    calls = [Call(3, 7168)]
    cache = pathlib.Path(folder) / "table.json"
    first = tune([peer], calls, group, key="key", cache=cache)
    start = time.monotonic()
    second = tune([peer], calls, group, key="key", cache=cache)
    seconds = time.monotonic() - start
    world.close()
    assert first == second and first.rows[0].time_us is not None
    return first.rows[0].contender, second.rows[0].contender, seconds


def _one_launch(world: IpcWorld, launch: ar.Launch, rows: int, place: Rank) -> list[str]:
    layout, workspace = world.workspace.layout, world.workspace
    x, residual = (torch.empty(rows, layout.hidden, device="cuda").bfloat16() for _ in range(2))
    weight = torch.ones(layout.hidden, device="cuda").bfloat16()
    tensors = ar.Tensors(x, torch.empty_like(x), residual, weight, torch.empty_like(x))

    def call(**options: int) -> None:
        ar.run(launch, workspace, tensors, eps=reference.EPS, max_blocks=16, **options)

    call(rows=0)
    torch.cuda.synchronize()
    place.barrier.wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            call()
    wrong = []
    for round_ in range(6):
        inputs = reference.real_inputs(layout.world, rows, layout.hidden, x.dtype, round_)
        old = torch.randn(rows, layout.hidden, generator=torch.Generator().manual_seed(round_))
        x.copy_(inputs[workspace.rank])
        residual.copy_(old)
        torch.cuda.synchronize()
        place.barrier.wait()
        if round_ < 3:
            call()
        else:
            graph.replay()
        torch.cuda.synchronize()
        workspace.check()
        wanted = reference.new_residual(reference.total(inputs), old.bfloat16())
        if not reference.same_bits(tensors.residual_out.cpu(), wanted):
            text = reference.first_difference(tensors.residual_out.cpu(), wanted)
            wrong.append(f"{launch.name}, round {round_}: {text}")
    return wrong
