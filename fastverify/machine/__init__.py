"""Facts about the machine: reading, recording, loading, classifying."""

from __future__ import annotations

from fastverify.machine.facts import Gpu, Machine, NumaNode
from fastverify.machine.finding import Finding
from fastverify.machine.probe import read_machine
from fastverify.machine.store import dump_machine, load_machine
from fastverify.machine.topology import Kind, Topology, classify

__all__ = [
    "Finding",
    "Gpu",
    "Kind",
    "Machine",
    "NumaNode",
    "Topology",
    "classify",
    "dump_machine",
    "load_machine",
    "read_machine",
]
