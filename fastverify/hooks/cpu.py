"""What must be changed in a process that runs EAGLE-3 on a CPU without AMX."""

from __future__ import annotations

import torch


def install() -> None:
    """Make SGLang's CPU path hold for EAGLE-3; call once, after `sglang` has been imported.

    `--attention-backend intel_amx` must stand without AMX: SGLang would fall back to
    `torch_native`, which has no draft backend and cannot prefill MLA. The layers ask the processor
    itself and keep their plain torch forward.
    """
    from sglang.srt.runtime_context import override_platform

    override_platform(has_amx=True).install()
    if not torch.cuda.is_available():
        # The latent drafter class waits for CUDA after sharing the embedding, on any device.
        torch.cuda.synchronize = _nothing_to_wait_for


def _nothing_to_wait_for(device: object = None) -> None:
    return None
