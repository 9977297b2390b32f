"""The queue of human ratings: shared, durable, killed at any point."""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.errors import ConfigError, StateError
from shoal.graders.human_ratings import HELD_S, Ratings


def test_an_item_is_rated_once_by_each_rater(tmp_path: Path) -> None:
    ratings = Ratings(tmp_path, raters_each=2)
    item = ratings.put("q", "a")
    assert ratings.put("q", "a") == item
    assert ratings.take("anna").id == item
    ratings.rate(item, "anna", 8)
    assert ratings.take("anna") is None
    assert not ratings.graded(item).decided
    assert ratings.take("bob").answer == "a"
    ratings.rate(item, "bob", 4)
    assert ratings.graded(item).score == pytest.approx(0.6)
    assert ratings.take("carol") is None


def test_an_item_that_a_rater_holds_goes_to_others_only_after_a_while(tmp_path: Path) -> None:
    now = [1000.0]
    ratings = Ratings(tmp_path, clock=lambda: now[0])
    first, second = ratings.put("q", "1"), ratings.put("q", "2")
    assert ratings.take("anna").id == first
    assert ratings.take("anna").id == first
    assert ratings.take("bob").id == second
    assert ratings.take("carol") is None
    now[0] += HELD_S
    assert ratings.take("carol").id == first


@pytest.mark.parametrize("score", [-1, 11, True, 5.0, "5"])
def test_a_rating_is_a_whole_number_on_the_scale(tmp_path: Path, score: object) -> None:
    ratings = Ratings(tmp_path)
    with pytest.raises(ConfigError, match="whole number"):
        ratings.rate(ratings.put("q", "a"), "anna", score)  # type: ignore[arg-type]


def test_an_unknown_item_and_a_nameless_rater_are_refused(tmp_path: Path) -> None:
    ratings = Ratings(tmp_path)
    with pytest.raises(ConfigError, match="no item"):
        ratings.rate("x", "anna", 5)
    with pytest.raises(ConfigError, match="name of its rater"):
        ratings.rate(ratings.put("q", "a"), " ", 5)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "ratings.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(StateError, match="cannot be opened"):
        Ratings(tmp_path)


def test_agreement_between_raters_is_their_kappa(tmp_path: Path) -> None:
    ratings = Ratings(tmp_path, raters_each=2)
    for n, (anna, bob) in enumerate([(9, 8), (1, 2), (10, 0), (0, 9)]):
        item = ratings.put("q", str(n))
        ratings.rate(item, "anna", anna)
        ratings.rate(item, "bob", bob)
    assert ratings.standing() == (4, 4, 8, 0.0)


WRITER = """
    import sys
    from pathlib import Path
    from shoal.graders.human_ratings import Ratings
    ratings = Ratings(Path(sys.argv[1]))
    for n in range(100_000):
        item = ratings.put("q", str(n))
        ratings.rate(item, "anna", n % 11)
        print(item, n % 11, flush=True)
"""


def test_a_kill_at_any_point_loses_no_rating_that_was_kept(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        kept = [process.stdout.readline().split() for _ in range(20)]
        process.send_signal(signal.SIGKILL)
        kept += [line.split() for line in process.stdout.read().splitlines() if len(line.split()) == 2]
    ratings = Ratings(tmp_path)
    assert [ratings.graded(item).score for item, _ in kept] == [int(score) / 10 for _, score in kept]


def test_people_rate_in_the_terminal(tmp_path: Path, monkeypatch, capsys) -> None:
    ratings = Ratings(tmp_path)
    items = [ratings.put("Which city?", f"Paris {n}\x1b[2J") for n in range(3)]
    typed = iter(["eleven", "11", "7", "q"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    assert main(["env", "rate", str(tmp_path), "--name", "anna"]) in (0, None)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "1 of 3 answers are rated, with 1 ratings" in shown
    assert ratings.graded(items[0]).score == pytest.approx(0.7)
    assert not ratings.graded(items[1]).decided
