"""Laws of the window protocols."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_posenc.errors import ConfigError, UnknownNameError
from hf_posenc.evaluation.windows import check_protocol, nonoverlapping, sliding


def test_sliding_example() -> None:
    assert list(sliding(10, 4, 2)) == [(0, 4, 4), (2, 6, 2), (4, 8, 2), (6, 10, 2)]


def test_nonoverlapping_example_scores_the_tail() -> None:
    assert list(nonoverlapping(10, 4)) == [(0, 4, 4), (4, 8, 4), (8, 10, 2)]


@given(st.integers(0, 300), st.integers(1, 64), st.data())
def test_every_target_is_scored_exactly_once_with_enough_context(n: int, length: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, length))
    scored: list[int] = []
    for index, window in enumerate(sliding(n, length, stride)):
        assert 0 <= window.begin < window.end <= n
        assert window.end - window.begin <= length
        first = window.end - window.scored
        if index:
            assert first - window.begin == length - stride  # context of the first scored target, itself not counted
        scored.extend(range(first, window.end))
    assert scored == list(range(n))


@given(st.integers(0, 300), st.integers(1, 64))
def test_stride_equal_to_length_is_nonoverlapping(n: int, length: int) -> None:
    assert list(sliding(n, length, length)) == list(nonoverlapping(n, length))


def test_a_length_beyond_the_document_is_one_window() -> None:
    assert list(nonoverlapping(7, 100)) == list(sliding(7, 100, 3)) == [(0, 7, 7)]


@pytest.mark.parametrize("stride", [0, -1, 9, True, 2.0])
def test_strides_that_skip_targets_are_refused(stride: int) -> None:
    with pytest.raises(ConfigError, match="from 1 to the shortest length, 8"):
        check_protocol("sliding", stride, [8, 16])


def test_protocol_errors_name_the_remedy() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'sliding'"):
        check_protocol("slidding", 1, [8])
    with pytest.raises(ConfigError, match="needs stride="):
        check_protocol("sliding", None, [8])
    with pytest.raises(ConfigError, match="means nothing"):
        check_protocol("nonoverlapping", 4, [8])
