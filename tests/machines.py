"""Recorded machines for tests, and random ones."""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st

from fastverify.machine import Gpu, Machine, NumaNode, load_machine

FOLDER = Path(__file__).parent / "data" / "machines"
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def machine(name: str) -> Machine:
    return load_machine(FOLDER / f"{name}.json")


_MODELS = (
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0)),
    ("NVIDIA H200", (9, 0)),
    ("NVIDIA GeForce RTX 3090", (8, 6)),
    ("unreadable GPU", None),
)


def _matrix(draw: st.DrawFn, count: int, cells: list[str], symmetric: bool):
    rows = [["X"] * count for _ in range(count)]
    for i in range(count):
        for j in range(i):
            rows[i][j] = draw(st.sampled_from(cells))
            rows[j][i] = rows[i][j] if symmetric else draw(st.sampled_from(cells))
    return tuple(tuple(row) for row in rows)


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """Machines of every shape, most of which nobody has ever built."""
    count = draw(st.integers(0, 9))
    gpus = []
    for index in range(count):
        name, capability = draw(st.sampled_from(_MODELS))
        gpus.append(
            Gpu(
                index=index,
                name=name,
                compute_capability=capability,
                numa_node=draw(st.none() | st.integers(0, 3)),
                iommu_type=draw(st.sampled_from((None, "none", "identity", "DMA", "DMA-FQ"))),
            )
        )
    links = ["NV4", "NV18", "PIX", "PXB", "PHB", "NODE", "SYS", "?"]
    codes = draw(st.lists(st.sampled_from(links), min_size=1, max_size=3))
    granted = draw(st.sampled_from((["OK"], ["OK", "CNS", "U"])))
    known, peers = draw(st.booleans()), draw(st.booleans())
    return Machine(
        gpus=tuple(gpus),
        installed=count + draw(st.integers(0, 2)),
        links=_matrix(draw, count, codes, True) if known else (),
        p2p_read=_matrix(draw, count, granted, False) if peers else (),
        p2p_write=_matrix(draw, count, granted, False) if peers else (),
        numa_nodes=tuple(
            NumaNode(i, f"{i}", draw(st.none() | st.integers(0, 1))) for i in range(2)
        ),
        cpu_vendor=draw(st.sampled_from((None, "AMD", "Intel", "GenuineFuture"))),
        cpu_sockets=draw(st.none() | st.integers(1, 4)),
        registry_dwords=draw(st.sampled_from((None, {}, {"ForceP2P": "0x11"}, {"ForceP2P": "x"}))),
        kernel_cmdline=draw(st.sampled_from((None, (), ("iommu=pt",)))),
        virtualisation=draw(st.sampled_from(("none", "vm", "wsl", "container", "unknown"))),
        infiniband_devices=draw(st.none() | st.integers(0, 2)),
        nccl_version=draw(st.sampled_from((None, "2.25.1", "2.26.2", "2.30.7", "nonsense"))),
        cuda_driver_version=draw(st.sampled_from((None, "12.2", "13.0"))),
        shm_bytes=draw(st.none() | st.integers(0, 1 << 34)),
    )
