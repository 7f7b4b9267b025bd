"""Checks on NCCL graph files, which NCCL applies to every communicator of the process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from fastverify.errors import ConfigError
from fastverify.machine.finding import Finding

MAX_FILE_BYTES = 1 << 20
_LINK_TYPES = ("LOC", "NVL", "NVB", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")
_SOURCE = "R79"


def read_graph_file(path: str | Path) -> str:
    """The text of a graph file; ConfigError when it cannot be read, is binary or over 1 MiB."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"NCCL_GRAPH_FILE {path} cannot be read ({error.strerror}); name a readable file or "
            "unset the variable."
        ) from None
    if len(data) > MAX_FILE_BYTES or b"\0" in data:
        raise ConfigError(
            f"NCCL_GRAPH_FILE {path} is not an XML text of at most {MAX_FILE_BYTES >> 20} MiB; "
            "name a graph written by NCCL_GRAPH_DUMP_FILE or unset the variable."
        )
    return data.decode("utf-8", errors="replace")


def check_graph_file(
    text: str, group_sizes: Sequence[int], devices: Sequence[int] | None = None
) -> tuple[Finding, ...]:
    """What is wrong with a graph file for these communicator sizes; empty when it fits all.

    Groups of one rank need no graph. `devices` are the NVML indices of the GPUs in use; without
    them only counts are compared. A communicator smaller than the file ends in a system error,
    a larger one is not checked by NCCL and leaves ring entries unset.
    """
    graphs = _graphs(text)
    if isinstance(graphs, Finding):
        return (graphs,)
    findings = [found for graph in graphs for found in _check_graph(graph)]
    channels = [_devices(channel) for graph in graphs for channel in graph.findall("channel")]
    listed = [channel for channel in channels if channel is not None]
    for size in sorted({size for size in group_sizes if size > 1}):
        findings += _check_size(listed, size)
    if devices is not None:
        named = {
            int(gpu.get("dev", ""), 16)
            for graph in graphs
            for channel in graph.findall("channel")
            for gpu in channel.findall("gpu")
            if _devices(channel) is not None and "rank" not in gpu.attrib
        }
        missing = sorted(named - set(devices))
        if missing:
            found = ", ".join(str(dev) for dev in missing)
            findings.append(_fail("graph-file-device", f"names GPU {found}, which is not in use"))
    return tuple(findings)


def _graphs(text: str) -> list[ElementTree.Element] | Finding:
    """The graph elements, or what keeps NCCL from reading any."""
    # Entities are the only way for such a small text to grow, and NCCL knows none.
    if "<!" in text.replace("<!--", ""):
        return _fail("graph-file-xml", "declares a document type; write it again or unset it")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        return _fail("graph-file-xml", f"is not XML ({error}); write it again or unset it")
    if root.tag != "graphs":
        return _fail("graph-file-xml", f"starts with <{root.tag}> instead of <graphs>; unset it")
    if root.get("version") != "1":
        version = root.get("version")
        return _fail("graph-file-version", f"has version {version!r}, NCCL reads only 1")
    graphs = root.findall("graph")
    if not any(graph.findall("channel") for graph in graphs):
        return _fail("graph-file-empty", "has no channel; write it again or unset it")
    return graphs


def _check_graph(graph: ElementTree.Element) -> list[Finding]:
    name = graph.get("id", "?")
    findings = []
    for attribute in ("typeintra", "typeinter"):
        value = graph.get(attribute)
        if value is not None and value not in _LINK_TYPES:
            text = f"has {attribute} {value!r} in graph {name}, NCCL knows {', '.join(_LINK_TYPES)}"
            findings.append(_fail("graph-file-link", text))
    channels = graph.findall("channel")
    declared = graph.get("nchannels")
    if channels and declared != str(len(channels)):
        text = f"declares nchannels {declared} in graph {name} but lists {len(channels)}"
        findings.append(_fail("graph-file-channels", text))
    for channel in channels:
        devices = _devices(channel)
        if devices is None or len(set(devices)) < len(devices):
            text = f"has a channel in graph {name} whose GPUs are unreadable or repeated"
            findings.append(_fail("graph-file-channel", text))
    return findings


def _check_size(channels: Sequence[Sequence[int]], size: int) -> list[Finding]:
    wrong = sorted({len(channel) for channel in channels if len(channel) != size})
    if not wrong:
        return []
    listed = " and ".join(str(count) for count in wrong)
    text = f"lists {listed} GPUs in a channel but a group of {size} ranks will use it too"
    return [_fail("graph-file-size", f"{text}; unset it or keep one file per group size")]


def _devices(channel: ElementTree.Element) -> list[int] | None:
    # NCCL reads dev in base 16 and lets an explicit rank stand for it.
    try:
        return [
            int(gpu.get("rank", ""), 0) if "rank" in gpu.attrib else int(gpu.get("dev", ""), 16)
            for gpu in channel.findall("gpu")
        ]
    except ValueError:
        return None


def _fail(code: str, text: str) -> Finding:
    return Finding("fail", code, f"NCCL_GRAPH_FILE {text}.", _SOURCE)
