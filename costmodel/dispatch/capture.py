"""CUDA graphs: whether one is being captured, and how a thread keeps out of another's way.

Inside a capture no binary is loaded. Drivers before CUDA 12.3 refuse to, in torch's mode of capture
("operation not permitted when stream is capturing"); later ones allow it. A refusal cannot be
undone: it spoils the whole graph. So what is not loaded yet is not used there.
"""

from __future__ import annotations

import ctypes

__all__ = ["ignore_other_captures", "is_capturing"]

_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


def is_capturing(device_index: int) -> bool:
    """Whether this thread's current stream of the device is being captured."""
    import torch

    with torch.cuda.device(device_index):
        return torch.cuda.is_current_stream_capturing()


def ignore_other_captures() -> None:
    """Let this thread load binaries while another one captures a graph, from now on.

    torch captures in CUDA's "global" mode, in which a call of any thread that is not safe inside a
    capture, as loading, spoils the graph; unless that thread says that it has no part in it.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:  # no driver, no captures
        return
    cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))
