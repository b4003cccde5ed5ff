"""Time to quality: samples and seconds until the validation loss is that of the tutorial's recipe at its end.

python -m benchmarks.time_to_quality

The study `time_to_quality` in benchmarks/studies.yaml has the recipes. They train on the boxes of `make demo`, in turn
with one seed after the other. The goal is the mean, over seeds, of the first recipe's final losses. As in MLPerf, a
training reaches it at the first validation that is as good. A schedule is part of a recipe: it is chosen in advance,
and no training run ends early. The first recipe counts with its whole run.

Seconds are those of the epochs' steps with their data, from the first one. Start, compilation, validations and
checkpoints do not count. Runs are kept in --runs: an interrupted study resumes with the missing ones. Remove them
after a change of the machine or the speed. A table, a plot and all curves go to --output. Spreads are standard
deviations over seeds; shares are relative to the first recipe with the same seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import common
from benchmarks.convergence import (
    STUDIES,
    add_options,
    draw_curves,
    reach,
    run_missing,
    spread,
    summarize,
    training_runs_of,
)
from utils.cli import positive, read_changes
from utils.errors import one_line_errors

NAME = "time_to_quality"
MEASURED = ("samples", "seconds")


def without_pauses(result: Mapping[str, Any]) -> dict[str, Any]:
    """A run's result with the seconds of its steps alone."""
    curve = [{**point, "seconds": point["training seconds"]} for point in result["curve"]]
    return {**result, "curve": curve, "seconds": curve[-1]["seconds"]}


def to_goal(
    results: Sequence[Mapping[str, Any]], reference: Sequence[Mapping[str, Any]], measure: str, goal: float
) -> dict[str, Any]:
    """Samples and seconds of each run to the goal, and as a share of the reference's whole run.

    Without them if a run does not reach the goal: a mean over the others would be too good.
    """
    whole = [result["curve"][-1] for result in reference]
    if results is reference:
        found: list[Any] = whole
    else:
        curves = [[{**point, "mean": point[measure]} for point in result["curve"]] for result in results]
        found = [reach(curve, goal, rises=False) for curve in curves]
    reached = [point for point in found if point is not None]
    summary: dict[str, Any] = {"reached": len(reached)}
    if len(reached) == len(results):
        for key in MEASURED:
            summary[key] = spread([point[key] for point in reached])
            shares = [point[key] / full[key] for point, full in zip(reached, whole, strict=True)]
            summary[f"share of {key}"] = spread(shares)
    return summary


def shown(values: Mapping[str, Any] | None, form: str, factor: float = 1) -> str:
    return "" if values is None else common.plus_minus(values, form, factor)


def result_table(recipes: Sequence[Mapping[str, Any]], measure: str, label: str) -> str:
    """A row per recipe."""
    heads = [
        "recipe",
        "batch",
        "steps",
        f"{label} at the end",
        "reach the goal",
        "samples to the goal",
        "% of the first",
    ]
    heads += ["seconds to the goal", "% of the first"]
    rows = []
    for recipe in recipes:
        goal = recipe["to the goal"]
        cells = [recipe["name"], recipe["global batch"], recipe["steps"], shown(recipe[measure], ".5f")]
        cells.append(f"{goal['reached']} of {len(recipe['seeds'])}")
        for key in MEASURED:
            cells += [shown(goal.get(key), ",.1f" if key == "seconds" else ",.0f")]
            cells += [shown(goal.get(f"share of {key}"), ".1f", 100)]
        rows.append(cells)
    return common.table(heads, rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.Parser(__doc__)
    parser.add_argument("--seeds", type=positive, default=5, help="training runs of each recipe (%(default)s)")
    add_options(parser, NAME)
    options = parser.parse_args(argv)
    study = STUDIES[NAME]
    training_runs = training_runs_of(NAME, options.seeds, options.runs, read_changes(options.changes))
    run_missing(training_runs, options.limit)
    recipes: list[dict[str, Any]] = []
    reference: list[dict[str, Any]] = []
    for condition in study.conditions:
        own = [training for training in training_runs if training.condition is condition]
        results = [without_pauses(training.result()) for training in own]
        reference = reference or results
        recipes.append(summarize(study, condition, own[0].config, results))
        goal = recipes[0][study.measure]["mean"]
        recipes[-1]["to the goal"] = to_goal(results, reference, study.measure, goal)
    result = {"settings": common.settings(options), "goal": goal, "recipes": recipes}
    text = f"{result_table(recipes, study.measure, study.label)}\n\nThe goal is {goal:.5f}."
    curves = {recipe["name"]: recipe["curve"] for recipe in recipes}
    common.publish(
        NAME, result, options.output, text, lambda path: draw_curves(curves, MEASURED, study.label, path, goal=goal)
    )


if __name__ == "__main__":
    with one_line_errors():
        main()
