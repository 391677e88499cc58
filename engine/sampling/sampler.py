"""Lossless verification: draw the target's own next token and walk down the tree while it contains that token.

Every draw is emitted, so the walk is plain decoding; the tree only decides how many draws one forward pays for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.core.errors import NotANumber, RequestFailed
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.sampling.argmax import NAN, argmax
from engine.sampling.gumbel_max import draw_bfloat16
from engine.sampling.logprobs import token_logprob
from engine.sampling.matcher import Matcher
from engine.sampling.noise import divided, gumbel_argmax
from engine.sampling.noise_bits import key_of
from engine.sampling.penalties import Penalties
from engine.wire.messages import TokenLogprob

UNSETTLED = -2
"""Stands for a token that could have been known, and is drawn when it is needed."""
_UNITS = 2**40  # units of a probability, in sums of integers


@dataclass(frozen=True)
class LogitsView:
    """The target's logits at a tree's nodes. rows: [nodes, vocab] in any type. settled: tokens are drawn from them
    unchanged, whatever came before. known: [nodes] the tokens that are drawn at each node from unchanged logits, if
    these are known (`Sampler.is_plain`); `UNSETTLED` at nodes where they are not.
    """

    rows: Tensor
    settled: bool
    known: Sequence[int] | None = None

    def __getitem__(self, node: int) -> NodeLogits:
        return NodeLogits(self, node)

    def best_of(self, node: int) -> int:
        """Return the argmax of a node's logits, `NAN` if they hold NaN."""
        return argmax(self.rows[node : node + 1])[0] if self.known is None else self.known[node]


@dataclass(frozen=True)
class NodeLogits:
    """One node's choices, as `Sampler.draw` takes them."""

    choices: LogitsView
    node: int

    @property
    def settled(self) -> bool:
        return self.choices.settled

    @property
    def best(self) -> int:
        return self.choices.best_of(self.node)

    @property
    def logits(self) -> Tensor:
        """[vocab] float32"""
        return self.choices.rows[self.node].float()

    def sampled(self, temperature: float, seed: int, position: int) -> int:
        """Draw from softmax(logits / temperature); `NAN` if the logits hold NaN."""
        rows, known = self.choices.rows, self.choices.known
        if known is not None and known[self.node] != UNSETTLED:
            return known[self.node]
        if rows.device.type == "cpu" and rows.dtype == torch.bfloat16:
            bits = rows.view(torch.int16).numpy()
            return int(draw_bfloat16(key_of(seed, position), bits, self.node, temperature))
        return gumbel_argmax(divided(self.logits, temperature), seed, position)


class Sampler:
    """Draws a request's tokens one after another: penalties and bias, minimum length, grammar, temperature, top-k,
    top-p, min-p (as `transformers` does), and then Gumbel-max (its noise is keyed by seed, position and token, not by
    history: docs/exactness.md).

    answer: tokens drawn already, by an earlier sampler; the matcher has followed them. finish_reason: None while the
    request runs, then "eos", "stop" (a stop token) or "length". logprobs: of the tokens drawn since they were last
    taken, if requested.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        eos_tokens: Iterable[int],
        vocab_size: int,
        answer: Sequence[int] = (),
        matcher: Matcher | None = None,
    ):
        self.params = params
        self.finish_reason: str | None = None
        self.drawn = len(answer)
        self.logprobs: list[TokenLogprob] = []
        self._position = len(prompt) + len(answer)
        self._eos = sorted(token for token in eos_tokens if token < vocab_size)
        self._stop = sorted({token for token in params.stop_token_ids if token < vocab_size})
        self._matcher = matcher
        self._penalties = Penalties(params, prompt, answer, vocab_size)
        self._greedy = params.greedy
        self._truncates = bool(params.top_k or (params.top_p or 1.0) < 1 or params.min_p)

    @property
    def position(self) -> int:
        """The absolute position of the next token."""
        return self._position

    @property
    def is_plain(self) -> bool:
        """Whether tokens are drawn from the logits alone, so that they can be drawn before it is known which nodes are
        accepted. A grammar may still rule a token out.
        """
        return self._is_settled and (self._greedy or not self._truncates)

    @property
    def has_grammar(self) -> bool:
        """Whether a grammar may rule tokens out."""
        return self._matcher is not None

    @property
    def _is_settled(self) -> bool:
        return not self._penalties and self._is_long_enough

    def choices(self, logits: Tensor, known: Sequence[int] | None = None) -> LogitsView:
        """Return the choices that `logits`, [nodes, vocab] in any type, leave. known: see `LogitsView`."""
        return LogitsView(logits, self._is_settled, known)

    def draw(self, choice: NodeLogits) -> int:
        """Draw the next token. Raises NotANumber if the logits are not a distribution, RequestFailed if the grammar
        cannot be followed; then nothing has been drawn, and the next call raises the same.
        """
        token = self._choose(choice)
        if token == NAN:
            raise NotANumber(
                f"logits are not numbers (NaN) at position {self._position}: the model overflows on this text, or its "
                "weights are damaged; try dtype: float32, or get the checkpoint again"
            )
        ends = token in self._eos and (not self.params.ignore_eos or self._matcher is not None)
        stops = token in self._stop
        if self._matcher is not None and not ends and not stops:
            self._matcher.accept(token)
            ends = self._matcher.ended
        if self.params.logprobs is not None:
            self.logprobs.append(token_logprob(choice.logits, token, self.params.logprobs))
        self.drawn += 1
        self._position += 1
        self._penalties.saw(token)
        if ends or stops:
            self.finish_reason = "stop" if stops else "eos"
        elif self.drawn >= self.params.max_tokens:
            self.finish_reason = "length"
        return token

    def take_logprobs(self) -> tuple[TokenLogprob, ...]:
        """Return the log-probabilities of the tokens drawn since the last call."""
        taken, self.logprobs = tuple(self.logprobs), []
        return taken

    def _choose(self, choice: NodeLogits) -> int:
        if self._matcher is None:
            return self._best(choice, None)
        if self._greedy or not self._truncates:
            token = self._best(choice, None)  # what wins among all tokens also wins among the allowed ones
            if token == NAN or self._may_come(token):
                return token
        return self._best(choice, self._allowed(choice.logits))

    def _may_come(self, token: int) -> bool:
        """Return whether the grammar allows `token` next."""
        assert self._matcher is not None
        if token in self._stop:
            return self._is_long_enough and (self._matcher.complete or self._matcher.allows(token))
        if token in self._eos:
            return self._matcher.complete and not self.params.ignore_eos
        return self._matcher.allows(token)

    def _allowed(self, logits: Tensor) -> Tensor:
        """Return [vocab] bool: the tokens that may come next, on the device of `logits`."""
        assert self._matcher is not None
        allowed, complete = self._matcher.allowed(), self._matcher.complete
        stops = allowed[self._stop] | complete  # some may be in the grammar's own text
        allowed[self._eos] = complete and self._may_end
        allowed[self._stop] = stops & self._is_long_enough
        if not allowed.any():  # nothing can follow, so the answer may end before min_tokens
            allowed[self._eos] = complete
        if not allowed.any():
            allowed[self._stop] = stops
        if not allowed.any():
            raise RequestFailed(
                f"the grammar lets none of the model's tokens come at position {self._position}: "
                f"{self._matcher.trouble or 'write it for text that the tokenizer can spell'}"
            )
        return torch.from_numpy(allowed).to(logits.device)

    @property
    def _is_long_enough(self) -> bool:
        return self.drawn >= self.params.min_tokens

    @property
    def _may_end(self) -> bool:
        return self._is_long_enough and not self.params.ignore_eos

    def _best(self, choice: NodeLogits, allowed: Tensor | None) -> int:
        """Draw from the tokens that are `allowed`, all if None."""
        params, temperature = self.params, self.params.temperature
        if allowed is None and choice.settled and (self._greedy or not self._truncates):
            return choice.best if self._greedy else choice.sampled(temperature, params.seed, self._position)
        logits = self._changed(choice.logits, allowed)
        if self._greedy:
            return argmax(logits[None])[0]
        scores = divided(logits, temperature)
        if self._truncates:
            among = slice(None) if allowed is None else allowed  # sorting a row of equal infinities takes for ever
            left = truncate(scores[among], params.top_k or 0, params.top_p or 1.0, params.min_p or 0.0)
            if int((left > -torch.inf).sum()) == 1:  # sorting has decided which of equals it is
                return argmax(scores[None])[0]
            scores = left if allowed is None else scores.masked_scatter(allowed, left)
        return gumbel_argmax(scores, params.seed, self._position)

    def _changed(self, logits: Tensor, allowed: Tensor | None) -> Tensor:
        """Return [vocab] float32: the logits with penalties, and with tokens that may not come masked."""
        if self._penalties:
            logits = self._penalties(logits)
        if allowed is not None:
            return logits.masked_fill(~allowed, -torch.inf)
        if not self._is_long_enough and (ends := self._eos + self._stop):
            return logits.index_fill(0, torch.tensor(ends, device=logits.device), -torch.inf)
        return logits


def _running_sum(probs: Tensor) -> Tensor:
    """Return [n] the sums of the first 1 to n probabilities, the same bits in every run."""
    return probs.cumsum(-1) if probs.device.type == "cpu" else _sum_as_integers(probs)


def _sum_as_integers(probs: Tensor) -> Tensor:
    """Return `_running_sum` where numbers are added in varying order, as on a GPU: integers do not notice."""
    return (probs.double() * _UNITS).long().cumsum(-1).double() / _UNITS


def truncate(scores: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Return `scores` [..., vocab] with -inf at the tokens that top-k, top-p and min-p, in this order, rule out."""
    if 0 < top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < scores.topk(top_k).values[..., -1:], -torch.inf)
    if top_p < 1:
        ascending, tokens = scores.sort()
        dropped = _running_sum(ascending.softmax(-1)) <= 1 - top_p
        dropped[..., -1] = False
        scores = scores.masked_fill(torch.zeros_like(dropped).scatter_(-1, tokens, dropped), -torch.inf)
    if min_p > 0:
        prob = scores.softmax(-1)
        scores = scores.masked_fill(prob < min_p * prob.amax(-1, keepdim=True), -torch.inf)
    return scores


def verify(
    tree: TokenTree, logits: Tensor, sampler: Sampler, known: Sequence[int] | None = None
) -> tuple[list[int], list[int]]:
    """Accept the drawn path. logits: [nodes, vocab] in any type, the target's after each node; known: as for
    `Sampler.choices`.

    Returns the accepted nodes, root first, and the tokens emitted: the path's below the root, then the bonus token. If
    nothing can be drawn at a node, the path ends before it: what was drawn is emitted, as plain decoding emits it, and
    the next round begins at that node. Only at the root this is an error.
    """
    choices = sampler.choices(logits, known)
    node: int | None = 0
    path, tokens = list[int](), list[int]()
    while node is not None:
        try:
            token = sampler.draw(choices[node])
        except RequestFailed:
            if not path:
                raise
            break
        path.append(node)
        tokens.append(token)
        node = None if sampler.finish_reason else tree.child(node, token)
    return path, tokens
