from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from drafters.base import Verdict
from drafters.experience import BINS, SEEN, Experienced, Reliability, read, write
from drafters.prompt_lookup import PromptLookup
from drafters.registry import source_of
from drafters.suffix import SuffixDrafter
from engine.api import Engine
from engine.errors import ConfigError
from engine.sampling import SamplingParams
from engine.tree import TokenTree

TREE = TokenTree.from_lists([0, 1, 2, 3, 4], [-1, 0, 0, 1, 2], [1.0, 0.8, 0.15, 0.4, 0.1], source=source_of("suffix"))


def seen(reliability: Reliability) -> float:
    return sum(float(counts[:, SEEN].sum()) for counts in reliability.counts.values())


def taught(path: Path) -> Experienced:
    """A drafter that saw the same answer over and over, and its file."""
    drafter = Experienced(SuffixDrafter(), path)
    drafter.start(1, [1, 2, 3, 1], SamplingParams())
    for _ in range(40):
        drafter.observe(1, Verdict(drafter.propose(1), [0], [2]))
        drafter.observe(1, Verdict(drafter.propose(1), [0], [3]))
        drafter.observe(1, Verdict(drafter.propose(1), [0], [1]))
    drafter.finish(1)
    drafter.save()
    return drafter


def test_every_child_of_an_accepted_node_was_promised_something_and_came_true_or_not() -> None:
    reliability = Reliability()
    reliability.add(Verdict(TREE, [0, 1], [1, 9]))
    bins = {tuple(row) for row in np.round(reliability.by_source()["suffix"], 4).tolist()}
    assert bins == {(0.8, 1.0, 1.0), (0.15, 0.0, 1.0), (0.5, 0.0, 1.0)}, "node 4's parent was not accepted"
    reliability.add(Verdict(TokenTree.root_only(3), [0], [1]))
    assert seen(reliability) == 3


def test_a_drafter_begins_with_what_the_file_holds(tmp_path: Path) -> None:
    earlier = taught(tmp_path / "c.npz")
    later = Experienced(SuffixDrafter(), tmp_path / "c.npz")
    assert later.drafter.learned()["suffix"].tolist() == earlier.drafter.learned()["suffix"].tolist()
    assert seen(later.reliability) == seen(earlier.reliability) > 0
    assert [path.name for path in tmp_path.iterdir()] == ["c.npz"]


def test_rounds_without_a_verdict_are_observed_but_promised_nothing(tmp_path: Path) -> None:
    drafter = Experienced(SuffixDrafter(), tmp_path / "c.npz")
    drafter.start(1, [1, 2, 3, 4, 9, 1], SamplingParams())
    drafter.observe(1, Verdict(TokenTree.root_only(1), [0], [2, 3], rest=True))
    assert seen(drafter.reliability) == 0
    assert drafter.propose(1).tokens.tolist()[:2] == [3, 4]


def test_a_file_of_another_method_gives_what_it_can(tmp_path: Path) -> None:
    earlier = taught(tmp_path / "c.npz")
    drafter = Experienced(PromptLookup(), tmp_path / "c.npz")
    assert seen(drafter.reliability) == seen(earlier.reliability) > 0


def test_broken_and_foreign_files_are_refused_in_one_line(tmp_path: Path) -> None:
    taught(tmp_path / "c.npz")
    whole = (tmp_path / "c.npz").read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    np.save(tmp_path / "pickled.npy", np.array([{}], object), allow_pickle=True)
    bad = [b"", b"\x00junk", whole[:-30], bytes(flipped), (tmp_path / "pickled.npy").read_bytes()]
    for content in bad:
        (tmp_path / "bad.npz").write_bytes(content)
        with pytest.raises(ConfigError, match=r"drafter\.calibration=.*bad\.npz: cannot be used") as raised:
            Experienced(SuffixDrafter(), tmp_path / "bad.npz")
        assert "\n" not in str(raised.value)
    counts = np.zeros((BINS, 3))
    for arrays in ({"reliability: pld": counts[0]}, {"suffix": np.full((12, 32, 2), np.nan)}):
        write(tmp_path / "bad.npz", arrays)
        with pytest.raises(ConfigError, match="cannot be used"):
            read(tmp_path / "bad.npz")
    for name, array in (("suffix", np.ones((3, 2))), ("suffix", np.full((12, 32, 2), 7.0)), ("pld", np.ones((2, 2)))):
        write(tmp_path / "bad.npz", {"reliability: pld": counts, name: array})
        with pytest.raises(ConfigError, match="cannot be used"):
            Experienced(SuffixDrafter() if name == "suffix" else PromptLookup(), tmp_path / "bad.npz")


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        write(tmp_path / "file" / "c.npz", {})
    with pytest.raises(ConfigError, match="cannot be written"):
        Experienced(SuffixDrafter(), tmp_path / "file" / "more" / "c.npz")


def test_engines_that_share_a_file_do_not_lose_each_others_experience(tmp_path: Path) -> None:
    path, tree = tmp_path / "c.npz", Verdict(TREE, [0, 1], [1, 9])
    one, other = Experienced(SuffixDrafter(), path), Experienced(PromptLookup(), path)
    for drafter in (one, other):
        drafter.reliability.add(tree)
        drafter.save()
    one.reliability.add(tree)
    one.save()
    kept = read(path)
    assert seen(Reliability.among(kept)) == 9, "three verdicts of three nodes each"
    assert set(kept) == {"reliability: suffix", *one.drafter.learned(), *other.drafter.learned()}


async def test_two_engines_of_one_process_close_on_the_same_file(tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "c.npz"
    options = {"model": tiny, "method": "suffix", "transport": "inproc", "drafter": {"calibration": str(path)}}
    engines = [await Engine.start(options) for _ in range(2)]
    for engine in engines:
        await engine.generate("one two one two one two", SamplingParams(max_tokens=30))
    await asyncio.gather(*(engine.close() for engine in engines))
    assert seen(Reliability.among(read(path))) > 0
    assert [file.name for file in tmp_path.iterdir()] == ["c.npz"]  # noqa: ASYNC240


@pytest.mark.parametrize("transport", ["inproc", "ipc"])
async def test_an_engine_keeps_it_when_it_closes(tiny: str, tmp_path: Path, transport: str) -> None:
    path = tmp_path / "kept" / "c.npz"
    options = {"model": tiny, "method": "suffix", "transport": transport, "drafter": {"calibration": str(path)}}
    counts = []
    for _ in range(2):
        async with await Engine.start(options) as engine:
            await engine.generate("one two one two one two", SamplingParams(max_tokens=30))
        counts.append(seen(Reliability.among(read(path))))
    assert 0 < counts[0] < counts[1]
    path.write_bytes(b"junk")
    with pytest.raises(ConfigError, match="delete it"):
        await Engine.start(options)
