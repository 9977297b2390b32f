"""Whether RL goes beyond its teacher: recipes/stones.toml beside three ways to imitate, five seeds.

    python benchmarks/beyond.py [--seeds 1,2,3,4,5] [--keep FOLDER] [--picture FILE] [--quick]
    python benchmarks/beyond.py --exact

In the game `examples/environments/stones` the opponent plays half of its turns without fault. The teacher sees only wins in
one move; otherwise it is cautious, and so seldom makes the move that wins. Four sides:

- teacher: the scripted player itself;
- imitation: recipes/stones-start.toml, then more of the teacher's games, as many as RL plays;
- wins: the same, but of these games it imitates only those that the teacher won (rejection sampling);
- rl: the same start, then recipes/stones.toml, by recipes/one_file.py, in this process and without staleness. All games
  count, also those of groups without signal.

Sides have the same tokenizer, size and first weights. Each plays the same held-out tasks, whose starts training never
shows, at several temperatures, and its best one counts, chosen on these very games. RL's margin is over the best of the
other three. `larger` has games from 61 to 99 stones at that temperature. `exact` has what can be computed without a model:
win rates of the teacher, of perfect play, and of players that know the teacher's moves in infinitely many wins, at the same
temperatures; `--exact` prints these alone. `heldout_curve` and the picture have the win rate from held-out starts at
temperature 1 after every tenth step, computed from the policy's probabilities. The last line is JSON; lists have a number a
seed. The exit code is 1 if a bar is missed.
"""

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import torch

from benchmarks import stones
from benchmarks.measure import ROOT, arguments, numbers, report
from recipes import one_file
from shoal.chat.renderer import Renderer
from shoal.config import SftConfig, load_run, load_sft, sampling_of
from shoal.engine.native import LocalEngine
from shoal.env import Env
from shoal.envs.evaluate import evaluate
from shoal.envs.load import load_env
from shoal.envs.play_episodes import play_scripted
from shoal.jobs import sft
from shoal.models.checkpoint import load_policy, save_policy
from shoal.protocol.messages import Sampling
from shoal.train.sft import fine_tune

RECIPES = ROOT / "recipes"
GREEDY = 0.02
"""Temperature at which the likeliest token is drawn unless another is almost as likely."""
TEMPERATURES = (1.0, 0.7, 0.4, GREEDY)
EPISODES = 768
"""Held-out games of each side at each temperature."""
IMITATION_BATCH = 256
"""Turns in a step of a side that goes on imitating. It learns from each turn of all of its games once."""
EVERY = 10
"""Steps between two values of the held-out curve."""
SIDES = ("teacher", "imitation", "wins", "rl")
BAR = 0.10
"""RL's margin over the best of the other sides, of the worst seed."""


def main() -> int:
    """Measure all seeds, print their win rates, and all figures as JSON at the end."""
    parser = arguments(__doc__, "few steps of one seed: proves only that it runs")
    parser.add_argument("--seeds", type=numbers, default=[1, 2, 3, 4, 5])
    parser.add_argument("--keep", type=Path, help="a folder for each seed's figures: those there are not measured")
    parser.add_argument("--picture", type=Path, help="an SVG file for the curves")
    parser.add_argument("--exact", action="store_true", help="only what needs no model, in words")
    asked = parser.parse_args()
    without_model = stones.exact(game(), TEMPERATURES)
    if asked.exact:
        print(in_words(without_model))
        return 0
    seeds = asked.seeds[: 1 if asked.quick else None]
    torch.set_num_threads(1)
    found = []
    for seed in seeds:
        kept = asked.keep / f"{seed}.json" if asked.keep else None
        if kept and kept.exists():
            found.append(json.loads(kept.read_text()))
        else:
            found.append(measured(seed, asked.quick))
            if kept:
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(json.dumps(found[-1]))
        wins = ", ".join(f"{side} {best(found[-1][side]):.1%}" for side in SIDES)
        print(f"seed {seed}: {wins} in {found[-1]['wall_s']:.0f} s", flush=True)
    figures = figures_of(found)
    if asked.picture:
        draw(asked.picture, figures["heldout_curve"], without_model)
    report("beyond", {"seeds": seeds, **figures, "exact": without_model})
    return 0 if asked.quick or figures["margin_worst"] >= BAR else 1


def game(**args: Any) -> Any:
    """The environment of the recipe, with other arguments where some are given."""
    spec = load_run(RECIPES / "stones.toml").envs[0]
    return load_env(str(RECIPES / spec.name), dict(spec.args) | args)


def in_words(exact: Mapping[str, Any]) -> str:
    """What a win rate on the held-out starts is to be compared with."""
    rows = {
        "its teacher": exact["teacher"],
        "imitation of infinitely many of the teacher's games": best(exact["imitation"]),
        "imitation of infinitely many of the teacher's wins": best(exact["wins"]),
        "perfect play": exact["perfect"],
    }
    lines = [f"  {rate:6.1%}  {name}" for name, rate in rows.items()]
    return "\n".join(["Wins from the same held-out starts, calculated, each at its best temperature:", *lines])


def draw(path: Path, by_seed: Mapping[str, Sequence[float]], exact: Mapping[str, Any]) -> None:
    """Win rates over the steps of RL, and the limits of the other sides."""
    import matplotlib.pyplot as plt

    chart, axes = plt.subplots(figsize=(7.6, 4.2))
    for name, rates in by_seed.items():
        axes.plot([EVERY * i for i in range(len(rates))], rates, label=f"RL, {name.replace('_', ' ')}")
    limits = {"teacher": exact["teacher"], "imitation of wins": best(exact["wins"]), "perfect play": exact["perfect"]}
    for name, limit in limits.items():
        axes.axhline(limit, color="grey", linewidth=1)
        axes.text(0, limit, name, fontsize=8, va="bottom")
    axes.set(title="Held-out starts, temperature 1", xlabel="step", ylabel="win rate")
    axes.legend(fontsize=8)
    chart.savefig(path)


def figures_of(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Win rates, margins and costs of all seeds."""
    wins = {side: [round(best(one[side]), 4) for one in found] for side in SIDES}
    rivals = [max(best(one[side]) for side in SIDES[:-1]) for one in found]
    margins = [round(best(one["rl"]) - rival, 4) for one, rival in zip(found, rivals, strict=True)]
    over_plain = [round(best(one["rl"]) - max(best(one[side]) for side in SIDES[:2]), 4) for one in found]
    return {
        "episodes": found[0]["episodes"],
        "win_rates": wins,
        "win_rate_of_rl_worst": min(wins["rl"]),
        "margins": margins,
        "margin_worst": min(margins),
        "margins_over_plain_imitation": over_plain,
        "margin_over_plain_imitation_worst": min(over_plain),
        "by_temperature": {
            side: {T: round(statistics.fmean(one[side][T] for one in found), 4) for T in found[0][side]} for side in SIDES
        },
        "larger": {side: [round(one["larger"][side], 4) for one in found] for side in SIDES[1:]},
        "games": [one["games"] for one in found],
        "games_won_by_the_teacher": [one["games_won"] for one in found],
        "heldout_curve": {f"seed_{one['seed']}": one["heldout_curve"] for one in found},
        "wall_s": [round(one["wall_s"]) for one in found],
        "wall_s_of_rl": [round(one["wall_s_of_rl"]) for one in found],
        "cpu_s_of_rl": [round(one["cpu_s_of_rl"]) for one in found],
    }  # fmt: skip


def best(by_temperature: Mapping[str, float]) -> float:
    """The win rate at the best temperature."""
    return max(by_temperature.values())


def measured(seed: int, quick: bool) -> dict[str, Any]:
    """All sides of a seed: win rates by temperature, and what it took."""
    began = time.monotonic()
    overrides = [f"seed={seed}", *(["steps=200"] if quick else [])]
    recipe = load_sft(RECIPES / "stones-start.toml", overrides)
    env, episodes = game(), 32 if quick else EPISODES
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        start = place / "start"
        sft.main(RECIPES / "stones-start.toml", start, overrides)
        settings = [f"seed={seed}", f"policy.path={start}", *(["steps=10"] if quick else [])]
        learned = run_here(settings, place / "rl")
        sampling = sampling_of(load_run(RECIPES / "stones.toml", settings))
        renderer = Renderer.from_directory(start)
        played = teacher_games(env, renderer, learned["games"], seed, sampling)
        won = [rows for rows, success in played if success]
        imitate([rows for rows, _ in played], recipe, start, place / "imitation")
        imitate(won, recipe, start, place / "wins")
        policies = {"imitation": place / "imitation", "wins": place / "wins", "rl": learned.pop("policy")}
        rates = {"teacher": {"1.0": teacher_rate(env, renderer, episodes, sampling, seed)}}
        rates |= {side: win_rates(policy, env, sampling, episodes) for side, policy in policies.items()}
        larger = {
            side: win_rates(policy, game(least=60, most=99), sampling, episodes, best_of(rates[side]))
            for side, policy in policies.items()
        }
    return {
        "seed": seed, **rates, "larger": {side: best(found) for side, found in larger.items()}, "episodes": episodes,
        "games_won": len(won), **learned, "wall_s": time.monotonic() - began,
    }  # fmt: skip


def run_here(settings: list[str], out: Path) -> dict[str, Any]:
    """All steps of RL in this process: the policy, the number of games, and what it took."""
    config = load_run(RECIPES / "stones.toml", [*settings, "rollouts.max_staleness=0", "verify.audit_rate=1.0"])
    judged, games, env = one_file.recomputed, list[list[float]]([[]]), game()
    heldout_curve, measuring_s = [heldout_rate(env, Path(config.policy.path))], 0.0
    began, cpu_before = time.monotonic(), time.process_time()

    def noting(*how: Any) -> Any:
        found = judged(*how)
        games[-1].extend(found[0])  # the rewards
        return found

    def after_step(line: str) -> None:
        nonlocal measuring_s
        if len(games) % EVERY == 0:
            before_s = time.process_time()
            heldout_curve.append(heldout_rate(env, out / "published"))
            measuring_s += time.process_time() - before_s
        games.append([])

    with patch.object(one_file, "recomputed", noting):
        one_file.train(config, out, RECIPES, after_step)
    return {
        "policy": out / "published", "games": sum(map(len, games)), "heldout_curve": heldout_curve,
        "wall_s_of_rl": time.monotonic() - began - measuring_s,
        "cpu_s_of_rl": time.process_time() - cpu_before - measuring_s,
    }  # fmt: skip


def heldout_rate(env: Any, policy: Path) -> float:
    """A policy's win rate from held-out starts at temperature 1, by its probabilities."""
    model, renderer = load_policy(policy, torch.float32), Renderer.from_directory(policy)
    return stones.rate(env, stones.learned(env, model, renderer))


Example = tuple[list[int], list[int]]
"""Token ids and authors of a turn."""


def teacher_games(
    env: Any, renderer: Renderer, count: int, seed: int, sampling: Sampling
) -> list[tuple[list[Example], bool]]:
    """Games that the teacher plays on training tasks, and whether it won them."""
    player, rng = env.players()["teacher"], random.Random(f"more games {seed}")
    played = []
    for _ in range(count):
        talk = play_scripted(env, renderer, env.task(rng.randrange(env.num_tasks)), player, rng, sampling)
        played.append(([(list(row.tokens), list(row.author)) for row in talk.rows], bool(env.success(talk.state))))
    return played


def imitate(games: Sequence[Sequence[Example]], recipe: SftConfig, start: Path, out: Path) -> None:
    """Go on with the start's recipe, on other games."""
    model, turns = load_policy(start, torch.float32), [row for rows in games for row in rows]
    steps = -(-len(turns) // IMITATION_BATCH)
    fine_tune(model, turns, msgspec.structs.replace(recipe, steps=steps, batch=IMITATION_BATCH))
    save_policy(model, out, recipe.publish_dtype, tokenizer_from=start)


def win_rates(
    policy: Path, env: Env, sampling: Sampling, episodes: int, temperatures: Sequence[float] = TEMPERATURES
) -> dict[str, float]:
    """By temperature, on held-out tasks."""
    engine, renderer = LocalEngine(threads=1), Renderer.from_directory(policy)
    engine.load(policy, 0)
    rates = {}
    for temperature in temperatures:
        drawn = msgspec.structs.replace(sampling, temperature=temperature)
        rates[str(temperature)] = evaluate(engine, renderer, env, episodes, 0, drawn, 0).mean
    return rates


def best_of(by_temperature: Mapping[str, float]) -> tuple[float]:
    """The best temperature."""
    return (float(max(by_temperature, key=lambda temperature: by_temperature[temperature])),)


def teacher_rate(env: Any, renderer: Renderer, episodes: int, sampling: Sampling, seed: int) -> float:
    """The teacher's win rate on the same tasks."""
    player, rng = env.players()["teacher"], random.Random(f"held-out games {seed}")
    tasks = [env.task(index % env.num_heldout, heldout=True) for index in range(episodes)]
    talks = [play_scripted(env, renderer, task, player, rng, sampling) for task in tasks]
    return statistics.fmean(bool(env.success(talk.state)) for talk in talks)


if __name__ == "__main__":
    sys.exit(main())
