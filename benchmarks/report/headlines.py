"""What Talon gains and where, in a few sentences made from a report's figures; where it is slower, they say why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from .figures import BASELINE, PEERS, Row, Summary, cells, first_turns, summaries
from .load_figures import LoadRow, levels
from .qa_figures import QaRow
from .rival_figures import Turn, label, ratios, speeds

_BITS = {
    "Q4_0": 4.5,
    "Q4_1": 5,
    "Q4_K": 4.5,
    "Q5_0": 5.5,
    "Q5_1": 6,
    "Q6_K": 6.6,
    "Q8_0": 8.5,
    "float16": 16,
    "bfloat16": 16,
}
"""Bits of a weight, with its share of the scales."""


def one_request(rows: Sequence[Row]) -> Iterator[str]:
    """The best method at each temperature, and on which suites it gains most and least."""
    for temperature in sorted({row.temperature for row in rows}):
        some = [row for row in rows if row.temperature == temperature]
        asked = first_turns(some)
        if not (ours := [line for line in summaries(asked) if line.method not in (*PEERS, BASELINE)]):
            continue
        best = max(ours, key=lambda line: line.speed_up)
        by_suite = {suite: median(r.values()) for (_, suite, name), r in cells(asked).items() if name == best.method}
        most, least = max(by_suite, key=by_suite.__getitem__), min(by_suite, key=by_suite.__getitem__)
        between = f"; most on {most} ({by_suite[most]:.2f}), least on {least} ({by_suite[least]:.2f})"
        yield (
            f"**One request, T = {temperature:g}**: `{best.method}` writes {best.tokens_per_second:.0f} tokens/s, "
            f"{best.speed_up:.2f} times plain decoding ({best.low:.2f} to {best.high:.2f})"
            f"{between if len(by_suite) > 1 else ''}."
        )


def many_requests(rows: Sequence[LoadRow]) -> Iterator[str]:
    """The best method where most requests run at once, and at half of that."""
    lines = levels(rows)
    shown = sorted({line.concurrency for line in lines})[-2:]
    told = []
    for level in shown:
        best = max((line for line in lines if line.concurrency == level), key=lambda line: line.tokens_per_second)
        over_one = "" if best.over_one is None else f", {best.over_one:.1f} times one request without drafts"
        told.append(
            f"{level} at once `{best.method}` writes {best.tokens_per_second:.0f} tokens/s in all, "
            f"{best.over_plain:.2f} times plain decoding ({best.low:.2f} to {best.high:.2f}){over_one}"
        )
    if told:
        yield f"**Many requests**: {'; '.join(told)}."


def against_rivals(turns: Sequence[Turn]) -> Iterator[str]:
    """Our best method against the fastest engine with at least as many bits a weight, and against any faster one."""
    found, one = speeds(turns), {turn.contestant: turn for turn in turns}
    told, slower = [], []
    for level in sorted({turn.at_once for turn in turns}):
        here = {name: by_level[level] for name, by_level in found.items() if level in by_level}
        ours = [name for name in here if one[name].talon]
        rivals = sorted((name for name in here if not one[name].talon), key=lambda name: -here[name])
        if not ours or not rivals:
            continue
        best = max(ours, key=here.__getitem__)
        bits = _BITS.get(one[best].weights, 16)
        if equal := [name for name in rivals if _BITS.get(one[name].weights, 16) >= bits]:
            over = median(ratios(turns, best, equal[0], level))
            told.append(f"{level} at once {over:.2f} times {equal[0]} ({one[equal[0]].weights})")
        for name in rivals:
            if (over := median(ratios(turns, best, name, level))) < 1:
                few = _BITS.get(one[name].weights, 16)
                why = f", which reads {few:g} bits a weight where Talon reads {bits:g}" if few < bits else ""
                slower.append(f"{over:.2f} times {label(one[name])} at {level} at once{why}")
    if told:
        yield f"**Other engines**, fastest of those with as many bits a weight: {'; '.join(told)}."
    if slower:
        yield f"**Slower than**: {'; '.join(slower)}."


def losing_methods(rows: Sequence[Row]) -> Iterator[str]:
    """Methods certainly slower than plain decoding: the tokens that their rounds bring, and the time they take."""
    lost = [line for line in summaries(rows) if line.high < 1 and line.method not in PEERS]
    if lost:
        yield f"**Slower than plain decoding**: {'; '.join(map(_why, lost))}."


def _why(line: Summary) -> str:
    told = f"`{line.method}` ({line.speed_up:.2f} times)"
    if line.mean_accepted_tokens is None:
        return told
    took = line.mean_accepted_tokens / line.speed_up
    return f"{told}: a round brings {line.mean_accepted_tokens:.2f} tokens and takes as long as {took:.2f} plain ones"


def same_texts(single: Sequence[Row], load: Sequence[LoadRow], qa: Sequence[QaRow]) -> Iterator[str]:
    """How many texts are those of plain decoding."""
    ours = [row.output_equal for row in single if row.method not in (*PEERS, BASELINE) and row.output_equal is not None]
    ours += [row.output_equal for row in load] + [row.output_equal for row in qa if row.method != BASELINE]
    if ours:
        yield f"**Texts**: {sum(ours)} of {len(ours)} are plain decoding's of the same request alone, token for token."
