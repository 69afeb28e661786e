"""CUDA graphs: captures of this thread and of others.

No binary is loaded inside a capture. Drivers before CUDA 12.3 refuse it ("operation not permitted
when stream is capturing"), and a refusal spoils the whole graph. So a capture uses only binaries
that are loaded already.
"""

from __future__ import annotations

import ctypes

_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


def is_capturing(device_index: int) -> bool:
    """Return True if this thread's current stream of the device is being captured."""
    import torch

    with torch.cuda.device(device_index):
        return torch.cuda.is_current_stream_capturing()


def ignore_other_captures() -> None:
    """Let this thread load binaries while another thread captures a graph, from now on.

    torch captures in CUDA's "global" mode: an unsafe call of any thread, such as loading, spoils
    the graph, unless that thread has declared that it takes no part.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:  # no driver, no captures
        return
    cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))
