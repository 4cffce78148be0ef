"""Distillation into a pruned student beside plain training: `make demo-distill`.

Ten of SmolLM2-135M's thirty blocks are kept and trained on Python's own reference
manual, once on the teacher's distribution and the labels, once on the labels alone: for
an equal number of tokens, and for an equal time. Held-out perplexities are written to
`report.html` with the curves, the check of the loss and the certificate, whichever
training is better.

    python -m examples.distill_demo [OUT] [STEPS]
"""

import html
import io
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import matplotlib
from rich.console import Console

from dew.cli import main as dew
from examples.demo import write_texts
from examples.support.weights import cached

matplotlib.use("Agg")
from matplotlib import pyplot

# Without training, these first and last blocks predict most of what all predict.
KEPT = (*range(4), *range(24, 30))
HELD_OUT = ("identifiers.txt", "naming.txt", "raise.txt")
ROWS, SEQ = 2, 128
SETTINGS = f"""
    --batch-size {ROWS} --seq-len {SEQ} --learning-rate 5e-4 --schedule constant
    --warmup 8 --log-every 4
"""


def call_dew(*words: Any) -> dict[str, Any]:
    """Runs a command and returns its JSON object."""
    stdout = io.StringIO()
    with redirect_stdout(stdout):
        code = dew([*map(str, words), "--json"])
    if not stdout.getvalue():
        raise SystemExit(code)
    return json.loads(stdout.getvalue())


def run(out: Path, steps: int) -> int:
    console = Console()
    teacher, student = cached("smollm2"), out / "student"
    train, held_out = write_texts(out / "text")
    texts = [held_out / name for name in HELD_OUT]
    cut = call_dew("prune", "--model", teacher, "--out", student, "--layers", *KEPT)
    console.print(f"student: blocks {cut['kept']}, {cut['parameters']:,} parameters")
    sides = ("--teacher", teacher, "--student", student)
    checked = call_dew("check", *sides, "--data", *texts, "--seq-len", 16)["rows"]
    common = ("--data", train, "--eval-data", *texts, *SETTINGS.split())
    common = (*common, "--eval-every", max(1, steps // 4))
    distilled = call_dew(
        "distill", *sides, *common, "--steps", steps, "--out", out / "taught"
    )
    alone = ("pretrain", "--model", student, *common, "--out", out / "alone")
    tokens = call_dew(*alone, "--steps", steps)
    speeds = [one["tokens_per_second"] for one in (tokens, distilled)]
    longer = max(steps + 1, round(steps * speeds[0] / speeds[1]))
    time = call_dew(*alone, "--steps", longer, "--resume")
    score = ("eval", "--model", teacher, "--data", *texts, "--seq-len", SEQ)
    after = [one["eval"]["after"]["perplexity"] for one in (distilled, tokens, time)]
    perplexities = {
        "teacher": call_dew(*score, "--batch-size", ROWS)["perplexity"],
        "student before": distilled["eval"]["before"]["perplexity"],
        f"distilled, {steps} steps": after[0],
        f"labels alone, {steps} steps": after[1],
        f"labels alone, {longer} steps, in the same time": after[2],
    }
    verdicts = [
        f"at equal {unit} the {'distilled' if after[0] < other else 'other'} student "
        f"is better: {after[0]:.1f} distilled, {other:.1f} on labels alone"
        for unit, other in zip(("tokens", "time"), after[1:], strict=True)
    ]
    verdicts.append(f"the teacher took {distilled['teacher_share']:.0%} of the time")
    plot(out, speeds)
    write_report(out, perplexities, verdicts, checked, distilled["certificate"])
    for name, perplexity in perplexities.items():
        console.print(f"held-out perplexity, {name}: {perplexity:.1f}")
    console.print("\n".join(verdicts), f"full report: {out / 'report.html'}")
    return 0 if all(row["passed"] for row in checked) else 1


def plot(out: Path, speeds: Sequence[float]) -> None:
    """Plots both curves over tokens, and over seconds of training steps."""
    figure, (by_tokens, by_time) = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    labels = {"alone": "labels alone", "taught": "distilled"}
    for (folder, label), speed in zip(labels.items(), speeds, strict=True):
        log = (out / folder / "logs" / "metrics.jsonl").read_text(encoding="utf-8")
        name = "eval/held_out/perplexity"
        rows = {
            r["step"]: r[name] for r in map(json.loads, log.splitlines()) if name in r
        }
        tokens = [step * ROWS * SEQ for step in rows]
        by_tokens.plot(tokens, list(rows.values()), marker="o", label=label)
        seconds = [count / speed for count in tokens]
        by_time.plot(seconds, list(rows.values()), marker="o", label=label)
    by_tokens.set(xlabel="tokens", ylabel="held-out perplexity", yscale="log")
    by_time.set(xlabel="seconds of steps")
    by_time.legend()
    figure.savefig(out / "curves.png", dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def write_report(
    out: Path,
    perplexities: Mapping[str, float],
    verdicts: Sequence[str],
    checks: Sequence[Mapping[str, Any]],
    certificate: Mapping[str, Any] | None,
) -> None:
    def table(rows: Sequence[Sequence[Any]]) -> str:
        cells = ["".join(f"<td>{html.escape(str(c))}" for c in row) for row in rows]
        return f"<table><tr>{'<tr>'.join(cells)}</table>"

    proof = html.escape(json.dumps(certificate, indent=1, ensure_ascii=False))
    body = (
        f"<h1>Held-out perplexity</h1>{table(list(perplexities.items()))}"
        f"<p>{'<br>'.join(verdicts)}<p><img src=curves.png>"
        f"<h1>Check of the loss</h1>{table([list(row.values()) for row in checks])}"
        f"<h1>Certificate of the export</h1><pre>{proof}</pre>"
    )
    head = "<!doctype html><meta charset=utf-8><title>Distillation</title>"
    (out / "report.html").write_text(head + body, encoding="utf-8")


if __name__ == "__main__":
    arguments = [*sys.argv[1:], *("runs/distill", "48")[len(sys.argv) - 1 :]]
    sys.exit(run(Path(arguments[0]), int(arguments[1])))
