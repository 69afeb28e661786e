"""A kept launch, without a GPU: what the device would be given, in what order."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from costmodel import prepared
from costmodel.prepared import TritonLaunch


def test_no_threads_copies_come_between_anothers_and_its_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On one stream all copies have one place: what is queued last before a product is read."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(prepared, "_workspace", lambda index, stream: None)
    queued: list[tuple[str, int]] = []

    def copy(a: torch.Tensor, b: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        queued.append(("copies", threading.get_ident()))
        time.sleep(0.002)
        return a, b

    def product(*_: object) -> None:
        queued.append(("product", threading.get_ident()))

    launch = object.__new__(TritonLaunch)
    launch.__dict__.update(
        _index=0, _plan=SimpleNamespace(workspace_bytes=0, blocks=1), _repack=copy, _direct=product
    )
    x = torch.zeros(1, 1)
    threads = [
        threading.Thread(target=lambda: [launch._launch(x, x, x, None) for _ in range(10)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(queued) == 80
    for before, after in zip(queued[::2], queued[1::2], strict=True):
        assert before == ("copies", after[1])
        assert after[0] == "product"
