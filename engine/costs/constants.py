"""The constants that decide which drafts are made, in one table: unit, meaning, and the measurement behind each.

*Simulated* means tests/engine/costs/simulated_answers.py: 480 answers in seven kinds of text, each with a draft model
that is slow, one that has to read the prompt first, and a head. Beside a constant stands what half and twice its value
add to the time of all answers, and at most to that of one kind. None can change a text.
"""

from __future__ import annotations

# What a draft gains, learned from verdicts: bandit.py and draft_choice.py here, drafters/hybrid/rescues.py.

GAIN_AT_FIRST = 0.5
"""Tokens that a draft is assumed to gain before any was seen: a head of 2 ms drafts from the first round on, a draft of
four steps of 12 ms is tried first. Simulated: -0.2% and 0.0%, at most 0.6%.
"""
HEAD_GAIN_AT_FIRST = 1.0
"""Tokens that a head's draft is assumed to gain beside retrieval's, likewise: more than its step costs, so that every
kind of round is tried. Not measured apart.
"""
RESCUES_AT_FIRST = 0.6
"""Accepted tokens of a head for each that retrieval misses, likewise. Over 18 answers on two cores, a head beside
retrieval gained 4 to 14% with it, and where it gained nothing it lost nothing.
"""
PRIOR_ROUNDS = 4.0
"""Rounds that the mean of all requests counts for in each request's own. Simulated: 0.2% and -0.2%, at most 1.5%; a
quarter loses up to 24%.
"""
MEMORY = 50.0
"""Rounds that a mean of gains or of times remembers, a request's own and that of all requests. Simulated: 0.0% and
-0.1%, at most 0.8%. Two memories, of 20 rounds for a request and of 50 for all, took no less time than this one.
"""
MEMORY_OF_RESCUES = 100.0
"""Drafts of a head beside retrieval that their mean over all requests remembers: what was given up is tried again after
so many others. Not measured apart.
"""
NEXT_TO_NOTHING = 0.3
"""Tokens that retrieval is expected to get, up to which a head drafts without having to gain more. Not measured
apart.
"""

# How much may be lost by drafts that do not pay: bandit.py and draft_choice.py.

TRIALS_LOSE = 0.01
"""Share of the emitted tokens that trials may lose. Simulated: -0.2% and -0.2%, but half of it loses 3.4% where a slow
model pays, and twice as much 1.5% where it does not.
"""
ANSWER_LOSES = 0.9
"""Tokens of plain decoding that an answer may lose by drafts that were expected to pay. Simulated: -0.1% and 0.0%, at
most 1.1%; a quarter loses 4.5% where a slow model pays.
"""
ROUNDS_OF_READING = 64.0
"""Rounds over which reading a text for a draft model has to pay, at most: the most tokens that a request allows say
little of how long its answer will be. Not reached in what is simulated.
"""
LONG_READING = 32
"""Positions of which the reading takes a model clearly longer than a draft. On short answers to long texts, reading
them only where that pays saved a tenth of the time. Simulated: 0.0% and 0.0%, at most 1.5%.
"""

# What a second is worth: cost_model.py and forward_time.py.

LATEST_ROUND = 0.1
"""Weight of the latest round in the usual tokens, rows and times, and of the latest forward in the time of its size.
Simulated: -0.1% and 0.0%, at most 1.5%; a quarter loses 5.5% where a slow model pays.
"""
LATEST_ELSEWHERE = 0.03
"""Weight of the latest forward in the time of the other sizes, since other load slows all of them."""
LARGEST_ERROR = 0.25
"""Clip of a forward's relative error: an interrupted forward must not make its size expensive for good."""
MARGINAL_ROWS = 8
"""Rows of a request over which the cost of one more is averaged, so that trees grow as wide as rows are cheap: forwards
take steps of up to 16 rows.
"""
LEAST_PATIENCE_S = 0.002
"""Seconds that a round waits for drafts at least, beyond twice the usual wait."""

# Drafting ahead: bandit.py, cost_model.py, and engine/drafting/worker.py.

CLEARLY_BETTER = 0.97
"""Share of the time per token in turns that drafting ahead must stay below."""
AROUND_FORWARD = 0.2
"""Share of a round outside the forward, below which overlapping cannot repay the core that it takes from the target."""
OUTCOMES = 24
"""Outcomes of a round to draft for, at most: with a simulated accelerator 0.47 of a head's trees are in time, with the
three likeliest 0.33.
"""
LEAST_OUTCOME = 0.0005
"""Probability of an outcome to draft for, at least. Probabilities rank outcomes better than they measure them: those of
a head with a confidence head are far too low, and a higher bound left three outcomes a round.
"""
ENOUGH_TOKENS = 0.75
"""Share of a round's usual tokens at which a tree that is waited for is sent unfinished. Not measured apart: drafting
ahead with it kept the verifier busy for 0.91 of the time, turns for 0.43 (a draft model on two cores).
"""
GRAFT_PROB = 0.8
"""Probability of a token that a grammar implies: the model may write it in another way."""
