"""Table and picture of a study of trainable sparsity (tools/compare_sparsity.py)."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from dbsp_megatron.observability.plot_style import INK, MUTED, figure, hues

PRETRAIN = "pretrain"
DENSE = "dense"
MOST_DENSITY, LEAST_RECOVERED = 0.3, 0.98


def summarise_study(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each variant and seed that is complete, dense first.

    Args:
        record: `settings` and `runs` by "SEED NAME".

    Returns:
        Rows with `recovered` (of the improvement of dense fine-tuning) and `recovered_overall` (of that from untrained
        weights on), both by held-out loss; density is that of the last tenth of the steps.

    Raises:
        ValueError: dense fine-tuning made nothing better, so that there is nothing to recover.
    """
    runs, rows = record["runs"], []
    names = [DENSE, *record["settings"]["variants"]]
    seeds = sorted({int(key.split()[0]) for key in runs})
    for name in names:
        for seed in seeds:
            pretrain, dense, run = (runs.get(f"{seed} {each}") for each in (PRETRAIN, DENSE, name))
            if pretrain is None or dense is None or run is None:
                continue
            untrained, start, best = pretrain["eval_loss"][0], dense["eval_loss"][0], dense["eval_loss"][-1]
            if not best < start:
                raise ValueError(f"seed {seed}: dense fine-tuning went from {start} to {best}; train longer")
            tenth = max(1, len(run["loss"]) // 10)
            loss = run["eval_loss"][-1]
            rows.append(
                {
                    "variant": name,
                    "seed": seed,
                    "density": statistics.fmean(run["density"][-tenth:]),
                    "start_loss": start,
                    "loss": loss,
                    "dense_loss": best,
                    "train_loss": statistics.fmean(run["loss"][-tenth:]),
                    "recovered": (start - loss) / (start - best),
                    "recovered_overall": (untrained - loss) / (untrained - best),
                    "cpu_s": run["cpu_s"],
                }
            )
    return rows


def study_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a Markdown table: a line for each variant, seeds side by side."""
    names = list(dict.fromkeys(str(row["variant"]) for row in rows))
    lines = [
        "| fine-tuned | density | held-out loss | training loss, last tenth | recovered, by seed | recovered, least "
        f"| from untrained, least | >= {LEAST_RECOVERED:.0%} at density <= {MOST_DENSITY} |",
        "|" + "---|" * 8,
    ]
    for name in names:
        group = [row for row in rows if row["variant"] == name]
        least = min(row["recovered"] for row in group)
        densest = max(row["density"] for row in group)
        met = "-" if name == DENSE else "yes" if least >= LEAST_RECOVERED and densest <= MOST_DENSITY else "no"
        cells = [
            name,
            _list(group, "density", ".3f"),
            _list(group, "loss", ".4f"),
            _list(group, "train_loss", ".4f"),
            _list(group, "recovered", ".1%"),
            f"{least:.1%}",
            f"{min(row['recovered_overall'] for row in group):.1%}",
            met,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    first = [row for row in rows if row["variant"] == names[0]] if names else []
    if first:
        lines += ["", f"Held-out loss of the checkpoints: {_list(first, 'start_loss', '.4f')}."]
        lines += [f"CPU time of fine-tuning: {sum(row['cpu_s'] for row in rows):.0f} s."]
    return "\n".join(lines)


def _list(rows: Sequence[Mapping[str, Any]], key: str, form: str) -> str:
    return ", ".join(format(row[key], form) for row in rows)


def plot_study(record: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], path: str | os.PathLike[str]) -> None:
    """Held-out loss over the steps, one panel for each seed, and beside them what each variant recovers at its density.

    Raises:
        ValueError: no seed is complete.
    """
    if not rows:
        raise ValueError("no seed has both a dense and a sparse run: nothing to draw")
    runs = record["runs"]
    names = list(dict.fromkeys(row["variant"] for row in rows))
    seeds = sorted({row["seed"] for row in rows})
    colours = dict(zip(names, [INK, *hues(len(names) - 1)], strict=True))
    with figure(path, 2.9 * len(seeds) + 3.6, 3.4) as drawn:
        widths = [1.0] * len(seeds) + [1.15]
        panels = drawn.subplots(1, len(seeds) + 1, gridspec_kw={"width_ratios": widths})
        for axes, seed in zip(panels, seeds, strict=False):
            for name in names:
                run = runs.get(f"{seed} {name}")
                if run is not None:
                    # Dense on top of what it may coincide with, in dashes that show it.
                    over = {"linestyle": "--", "zorder": 4} if name == DENSE else {}
                    style = {"color": colours[name], "linewidth": 1.4, "marker": "o", "markersize": 3} | over
                    axes.plot(run["eval_steps"], run["eval_loss"], label=name, **style)
            axes.set_title(f"Held-out loss, seed {seed}")
            axes.set_xlabel("fine-tuning step")
            axes.grid(True, axis="y")
        axes = panels[-1]
        for name in names:
            group = [row for row in rows if row["variant"] == name]
            share = [100 * row["recovered"] for row in group]
            axes.scatter([row["density"] for row in group], share, color=colours[name], s=22, zorder=3)
        axes.axhline(100 * LEAST_RECOVERED, color=MUTED, linewidth=1, linestyle=":")
        axes.axvline(MOST_DENSITY, color=MUTED, linewidth=1, linestyle=":")
        axes.set_xlim(0, 1.05)
        axes.set_title("Recovered of dense improvement")
        axes.set_xlabel("density")
        axes.set_ylabel("percent")
        axes.grid(True, axis="y")
        handles, labels = panels[0].get_legend_handles_labels()
        drawn.legend(handles, labels, loc="outside lower center", ncols=len(labels))
