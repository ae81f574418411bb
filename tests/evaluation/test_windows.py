"""Laws of the window protocols."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from hf_posenc.evaluation.windows import Window, fixed_target, hf_docs, longlora, nonoverlapping, rolling, sliding


def test_sliding_example() -> None:
    assert [window[:3] for window in sliding(10, 4, 2)] == [(0, 4, 4), (2, 6, 2), (4, 8, 2), (6, 10, 2)]


def test_nonoverlapping_example_scores_the_tail() -> None:
    assert [window[:3] for window in nonoverlapping(10, 4)] == [(0, 4, 4), (4, 8, 4), (8, 10, 2)]


def _scored(windows: list[Window]) -> list[int]:
    return [target for window in windows for target in range(window.end - window.scored, window.end)]


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
    assert list(nonoverlapping(7, 100)) == list(sliding(7, 100, 3)) == [(0, 7, 7, 7)]


def test_rolling_moves_the_last_window_back() -> None:
    assert [window[:3] for window in rolling(10, 4)] == [(0, 4, 4), (4, 8, 4), (6, 10, 2)]
    assert list(rolling(3, 4)) == [(0, 3, 3, 3)]


@given(st.integers(1, 300), st.integers(1, 64))
def test_rolling_scores_every_target_once_in_full_windows(n: int, length: int) -> None:
    windows = list(rolling(n, length))
    assert _scored(windows) == list(range(n))
    assert {window.end - window.begin for window in windows} == {min(n, length)}


@given(st.integers(1, 300), st.integers(2, 64), st.data())
def test_the_guide_scores_every_target_once_where_windows_overlap(n: int, length: int, data: st.DataObject) -> None:
    """Without overlap the first token of each window after the first has nothing before it and is lost."""
    stride = data.draw(st.integers(1, length))
    lost = {index - 1 for index in range(stride, n + 1, stride)} if stride == length else set()
    windows = list(hf_docs(n, length, stride))
    assert _scored(windows) == [target for target in range(n) if target not in lost]
    assert all(window.weight in (window.scored, window.scored - 1) for window in windows)


def test_longlora_scores_all_of_every_window_but_the_last_that_fits() -> None:
    assert list(longlora(20, 8, 4)) == [(0, 7, 7, 7), (4, 11, 7, 7), (8, 15, 7, 7)]  # 21 tokens; 12 fits and is dropped
    assert list(longlora(8, 8, 4)) == []


@given(st.integers(1, 300), st.integers(1, 32), st.lists(st.integers(32, 300), min_size=2, max_size=5))
def test_a_fixed_target_is_the_same_under_every_length_that_fits(n: int, stride: int, lengths: list[int]) -> None:
    windows = [next(fixed_target(n, length, stride)) for length in sorted(lengths)]
    assert {(window.end, window.scored) for window in windows} == {(n, min(stride, n))}
    assert all(left.begin >= right.begin for left, right in pairwise(windows))
