"""The records of the commands as tables, and the section "GPU" of docs/benchmarks.md.

    python3 benchmarks/gpu/report.py [FOLDER]        # of gpu-*.jsonl; default: benchmarks/results

Writes nothing if there are no records, or none from a GPU.

A file holds one run after the other. The page shows the newest run, together with earlier ones of the same sources on
the same device. Runs of earlier sources follow if they measured something that no later run did.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _measure import RESULTS, caution, ratio, show_machine, show_ratio, table, write_section

TITLE = "GPU"
Lines = Sequence[dict[str, Any]]


def read(file: Path) -> list[dict[str, Any]]:
    """The records of a file, without incomplete lines, which killed commands left."""
    if not file.exists():
        return []
    records = []
    for line in file.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def split_runs(lines: Lines) -> list[list[dict[str, Any]]]:
    """The records of each run. A run begins with its ``facts``."""
    runs: list[list[dict[str, Any]]] = []
    for line in lines:
        if line["kind"] == "facts":
            runs.append([])
        if runs:
            runs[-1].append({**line, "run": len(runs) - 1})
    return runs


def group_runs(runs: Sequence[Lines]) -> list[list[dict[str, Any]]]:
    """The records of the runs on a GPU, newest first. Runs of the same sources on the same device are one group, in
    their order."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in reversed(runs):
        fact = run[0]
        if "device" not in fact or fact.get("tiny"):
            continue
        key = (fact["device"], fact.get("sources"), fact.get("steps"))
        groups[key] = [*run, *groups.get(key, [])]
    return list(groups.values())


def measured_names(lines: Lines) -> set[str]:
    """The names of what was measured."""
    return {line["name"] for line in lines if line["kind"] in ("measure", "job")}


def shown_groups(groups: Sequence[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """The newest group, and each earlier one that measured something that no later one did."""
    shown: list[list[dict[str, Any]]] = []
    names: set[str] = set()
    for lines in groups:
        own = measured_names(lines)
        if not shown or own - names:
            shown.append(lines)
        names |= own
    return shown


def of_kind(lines: Lines, kind: str) -> dict[str, list[dict[str, Any]]]:
    """Name -> its records of this kind, in order."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        if line["kind"] == kind:
            by_name.setdefault(line["name"], []).append(line)
    return by_name


def compare(windows: dict[str, list[dict[str, Any]]], ours: str, theirs: str) -> str:
    """The ratio of two speeds, from the rounds that have both."""
    our_speeds = speeds_by_round(windows.get(ours, []))
    their_speeds = speeds_by_round(windows.get(theirs, []))
    both = sorted(our_speeds.keys() & their_speeds.keys())
    if ours == theirs or not both:
        return ""
    return show_ratio(ratio([our_speeds[key] for key in both], [their_speeds[key] for key in both]))


def speeds_by_round(lines: Lines) -> dict[tuple[int, int], float]:
    """The run of the command and the round -> samples a second."""
    return {(line.get("run", 0), line["round"]): line["samples_per_second"] for line in lines}


def median(lines: Lines, key: str) -> float:
    """The median of a field."""
    values: list[float] = [line[key] for line in lines]
    return statistics.median(values)


def teraflops(lines: Lines) -> str:
    """10^12 operations a second on real tokens."""
    return f"{statistics.median(line['flops'] / line['seconds'] for line in lines) / 1e12:.1f}"


def show_ceilings(lines: Lines) -> str:
    """The ceilings of the machine as sentences."""
    shown = []
    for line in lines:
        if line["kind"] != "ceilings":
            continue
        text = (
            f"Ceilings: a product of {line['rows']} x {line['rows']} matrices in bf16 "
            f"{line['product_flops'] / 1e12:.0f} TFLOP/s (best window {line['product_flops_best'] / 1e12:.0f}), "
            f"a copy {line['copy_bytes'] / 1e9:.0f} GB/s read and written (best window "
            f"{line['copy_bytes_best'] / 1e9:.0f})."
        )
        if line.get("nominal_flops"):
            text += (
                f" NVIDIA's figures: {line['nominal_flops'] / 1e12:.0f} TFLOP/s and {line['nominal_bytes'] / 1e9:.0f} "
                "GB/s."
            )
        if line.get("host_calls"):
            text += f" The host makes {line['host_calls'] / 1e6:.1f} million Python calls a second."
        shown.append(text)
    return "\n".join(shown)


def failures(lines: Lines) -> str:
    """Errors, runs that their budget cut, and parts that were skipped and not measured by a later run."""
    shown = [
        f"* failed: `{line['name']}` ({line['during']}): `{line['error'].splitlines()[-1][:200]}`"
        for line in lines
        if line["kind"] == "error"
    ]
    last = {line["name"]: line["run"] for line in lines if line["kind"] in ("measure", "job", "file") and "run" in line}
    for line in lines:
        if line["kind"] not in ("cut", "skipped"):
            continue
        if last.get(line["name"], -1) > line.get("run", 0):
            continue
        label = "cut by its budget" if line["kind"] == "cut" else "left out"
        shown.append(f"* {label}: `{line['name']}`: {line['why']}")
    shown += [
        f"* dropped after the first round: `{line['name']}`: {line['ratio']:.2f} of `{line['over']}`"
        for line in lines
        if line["kind"] == "dropped"
    ]
    return "\n".join(shown)


def show_ablation(lines: Lines) -> str:
    """The section of command 2."""
    from ablation import VARIANTS

    windows = of_kind(lines, "measure")
    warmups = of_kind(lines, "warmup")
    rows = []
    for name, measured in windows.items():
        over = VARIANTS[name].over
        compiled = f"{warmups[name][0]['compile_seconds']:.0f}"
        late = sum(line["compile_seconds"] for line in measured)
        if late > 0.05:
            compiled += f" (and {late:.1f} in windows)"
        rows.append(
            [
                f"`{name}`",
                f"`{over}`" if over != name else "",
                f"{median(measured, 'samples_per_second'):.0f}",
                teraflops(measured),
                compare(windows, name, "baseline"),
                compare(windows, name, over) if over != name else "",
                f"{max(line['peak_bytes'] for line in measured) / 2**20:.0f}",
                compiled,
            ]
        )
    head = ["variant", "over", "samples/s", "TFLOP/s", "x baseline", "x over", "peak MiB", "compile s"]
    jobs = show_jobs(lines)
    parts = [table(head, rows, 2), "\n".join(jobs), show_ceilings(lines), show_probes(lines), failures(lines)]
    return "\n\n".join(filter(None, parts))


def show_jobs(lines: Lines) -> list[str]:
    """A line for each complete training."""
    return [show_job(line["name"], line) for line in lines if line["kind"] == "job"]


def show_job(name: str, line: dict[str, Any]) -> str:
    """The section of a complete training."""
    parts = [
        ("start-up", "startup"),
        ("training", "train"),
        ("compilation in it", "compile"),
        ("evaluation", "evaluate"),
    ]
    spans = ", ".join(f"{shown} {line[f'{span}_seconds']:.1f}" for shown, span in parts)
    seed = f", seed {line['seed']}" if "seed" in line else ""
    what = f"`{name}` (`{line['variant']}`, cache: {line['cache']}{seed})"
    return (
        f"* {what}: **{line['wall_seconds']:.1f} s** from start to end: {spans}; accuracy "
        f"{line['validation']['accuracy']:.3f}."
    )


def show_probes(lines: Lines) -> str:
    """The section of synchronizations and kernels. A figure that was not measured is blank."""
    probes: dict[str, dict[str, Any]] = {}
    for line in lines:
        if line["kind"] in ("syncs", "profile"):
            probes.setdefault(line["name"], {}).update(line)
    rows = []
    for name, probe in probes.items():
        attention = [f"`{kernel[:70]}`" for kernel in list(probe.get("attention") or ())[:2]]
        syncs, kernels, busy = (probe.get(key) for key in ("syncs_per_step", "kernels_per_step", "busy"))
        rows.append(
            [
                f"`{name}`",
                "; ".join(attention),
                "" if syncs is None else f"{syncs:.2f}",
                "" if kernels is None else f"{kernels:.0f}",
                "" if busy is None else f"{busy:.0%}",
            ]
        )
    head = ["", "attention kernel", "host syncs a step", "kernels a step", "device busy"]
    return table(head, rows, 2) if rows else ""


def show_peers(lines: Lines) -> str:
    """The section of command 5."""
    windows = of_kind(lines, "measure")
    warmups = of_kind(lines, "warmup")
    rows = []
    for name, measured in windows.items():
        compiling = [line["compile_seconds"] for line in warmups[name]]
        rows.append(
            [
                f"`{name}`",
                f"{median(measured, 'samples_per_second'):.0f}",
                teraflops(measured),
                compare(windows, name, "naive"),
                compare(windows, "fastloop", name),
                f"{1 - measured[0]['tokens'] / median(measured, 'computed'):.0%}",
                f"{max(line['peak_bytes'] for line in measured) / 2**20:.0f}",
                " / ".join(f"{seconds:.0f}" for seconds in compiling) if max(compiling) > 0.5 else "",
                f"{statistics.fmean(measured[-1]['losses'][-20:]):.3f}",
            ]
        )
    head = [
        "arm",
        "samples/s",
        "TFLOP/s",
        "x naive",
        "fastloop x it",
        "padding",
        "peak MiB",
        "compile s, cold / warm",
        "last losses",
    ]
    costs = [
        [
            f"`{name}`",
            f"{line['us_per_step']:.0f}",
            f"{line['us_over_raw']:.0f}",
            f"{line['ratio']:.2f}",
            "yes" if line["same_weights"] else "NO",
        ]
        for name, (line,) in of_kind(lines, "overhead").items()
    ]
    cost = table(["step around one layer", "us", "us over raw", "x raw", "same weights"], costs) if costs else ""
    return "\n\n".join(
        filter(None, [table(head, rows), show_ceilings(lines), show_probes(lines), cost, failures(lines)])
    )


def show_text_job(lines: Lines) -> str:
    """The section of command 3."""
    texts = next((line for line in lines if line["kind"] == "texts"), None)
    shown = show_jobs(lines)
    for line in [line for line in lines if line["kind"] == "job"][:1]:
        plugins = ", ".join(f"`{plugin}`" for plugin in line["plugins"])
        shown.append(f"  * plugins of `{line['name']}`: {plugins}; {len(line['warnings'])} warnings.")
    if texts is not None:
        shown.append(
            f"* texts: {', '.join(f'{split} {count:,} reviews' for split, count in texts['reviews'].items())}."
        )
    return "\n\n".join(filter(None, ["\n".join(shown), failures(lines)]))


def show_lm(lines: Lines) -> str:
    """The section of command 4."""
    fact = next(line for line in lines if line["kind"] == "facts")
    ceilings: dict[str, Any] = next((line for line in lines if line["kind"] == "ceilings"), {})
    windows, warmups, validations = (of_kind(lines, kind) for kind in ("measure", "warmup", "validate"))
    rows = []
    for name, measured in windows.items():
        speed = statistics.median(line["computed"] / line["seconds"] for line in measured)
        peaks = [ceilings.get(key) for key in ("product_flops", "nominal_flops")]
        validation = validations.get(name, [None])[-1]
        trained = 0 if validation is None else validation["trained_steps"] * fact["batch"] * fact["length"]
        rows.append(
            [
                f"`{name}`",
                f"{speed:,.0f}",
                compare(windows, name, "plain"),
                *(f"{speed * fact['token_flops'] / peak:.1%}" if peak else "" for peak in peaks),
                f"{max(line['peak_bytes'] for line in measured) / 2**20:.0f}",
                f"{warmups[name][0]['compile_seconds']:.0f}",
                "" if validation is None else f"{validation['validation_loss']:.3f}",
                f"{trained / 1e6:.2f}" if trained else "",
            ]
        )
    head = [
        "arm",
        "tokens/s",
        "x plain",
        "MFU, measured ceiling",
        "MFU, nominal",
        "peak MiB",
        "compile s",
        "validation loss",
        "after 10^6 tokens",
    ]
    return "\n\n".join(filter(None, [table(head, rows), show_ceilings(lines), show_probes(lines), failures(lines)]))


def show_tests(lines: Lines) -> str:
    """The section of commands 1 and 6."""
    tests = list({line["name"]: line for line in lines if line["kind"] == "test"}.values())  # the last outcome of each
    files = {line["name"]: line for line in lines if line["kind"] == "file"}  # its last run
    counts: Counter[str] = Counter()
    for file in files.values():
        for outcome in ("passed", "failed", "skipped"):
            if file.get(outcome):
                counts[outcome] += file[outcome]
    shown = [f"Tests: {', '.join(f'{count} {outcome}' for outcome, count in counts.items()) or 'none'}."]
    for line in tests:
        if line["outcome"] == "failed":
            last = next(
                (text for text in reversed(line["reason"].splitlines()) if text.startswith("E ")), line["reason"][-200:]
            )
            shown.append(f"* failed: `{line['name']}`: `{last[:200].strip()}`")
    return "\n\n".join(filter(None, ["\n".join(shown), failures(lines)]))


def show_setting(fact: dict[str, Any], lines: Lines) -> str:
    """The machine, the versions, and how often something was measured."""
    text = (
        f"{show_machine(fact)} Driver {fact['driver']}, CUDA {fact['cuda']}, cuDNN {fact['cudnn']}; sources "
        f"{fact['sources']}."
    )
    repeats = max(map(len, of_kind(lines, "measure").values()), default=0)
    if repeats:
        text += f" {repeats} rounds of {fact['steps']} steps. {caution(repeats)}"
    return text.strip()


def section(folder: Path) -> str | None:
    """The text of the section; None without records of a GPU."""
    shown = []
    for file, command, title, show in (
        ("ablation", "ablation", "Ablation", show_ablation),
        ("job", "job", "The published job from texts", show_text_job),
        ("lm", "lm", "A language model", show_lm),
        ("peers", "peers", "Peers", show_peers),
        ("tests", "tests", "Tests that need a GPU", show_tests),
        ("tests", "plugin-tests", "Tests of the plugins", show_tests),
    ):
        runs = split_runs(read(folder / f"gpu-{file}.jsonl"))
        groups = shown_groups(group_runs([run for run in runs if run[0].get("command", file) == command]))
        for number, lines in enumerate(groups):
            fact = [line for line in lines if line["kind"] == "facts"][-1]
            heading = f"### {title} on {fact['device']}"
            if number > 0:
                heading += f", sources {fact['sources']}"
            shown += [heading, show(lines), show_setting(fact, lines)]
        if groups:
            shown.append(f"Raw figures: `benchmarks/results/gpu-{file}.jsonl`.")
    return "\n\n".join(shown) or None


def main() -> None:
    """Write the section."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    text = section(folder)
    if text is None:
        sys.exit(f"{folder}: no records of a GPU (gpu-*.jsonl): docs/benchmarks.md stays as it is.")
    notes = folder / "gpu-notes.md"
    text += f"\n\n{notes.read_text().strip()}" if notes.exists() else ""
    write_section(TITLE, f"{text}\n\nbenchmarks/gpu/README.md describes the protocol.")


if __name__ == "__main__":
    main()
