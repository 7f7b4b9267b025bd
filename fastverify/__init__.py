"""fastverify: EAGLE-3 verification on PCIe-only GPUs, as an overlay on SGLang."""

__version__ = "0.1.0"
