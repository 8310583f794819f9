"""Needles in a haystack: the eight NIAH tasks."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
from sbeval.tasks.ruler.drafts import HaystackDraft, Insert
from sbeval.tasks.ruler.haystacks import Haystack, LineHaystack, NoiseHaystack
from sbeval.tasks.ruler.needles import NeedleType, draw, draw_distinct
from sbeval.tasks.ruler.options import whole_number
from sbeval.tasks.ruler.seeding import seeded_order, seeded_random
from sbeval.tasks.ruler.tokens import TokenCounter
from sbeval.tasks.ruler.wording import niah_wording

from sbeval.errors import UserError

HaystackType = Literal["noise", "needle", "essay"]
POOL_LINES = 8192
DEPTHS = tuple(round(100 * i / 39) for i in range(40))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NiahOptions:
    """One needle task.

    Attributes:
        type_haystack: noise sentences, other needles, or essays.
        type_needle_k: what the keys are.
        type_needle_v: what the values are.
        num_needle_k: keys, raised to `num_needle_q` where that is more.
        num_needle_v: values of each key.
        num_needle_q: keys asked for.
    """

    type_haystack: HaystackType
    type_needle_k: NeedleType = "words"
    type_needle_v: NeedleType = "numbers"
    num_needle_k: int = 1
    num_needle_v: int = 1
    num_needle_q: int = 1

    @classmethod
    def read(cls, metadata: Mapping[str, Any], defaults: Mapping[str, Any]) -> "NiahOptions":
        """Reads the options from the task's metadata over the task's own definition.

        Raises:
            UserError: a value is not one of those allowed.
        """
        values = {**defaults, **{key: metadata[key] for key in NIAH_KEYS if key in metadata}}
        for key, allowed in (
            ("type_haystack", get_args(HaystackType)),
            ("type_needle_k", get_args(NeedleType)),
            ("type_needle_v", get_args(NeedleType)),
        ):
            if key in values and values[key] not in allowed:
                raise UserError(f"Expected {key} to be one of {', '.join(allowed)}, found {values[key]!r}.")
        for key in ("num_needle_k", "num_needle_v", "num_needle_q"):
            values[key] = whole_number(values, key, 1, least=1)
        values["num_needle_k"] = max(values["num_needle_k"], values["num_needle_q"])
        if values["num_needle_k"] * values["num_needle_v"] > len(DEPTHS) and values["type_haystack"] == "essay":
            raise UserError(f"Essays have {len(DEPTHS)} depths, so at most {len(DEPTHS)} needles; ask for fewer.")
        return cls(**values)


NIAH_KEYS = frozenset(field.name for field in dataclasses.fields(NiahOptions))


class NiahGenerator:
    """Makes the samples of one needle task.

    Args:
        options: the task.
        task: its name, part of every seed.
        seed: the run's seed.
        depths_percent: depths to go through in turn, None for random ones.
        counter: the model's tokenizer.
    """

    def __init__(
        self,
        options: NiahOptions,
        *,
        task: str,
        seed: int,
        depths_percent: Sequence[float] | None,
        counter: TokenCounter,
    ) -> None:
        self.options = options
        self._name = (task, seed)
        self._depths_percent = depths_percent
        self._counter = counter
        self._wording = niah_wording()
        self._one = options.num_needle_q * options.num_needle_v == 1

    def needle(self, key: str, value: str) -> str:
        """Returns the needle sentence; values keep their plural name in it, as RULER has it."""
        return self._wording.needle.format(type_needle_v=self.options.type_needle_v, key=key, value=value)

    @functools.cached_property
    def _pool(self) -> tuple[list[str], frozenset[str], np.ndarray[Any, np.dtype[np.int64]]]:
        """Lines of a needle haystack, their keys, and their token counts."""
        rng = seeded_random(*self._name, "pool")
        keys = draw_distinct(self.options.type_needle_k, POOL_LINES, rng, frozenset())
        lines = [self.needle(key, draw(self.options.type_needle_v, rng)) + "\n" for key in keys]
        return lines, frozenset(keys), self._counter.count_pieces(lines)

    def _haystack(self, index: int) -> Haystack:
        if self.options.type_haystack == "noise":
            line = self._wording.noise + "\n"
            return NoiseHaystack(line=line, line_tokens=int(self._counter.count_pieces([line])[0]))
        lines, _, tokens = self._pool
        order = seeded_order(len(lines), *self._name, index, "haystack")
        return LineHaystack(pool=lines, order=order, cumulative_tokens=np.concatenate(([0], np.cumsum(tokens[order]))))

    def draft(self, index: int) -> HaystackDraft:
        """Makes sample `index`."""
        options, rng = self.options, seeded_random(*self._name, index, "needles")
        taken = self._pool[1] if options.type_haystack == "needle" else frozenset()
        keys = draw_distinct(options.type_needle_k, options.num_needle_k, rng, taken)
        values = draw_distinct(options.type_needle_v, options.num_needle_k * options.num_needle_v, rng, frozenset())
        of_key = {key: values[i * options.num_needle_v : (i + 1) * options.num_needle_v] for i, key in enumerate(keys)}
        asked = rng.sample(keys, options.num_needle_q)
        needles = [(key, value) for key in keys for value in of_key[key]]
        rng.shuffle(needles)
        inserts = self._inserts(needles, set(asked), self._fractions(index, len(needles), needles, set(asked)))
        query = ", ".join(asked[:-1]) + ", and " + asked[-1] if len(asked) > 1 else asked[0]
        template, noun = self._template()
        opening, closing = template.split("{context}")
        prefix = self._wording.prefix_one if self._one else self._wording.prefix_many
        return HaystackDraft(
            references=[value for key in asked for value in of_key[key]],
            answer_prefix=prefix.format(type_needle_v=noun, query=query),
            opening=[opening.format(type_needle_v=noun)],
            closing=closing.lstrip("\n").format(type_needle_v=noun, query=query),
            haystack=self._haystack(index),
            inserts=inserts,
            least_units=max(1, len(needles)),
            most_units=POOL_LINES if options.type_haystack == "needle" else None,
        )

    def _template(self) -> tuple[str, str]:
        """Returns template and noun, in RULER's singular where one value is asked for."""
        template, noun = self._wording.template, self.options.type_needle_v
        if not self._one:
            return template, noun
        for plural, singular in (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer")):
            template = template.replace(plural, singular)
        return template, noun[:-1]

    def _fractions(self, index: int, count: int, needles: Sequence[tuple[str, str]], asked: set[str]) -> list[float]:
        """Returns the relative depth of each needle, in the order of `needles`."""
        rng = seeded_random(*self._name, index, "depths")
        if self.options.type_haystack == "essay":
            fractions = [depth / 100 for depth in rng.sample(DEPTHS, count)]
        else:
            fractions = [rng.random() for _ in range(count)]
        if self._depths_percent is not None:
            depth = self._depths_percent[index % len(self._depths_percent)] / 100
            fractions[next(i for i, (key, _) in enumerate(needles) if key in asked)] = depth
        return fractions

    def _inserts(self, needles: Sequence[tuple[str, str]], asked: set[str], fractions: Sequence[float]) -> list[Insert]:
        inline = self.options.type_haystack == "essay"
        texts = [self.needle(key, value) + ("" if inline else "\n") for key, value in needles]
        counts = self._counter.count_pieces([" " + text if inline else text for text in texts])
        inserts = [
            Insert(text=text, tokens=int(tokens), fraction=fraction, asked=key in asked)
            for text, tokens, fraction, (key, _) in zip(texts, counts.tolist(), fractions, needles, strict=True)
        ]
        return sorted(inserts, key=lambda insert: insert.fraction)
