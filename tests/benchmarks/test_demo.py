"""What `benchmarks/demo.py` makes of the summaries of its runs."""

from benchmarks.demo import figures


def test_the_figures_of_the_demo_have_one_number_for_each_seed():
    def summary(before, after, low):
        ends = [{"mean": mean, "low95": low, "high95": 1.0, "episodes": 768} for mean in (before, after)]
        pay = {"a": {"credits": 9, "role": "honest"}, "b": {"credits": 0, "role": "cheating"}}
        return {"heldout": dict(zip(("before", "after"), ends, strict=True)), "credits": pay, "wall_s": 224.4,
                "cpu_s": {"trainer": 117.0, "worker": 91.2}}  # fmt: skip

    found = figures([summary(0.276, 0.733, 0.701), summary(0.301, 0.759, 0.728)])
    assert found["wins_before"] == [0.276, 0.301] and found["wins_after"] == [0.733, 0.759]
    assert (found["games"], found["wins_after_lowest95"], found["credits_of_cheats"]) == (768, 0.701, 0)
    assert found["cpu_s"] == [208, 208]
