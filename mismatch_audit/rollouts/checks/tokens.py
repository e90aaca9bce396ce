"""Checks of token ids: ends of responses, vocabulary, BOS, separators, decode and encode."""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol

import numpy as np

from mismatch_audit.rollouts.checks.alignment import SampleCheck
from mismatch_audit.rollouts.checks.base import CheckResult
from mismatch_audit.rollouts.checks.sample import Sample
from mismatch_audit.rollouts.checks.streaming import Streaming
from mismatch_audit.rollouts.checks.view import TokenView
from mismatch_audit.rollouts.schema import Header, Origin


class Tokenizer(Protocol):
    """The part of a tokenizer that the round-trip check needs."""

    def decode(self, ids: list[int], **options: Any) -> str: ...

    def encode(self, text: str, **options: Any) -> list[int]: ...


class EndOfSequence(Streaming):
    """finish_reason and the last token must agree."""

    code = "STOP_WITHOUT_EOS"
    title = "responses that stopped do not end in a known EOS"
    needs: tuple[str, ...] = ("finish_reason",)
    priority = 58
    remedy = (
        "Give the trainer every EOS id of the model's generation_config: what it does not know as "
        "an end it counts as cut off."
    )
    KEPT = 4096

    def __init__(self) -> None:
        super().__init__()
        self.stopped: Counter[int] = Counter()
        self.cut: Counter[int] = Counter()

    def see(self, tokens: TokenView) -> None:
        batch = tokens.batch
        full = batch.lengths > 0
        last = batch.tokens("token_ids")[batch.offsets[1:][full] - 1]
        reason = tokens.scalar("finish_reason")[full]
        for name, counter in (("stop", self.stopped), ("length", self.cut)):
            ids, counts = np.unique(last[reason == name], return_counts=True)
            for i, c in zip(ids.tolist(), counts.tolist(), strict=True):
                if i in counter or len(counter) < self.KEPT:
                    counter[i] += c

    def judge(self, header: Header) -> list[CheckResult]:
        if not header.eos_ids:
            return [self.too_little("needs the model's EOS ids in the log's header (eos_ids)")]
        eos = set(header.eos_ids)
        stops, cuts = self.stopped.total(), self.cut.total()
        odd = Counter({i: c for i, c in self.stopped.items() if i not in eos})
        forced = sum(c for i, c in self.cut.items() if i in eos)
        answers = []
        if stops and odd.total() > 0.02 * stops and odd.total() >= 3:
            rows = [{"last_token": i, "sequences": c} for i, c in odd.most_common(5)]
            text = f"{odd.total()} of {stops} responses stopped at a token outside {sorted(eos)}"
            # an unknown EOS is one token or a few; a stop string ends in whatever it cuts
            few = sum(c for _, c in odd.most_common(3)) >= 0.8 * odd.total()
            if not few:
                text += ", at many different ones, as stop strings do"
            answers.append(self.found(text, rows, severity="error" if few else "note"))
        if cuts and forced >= 3 and forced > 0.02 * cuts:
            answers.append(
                self.found(
                    f"{forced} of {cuts} responses that ran out of length end in EOS",
                    [{"sequences": forced, "of": cuts}],
                    code="FORCED_EOS",
                    title="EOS was appended to responses that were cut off",
                    remedy="Mark such a token as forced and take it out of the loss.",
                )
            )
        if answers:
            return answers
        if not stops:
            return [self.too_little("no response has finish_reason 'stop'")]
        return [self.clean(f"{stops} stopped responses end in EOS")]


class TokenIds(Streaming):
    """Ids outside the vocabulary, and a doubled BOS."""

    code = "TOKEN_OUTSIDE_VOCABULARY"
    title = "token ids outside the vocabulary"
    needs: tuple[str, ...] = ("token_ids",)
    priority = 100
    remedy = (
        "Mask the padded rows of the head on both sides; check that one tokenizer made the ids."
    )

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high, self.tokens = 0, 0, 0
        self.rows = self.doubled = 0
        self.first: int | None = None
        self.one_first = True
        self.varied = False

    def see(self, tokens: TokenView) -> None:
        ids = tokens.batch.tokens("token_ids")
        if not len(ids):
            return
        self.low, self.high = min(self.low, int(ids.min())), max(self.high, int(ids.max()))
        self.tokens += len(ids)
        starts = tokens.batch.offsets[:-1][tokens.batch.lengths >= 3]
        if not len(starts):
            return
        first = ids[starts]
        if self.first is None:
            self.first = int(first[0])
        self.one_first &= bool((first == self.first).all())
        self.varied |= bool((ids[starts + 2] != ids[starts[0] + 2]).any())
        self.rows += len(starts)
        self.doubled += int((first == ids[starts + 1]).sum())

    def judge(self, header: Header) -> list[CheckResult]:
        answers = []
        size = header.vocab_size
        row = {"smallest": self.low, "largest": self.high, "vocab_size": size}
        if self.low < 0 or (size is not None and self.high >= size):
            answers.append(self.found(f"ids reach from {self.low} to {self.high}", [row]))
        elif size is None:
            answers.append(self.too_little("needs vocab_size in the log's header"))
        else:
            answers.append(self.clean(f"all {self.tokens} ids are below {size}", [row]))
        if self.rows >= 3 and self.doubled == self.rows and self.one_first:
            answers.append(
                self.found(
                    f"every one of {self.rows} sequences starts with token {self.first} twice",
                    [{"token": self.first, "sequences": self.rows}],
                    code="DOUBLE_BOS",
                    title="sequences start with two BOS tokens",
                    severity="warning",
                    remedy="The chat template already writes BOS: encode with "
                    "add_special_tokens=False.",
                )
            )
        return answers


class TurnSeparator(SampleCheck):
    """What follows EOS inside a response against what follows it inside the rendered prompts."""

    code = "TURN_SEPARATOR_MISSING"
    title = "the separator after EOS is missing between turns"
    needs: tuple[str, ...] = ("origin", "token_ids")
    priority = 57
    remedy = (
        "The engine stops at EOS while the template goes on (a newline, say): append what the "
        "template writes after EOS before the next turn, as unsampled tokens."
    )

    def judge(self, header: Header) -> list[CheckResult]:
        if not header.eos_ids:
            return [self.too_little("needs the model's EOS ids in the log's header (eos_ids)")]
        eos = np.array(header.eos_ids)
        rendered: Counter[int] = Counter()
        joined: Counter[int] = Counter()
        for row in self.sampled_rows("origin", "token_ids"):
            ids, origin = row.columns["token_ids"], row.columns["origin"]
            ends = np.flatnonzero((ids[:-1, None] == eos).any(-1))
            ends = ends[origin[ends + 1] != Origin.SAMPLED]
            in_prompt = origin[ends] == Origin.PROMPT
            rendered.update(ids[ends[in_prompt] + 1].tolist())
            joined.update(ids[ends[origin[ends] == Origin.SAMPLED] + 1].tolist())
        if rendered.total() < 10 or joined.total() < 10:
            return [
                self.too_little(
                    "needs 10 EOS inside prompts and 10 between the turns of a response; saw "
                    f"{rendered.total()} and {joined.total()}"
                )
            ]
        usual, count = rendered.most_common(1)[0]
        row_out = {
            "after_eos_in_prompts": usual,
            "share_in_prompts": count / rendered.total(),
            "share_in_responses": joined[usual] / joined.total(),
            "usual_in_responses": joined.most_common(1)[0][0],
        }
        if count >= 0.9 * rendered.total() and joined[usual] < 0.5 * joined.total():
            text = f"token {usual} follows EOS in prompts, and seldom in responses"
            return [self.found(text, [row_out])]
        return [self.clean("turns are joined as the template joins them", [row_out])]


class RoundTrip(SampleCheck):
    """encode(decode(prompt)) == prompt. Prompts come from the tokenizer, so they must return;
    a sampled response need not (a policy may sample a spelling that the tokenizer would not)."""

    code = "TOKENIZER_MISMATCH"
    title = "prompts do not survive decode and encode"
    needs: tuple[str, ...] = ("token_ids",)
    priority = 99
    remedy = "The tokenizer given is not the log's: compare tokenizer digests, special tokens too."
    TRIED = 128

    def __init__(self, sample: Sample, tokenizer: Tokenizer | None = None) -> None:
        super().__init__(sample)
        self.tokenizer = tokenizer

    def judge(self, header: Header) -> list[CheckResult]:
        if self.tokenizer is None:
            return [self.too_little("needs the model's tokenizer")]
        counts = {"prompt": [0, 0], "response": [0, 0]}
        for row in self.sampled_rows("token_ids")[: self.TRIED]:
            ids, n = row.columns["token_ids"].tolist(), int(row.scalars["prompt_len"])
            for name, part in (("prompt", ids[:n]), ("response", ids[n:])):
                if part:
                    counts[name][0] += self._returns(part)
                    counts[name][1] += 1
        (good, tried), (same, responses) = counts["prompt"], counts["response"]
        if tried < 3:
            return [self.too_little("needs 3 prompts")]
        rows = [
            {"part": "prompt", "return": good, "of": tried},
            {"part": "response", "return": same, "of": responses},
        ]
        if good < 0.9 * tried:
            return [self.found(f"{tried - good} of {tried} prompts change", rows)]
        return [self.clean(f"{good} of {tried} prompts, {same} of {responses} responses", rows)]

    def _returns(self, ids: list[int]) -> bool:
        assert self.tokenizer is not None
        text = self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return list(self.tokenizer.encode(text, add_special_tokens=False)) == ids
