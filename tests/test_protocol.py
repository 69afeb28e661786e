"""How many launches a replay has: from a few of what is long to a cap of what is short."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from costmodel.runner.protocol import TimingProtocol

PROTOCOL = TimingProtocol()


@given(st.floats(0.5, 1e5), st.floats(0.5, 1e5))
def test_what_takes_longer_is_launched_no_more_often(one_us: float, other_us: float) -> None:
    short, long = sorted((one_us, other_us))
    assert PROTOCOL.launches(short) >= PROTOCOL.launches(long)


@given(st.floats(0.5, 1e5))
def test_a_replay_is_about_as_long_as_asked_for(about_us: float) -> None:
    launches = PROTOCOL.launches(about_us)
    assert 1 <= launches <= PROTOCOL.max_launches
    if 10 < about_us < PROTOCOL.replay_us / 2:
        assert 0.7 < launches * about_us / PROTOCOL.replay_us < 1.5
    # One launch alone would bear all of what starting a replay costs.
    assert (launches == 1) == (about_us >= 4 * PROTOCOL.replay_us)


def test_one_launch_is_what_a_cap_of_one_gives() -> None:
    assert TimingProtocol(max_launches=1).launches(3.0) == 1
