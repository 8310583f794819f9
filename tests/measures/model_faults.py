"""Plants faults in a tiny Llama and says what becomes of its scores and answers; run it as a script.

Each fault shows only under a condition: in batches of some size, above some length, at some positions, behind a cache,
in bf16, or once the model has read something else. A run that asks for scores or answers is compared with the sound
model, each text alone:

- detected: the run falls back to a way that is right, or refuses in a sentence.
- harmless: nothing is said, and the numbers are right.
- WRONG: nothing is said, or something is done, and the numbers are wrong.
"""

import argparse
import contextlib
import dataclasses
import functools
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "support")]

import torch  # noqa: E402
import transformers  # noqa: E402
from torch import Tensor  # noqa: E402

from sbeval.errors import UserError  # noqa: E402
from sbeval.model_adapters.lm import StickBreakingLM  # noqa: E402
from tests.measures import families  # noqa: E402
from tests.model_adapters.small import LINES, cache_argument, english, generated, instances, likelihoods, load_lm  # noqa: E402

Own = Callable[..., Any]
Fault = Callable[[Own, Any, dict[str, Any]], Any]
Numbers = list[float] | list[str]

TEXT = english()
SHORT = [(line[: len(line) // 2], line[len(line) // 2 :][:12]) for line in LINES]
BRIEF = [(line.split()[0], " is better") for line in LINES]
LONG = [(TEXT[start : start + 120 + 7 * (start % 5)], TEXT[start + 160 : start + 168]) for start in range(0, 600, 40)]
EQUAL = [(TEXT[start : start + 40], " is") for start in range(0, 640, 16)]
SHARED = [(TEXT[:170] + end, line) for end in ("", " ", "\nNow") for line in ("\nSparse is better", " is", " a")]
PROMPTS = [line[: 8 + 5 * (number % 7)] for number, line in enumerate(LINES[:14])]
SETTING = {"until": [], "max_gen_toks": 24, "num_beams": 1}


def held(given: dict[str, Any]) -> int:
    cache = cache_argument(given)
    return 0 if cache is None else int(cache.get_seq_length())


def moved(output: Any, by_BLD: Tensor) -> Any:
    output.last_hidden_state = output.last_hidden_state + by_BLD.to(output.last_hidden_state.dtype)
    return output


def mixing(own: Own, body: Any, given: dict[str, Any], share: float = 0.4) -> Any:
    output = own(body, **given)
    hidden = output.last_hidden_state
    return moved(output, share * (hidden.roll(1, 0) - hidden))


def when(condition: Callable[[dict[str, Any]], bool], fault: Fault) -> Fault:
    """A fault in those calls for which a condition holds."""
    return lambda own, body, given: fault(own, body, given) if condition(given) else own(body, **given)


def rows(given: dict[str, Any]) -> int:
    return len(given["input_ids"]) if given.get("input_ids") is not None else 0


def length(given: dict[str, Any]) -> int:
    return int(given["input_ids"].shape[1]) if given.get("input_ids") is not None else 0


def in_rows(chosen: Callable[[int, int], bool]) -> Fault:
    """Channels of some rows change places: `chosen` is given a row's number and the number of rows."""

    def fault(own: Own, body: Any, given: dict[str, Any]) -> Any:
        output = own(body, **given)
        hidden = output.last_hidden_state
        marks_B = torch.tensor([chosen(row, len(hidden)) for row in range(len(hidden))])
        return moved(output, marks_B[:, None, None] * (hidden.roll(1, -1) - hidden))

    return fault


def seeing(later: Callable[[Tensor], Tensor], share: float = 0.5) -> Fault:
    """Positions take up a share of what `later` makes of all hidden states, [B, L, D]."""

    def fault(own: Own, body: Any, given: dict[str, Any]) -> Any:
        output = own(body, **given)
        hidden = output.last_hidden_state
        return moved(output, share * later(hidden))

    return fault


def next_at(remainder: int, every: int) -> Callable[[Tensor], Tensor]:
    def later(hidden_BLD: Tensor) -> Tensor:
        marks_L = torch.arange(hidden_BLD.shape[1]) % every == remainder
        following_BLD = torch.cat([hidden_BLD[:, 1:], hidden_BLD[:, -1:] * 0], dim=1)
        return marks_L[:, None] * following_BLD

    return later


def far_ahead(distance: int) -> Callable[[Tensor], Tensor]:
    return lambda hidden: torch.cat([hidden[:, distance:], hidden[:, :distance] * 0], dim=1)


def of_its_chunk(chunk: int) -> Callable[[Tensor], Tensor]:
    """The mean of a whole chunk; of a shorter text, nothing."""

    def later(hidden_BLD: Tensor) -> Tensor:
        whole = hidden_BLD.shape[1] // chunk * chunk
        mean_BLD = hidden_BLD[:, :whole].unflatten(1, (-1, chunk)).mean(2).repeat_interleave(chunk, 1)
        return torch.cat([mean_BLD, hidden_BLD[:, whole:] * 0], dim=1)

    return later


def near_the_end(last: int) -> Callable[[Tensor], Tensor]:
    """The last token, seen from the few positions before it."""

    def later(hidden_BLD: Tensor) -> Tensor:
        places_L = torch.arange(hidden_BLD.shape[1])
        marks_L = (places_L >= len(places_L) - last) & (places_L < len(places_L) - 1)
        return marks_L[:, None] * hidden_BLD[:, -1:]

    return later


def padding_of(more_than: int, *, fewest_rows: int = 1) -> Fault:
    """Rows that end in more than so many zeros, with which scoring pads, have channels that change places."""

    def fault(own: Own, body: Any, given: dict[str, Any]) -> Any:
        output = own(body, **given)
        hidden = output.last_hidden_state
        zeros_B = (given["input_ids"].flip(1) == 0).long().cumprod(1).sum(1)
        marks_B = (zeros_B > more_than) & (len(hidden) >= fewest_rows)
        return moved(output, marks_B[:, None, None] * (hidden.roll(1, -1) - hidden))

    return fault


def left_padding_of(more_than: int) -> Fault:
    def fault(own: Own, body: Any, given: dict[str, Any]) -> Any:
        output = own(body, **given)
        mask = given.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            return output
        hidden = output.last_hidden_state
        marks_B = (mask == 0).sum(1) > more_than
        return moved(output, marks_B[:, None, None] * (hidden.roll(1, -1) - hidden))

    return fault


def after_a_cache(condition: Callable[[int, dict[str, Any]], bool], chosen: Callable[[int, int], bool]) -> Fault:
    """Channels change places where a call follows so many tokens in a cache."""

    def wrong(given: dict[str, Any]) -> bool:
        tokens = held(given)
        return tokens > 0 and condition(tokens, given)

    return when(wrong, in_rows(chosen))


class Remembering:
    """A fault of what a model has read before: it adds a share of the channels in another order."""

    def __init__(self, share: Callable[[list[int]], float]) -> None:
        self._read: list[int] = []
        self._share = share

    def __call__(self, own: Own, body: Any, given: dict[str, Any]) -> Any:
        output = own(body, **given)
        hidden = output.last_hidden_state
        share = self._share(self._read)
        self._read.append(length(given))
        return moved(output, share * (hidden.roll(1, -1) - hidden))


def everywhere(row: int, rows: int) -> bool:
    return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A fault, and a run in which it shows.

    Attributes:
        plant: makes the fault anew, for one that remembers.
        ask: asks an adapter for numbers.
        batch_size: of the run.
        dtype: of the model.
    """

    plant: Callable[[], Fault]
    ask: Callable[[StickBreakingLM], Numbers]
    batch_size: int | str = "auto"
    dtype: str = "float32"


def scores_of(*pairs: Sequence[tuple[str, str]]) -> Callable[[StickBreakingLM], Numbers]:
    return lambda lm: [score for each in pairs for score in likelihoods(lm, each)]


def rolling(lm: StickBreakingLM) -> Numbers:
    texts = [(TEXT[:400],), *((line,) for line in LINES)]
    return lm.loglikelihood_rolling(instances("loglikelihood_rolling", texts), disable_tqdm=True)


def answers(lm: StickBreakingLM, *, setting: dict[str, Any] = SETTING, prompts: Sequence[str] = PROMPTS) -> Numbers:
    return generated(lm, [(prompt, setting) for prompt in prompts])


in_slots = functools.partial(answers, setting={"until": [], "max_gen_toks": 24})
long_answers = functools.partial(answers, prompts=[TEXT[start : start + 90] for start in range(0, 200, 20)])

CASES: dict[str, Case] = {
    # rows of a batch
    "12 rows or more mix": Case(plant=lambda: when(lambda g: rows(g) >= 12, mixing), ask=scores_of(SHORT)),
    "30 rows or more mix": Case(plant=lambda: when(lambda g: rows(g) >= 30, mixing), ask=scores_of(EQUAL)),
    "9 rows or more mix, of short texts alone": Case(
        plant=lambda: when(lambda g: rows(g) >= 9 and length(g) < 20, mixing), ask=scores_of(BRIEF)
    ),
    "2 rows or more mix, in texts over 60 tokens": Case(
        plant=lambda: when(lambda g: rows(g) >= 2 and length(g) > 60, mixing), ask=scores_of(LONG)
    ),
    "the last row, of 10 or more": Case(
        plant=lambda: in_rows(lambda row, many: many >= 10 and row == many - 1), ask=scores_of(SHORT)
    ),
    "every seventh row, from the fourteenth on": Case(
        plant=lambda: in_rows(lambda row, many: row >= 13 and row % 7 == 6), ask=scores_of(SHORT)
    ),
    "the first half of 20 rows or more": Case(
        plant=lambda: in_rows(lambda row, many: many >= 20 and row < many // 2), ask=scores_of(EQUAL)
    ),
    "16 rows or more mix by a tenth, in bf16": Case(
        plant=lambda: when(lambda g: rows(g) >= 16, functools.partial(mixing, share=0.3)),
        ask=scores_of(EQUAL),
        dtype="bfloat16",
    ),
    # padding
    "more than 16 tokens of padding on the right": Case(plant=lambda: padding_of(16), ask=scores_of(SHORT)),
    "padding on the right, in 10 rows or more": Case(
        plant=lambda: padding_of(0, fewest_rows=10), ask=scores_of(SHORT), batch_size=16
    ),
    "more than 12 tokens of padding on the left": Case(plant=lambda: left_padding_of(12), ask=answers, batch_size=16),
    # later tokens
    "the next token, at every eighth position": Case(plant=lambda: seeing(next_at(3, 8)), ask=rolling),
    "a chunk of 32 tokens sees all of itself": Case(plant=lambda: seeing(of_its_chunk(32)), ask=scores_of(LONG)),
    "the token 30 positions ahead": Case(plant=lambda: seeing(far_ahead(30)), ask=rolling),
    "the last token, near the end of texts over 50 tokens": Case(
        plant=lambda: when(lambda g: length(g) > 50, seeing(near_the_end(6))), ask=rolling
    ),
    "a chunk of 48 tokens sees itself, in bf16": Case(
        plant=lambda: seeing(of_its_chunk(48)), ask=scores_of(LONG), dtype="bfloat16"
    ),
    # caches
    "a token after 40 tokens in a cache": Case(
        plant=lambda: after_a_cache(lambda tokens, g: tokens > 40 and length(g) == 1, everywhere),
        ask=long_answers,
        batch_size=4,
    ),
    "a token that begins a chunk of 16": Case(
        plant=lambda: after_a_cache(lambda tokens, g: tokens % 16 == 0 and length(g) == 1, everywhere),
        ask=long_answers,
        batch_size=1,
    ),
    "the last of 10 rows or more after a cache": Case(
        plant=lambda: after_a_cache(lambda tokens, g: True, lambda row, many: many >= 10 and row == many - 1),
        ask=answers,
        batch_size=16,
    ),
    "several tokens after 60 tokens in a cache": Case(
        plant=lambda: after_a_cache(lambda tokens, g: tokens > 60 and length(g) > 1, everywhere), ask=scores_of(SHARED)
    ),
    "10 slots or more mix": Case(plant=lambda: when(lambda g: rows(g) >= 10, mixing), ask=in_slots, batch_size=14),
    "the last of 12 slots or more": Case(
        plant=lambda: in_rows(lambda row, many: many >= 12 and row == many - 1), ask=in_slots, batch_size=14
    ),
    # what was read before
    "all texts after one of 60 tokens": Case(
        plant=lambda: Remembering(lambda read: 0.2 if any(tokens > 60 for tokens in read) else 0.0),
        ask=scores_of(LONG, SHORT),
    ),
    "texts read after 20 of 30 tokens": Case(
        plant=lambda: Remembering(lambda read: 0.2 * (sum(tokens > 30 for tokens in read) > 20)),
        ask=scores_of(LONG, EQUAL),
        batch_size=1,
    ),
}
FAST = (
    *("30 rows or more mix", "2 rows or more mix, in texts over 60 tokens", "the last row, of 10 or more"),
    *("padding on the right, in 10 rows or more", "the next token, at every eighth position"),
    *("a chunk of 32 tokens sees all of itself", "16 rows or more mix by a tenth, in bf16"),
    *("a token after 40 tokens in a cache", "several tokens after 60 tokens in a cache"),
    "all texts after one of 60 tokens",
)


@contextlib.contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Within it every Llama has a fault."""
    own = transformers.LlamaModel.forward
    with mock.patch.object(transformers.LlamaModel, "forward", lambda self, **given: fault(own, self, given)):
        yield


def is_right(found: Numbers, expected: Numbers, dtype: str) -> bool:
    """Whether scores are the expected ones but for rounding, and answers the same."""
    if isinstance(expected[0], str):
        return found == expected
    most = 1e-3 if dtype == "float32" else 0.25
    return max(abs(float(a) - float(b)) for a, b in zip(found, expected, strict=True)) < most


def verdict(case: Case, folder: Path) -> tuple[str, str]:
    """Returns what becomes of a fault, and what the self-test says; "no effect" where numbers are right without it."""
    options: dict[str, Any] = {"batch_size": case.batch_size, "dtype": case.dtype}
    expected = case.ask(load_lm(folder, **options | {"batch_size": 1}, self_test=False))
    with planted(case.plant()):
        shows = not is_right(case.ask(load_lm(folder, **options, self_test=False)), expected, case.dtype)
    if not shows:
        return "no effect", ""
    with planted(case.plant()):
        try:
            lm = load_lm(folder, **options)
            found = case.ask(lm)
        except UserError as error:
            return "refused", str(error)
    assert lm.session is not None
    outcome = lm.session.self_test
    right = is_right(found, expected, case.dtype)
    said = "fell back" if outcome.failed else "harmless"
    return said if right else "WRONG", str(outcome)


def main() -> None:
    """Prints a line for each fault, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="some faults; all, if none is named")
    names = parser.parse_args().names or list(CASES)
    logging.disable(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        families.save_tiny("llama", Path(folder) / "model")
        for number, name in enumerate(names):
            os.environ["SBEVAL_CACHE"] = str(Path(folder) / f"cache{number}")  # a fault is in no file of the model
            found, said = verdict(CASES[name], Path(folder) / "model")
            counts[found] = counts.get(found, 0) + 1
            print(f"{found:<10}{name}\n          {said[:400]}", flush=True)
    print(", ".join(f"{count} {found}" for found, count in counts.items()), f"of {len(names)}")


if __name__ == "__main__":
    main()
