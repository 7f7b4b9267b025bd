"""Texts of the host: `lspci -vv`, the kernel log, and the driver's files in procfs."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from fastverify.errors import ConfigError
from fastverify.machine import host


class Bridge(msgspec.Struct, frozen=True):
    """One PCI bridge. redirects: ACS sends peer traffic up to the root; None when not readable."""

    address: str
    port: str
    redirects: bool | None


class KernelLog(msgspec.Struct, frozen=True):
    """What the kernel said about GPUs and PCIe since boot.

    xids: (code, how often). uncorrectable: AER status words. corrected: AER lines.
    dma_faults: lines in which the IOMMU refused a device's access. misaligned: (address,
    alignment) of a refused peer mapping.
    """

    xids: tuple[tuple[int, int], ...] = ()
    uncorrectable: tuple[int, ...] = ()
    corrected: int = 0
    link_down: int = 0
    dma_faults: int = 0
    misaligned: tuple[str, str] | None = None


_DEVICE = re.compile(
    r"^((?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) (.{0,200})", re.IGNORECASE
)
_ACS = re.compile(r"ACSCtl:\s*(\S.*)")
_PORT = re.compile(r"Express \(v\d\) (Root Port|Upstream Port|Downstream Port)")
_XID = re.compile(r"NVRM: Xid \([^)]{0,80}\): (\d{1,4})")
_UNCORRECTABLE = re.compile(r"aer_uncor_status: (0x[0-9a-fA-F]{1,8})")
_CORRECTED = re.compile(r"AER: .{0,40}Correct(?:ed|able) error|aer_cor_status: 0x0*[1-9a-f]")
_LINK_DOWN = re.compile(r"Surprise (?:Link )?Down|Link Down|fallen off the bus", re.IGNORECASE)
_DMA = re.compile(r"IO_PAGE_FAULT|DMAR: .{0,40}fault|DMA Write\] .{0,40}fault")
_MISALIGNED = re.compile(
    r"peer DMA address (0x[0-9a-fA-F]+) .{0,40}?not aligned (?:at|to) (0x[0-9a-fA-F]+)"
)
_KERNEL = re.compile(r"NVRM:|pcieport|\bAER:|aer_|DMAR|AMD-Vi|nvidia[-:]|Linux version|pci 0")
SURPRISE_DOWN = 0x20


def parse_lspci(text: str) -> tuple[Bridge, ...]:
    """The PCI bridges of `lspci -vv`. ConfigError without any device line.

    Without root lspci hides ACS: such bridges come back with redirects None.
    """
    bridges = []
    devices = list(_devices(text))
    if not devices:
        raise ConfigError("no PCI device is listed in this output of lspci; record it again.")
    for address, heading, body in devices:
        if "bridge" not in heading.lower():
            continue
        control, port = _ACS.search(body), _PORT.search(body)
        redirects = None
        if control is not None:
            redirects = "ReqRedir+" in control.group(1) or "CmpltRedir+" in control.group(1)
        elif port is not None and "access denied" not in body and "Capabilities: [1" in body:
            # Extended capabilities are shown and ACS is not among them.
            redirects = False
        full = address if address.count(":") == 2 else f"0000:{address}"
        bridges.append(Bridge(full.lower(), port.group(1) if port else "bridge", redirects))
    return tuple(bridges)


def _devices(text: str) -> Iterator[tuple[str, str, str]]:
    address, heading, body = "", "", []
    for line in text.split("\n"):
        found = _DEVICE.match(line)
        if found is None:
            body.append(line)
            continue
        if address:
            yield address, heading, "\n".join(body)
        address, heading, body = found.group(1), found.group(2), []
    if address:
        yield address, heading, "\n".join(body)


def parse_kernel_log(text: str) -> KernelLog | None:
    """Read `dmesg` or `journalctl -k`; None when no line looks like the kernel's."""
    if _KERNEL.search(text) is None:
        return None
    codes = [int(match.group(1)) for match in _XID.finditer(text)]
    aligned = _MISALIGNED.search(text)
    status = sorted({int(m.group(1), 16) for m in _UNCORRECTABLE.finditer(text)} - {0})
    return KernelLog(
        xids=tuple((code, codes.count(code)) for code in sorted(set(codes))),
        uncorrectable=tuple(status),
        corrected=len(_CORRECTED.findall(text)),
        link_down=len(_LINK_DOWN.findall(text)),
        dma_faults=len(_DMA.findall(text)),
        misaligned=(aligned.group(1), aligned.group(2)) if aligned else None,
    )


def parse_params(text: str) -> tuple[dict[str, str], bool | None]:
    """RegistryDwords and EnableResizableBar of the driver's params file (ConfigError)."""
    keys, bar = host.parse_params(text)
    if keys is None:
        raise ConfigError(
            "the driver's parameters hold no RegistryDwords line; record"
            " `cat /proc/driver/nvidia/params`, the module's sysfs node stays empty."
        )
    return keys, bar
