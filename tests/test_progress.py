"""Progress of slow loops."""

from mechinterp.progress import progress, show_progress


def test_a_loop_inside_a_shown_loop_is_not_shown():
    shown = []

    def noted(items, text):
        shown.append(text)
        yield from items

    with show_progress(noted):
        assert [n for n in progress([1, 2], "outer") for _ in progress([3], "inner")] == [1, 2]
        assert list(progress([4], "next")) == [4]
    assert list(progress([5], "after")) == [5]
    assert shown == ["outer", "next"]
