"""What holds on the recording thread holds on no other, and ends with the recording."""

from __future__ import annotations

import threading

import pytest
import torch

from nimble_core.tracing.recording_contexts import announced


@pytest.mark.parametrize("capturing", [True, False])
def test_a_capture_is_announced_or_denied_on_this_thread_only(capturing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: not capturing)
    seen: list[bool] = []

    def ask() -> None:
        seen.append(torch.cuda.is_current_stream_capturing())

    with announced(capturing):
        ask()
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    ask()
    assert seen == [capturing, not capturing, not capturing]
