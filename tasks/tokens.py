"""Loads the model's tokenizer, and counts the tokens of whole prompts and of their segments.

A prompt is written from segments, such as lines. If segments end where the pre-tokenizer splits the text, for instance
after a line break, then with most tokenizers the token count of a text is the sum of its segments' counts. So each
segment is tokenised once, and the sum of the counts is an estimate of the length of a prompt.
`tasks/ruler/sizes.py` checks such estimates against whole prompts.
"""

import functools
import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sbeval.corpora import cache_folder, tokenizer_sha256
from sbeval.corpora.tokenizers import AddedTokens, added_tokens, load_tokenizer, special_beginnings
from sbeval.errors import ENCODING, UserError, panics_as_errors
from sbeval.fingerprint.checkpoint import WEIGHTS
from sbeval.hub_names import hub_commit
from sbeval.keeping.cache import keep_table, read_table
from sbeval.keeping.content import content_of

LINES = ("a.\n", "A")
LINE_START = ("a.\n", " a")
WORDS = ("a", " a")
TAIL_CHARACTERS = 400
"""Only this many characters at the end of a text can influence how the following text is tokenised."""

TOKENIZER_KEYS = ("tokenizer", "tokenizer_path", "pretrained", "model")
_LOADING_KEYS = ("revision", "subfolder", "trust_remote_code", "add_bos_token")


class TokenCounter:
    """Counts tokens with one Hugging Face tokenizer, fast or slow, in batches over all cores.

    Attributes:
        special_tokens: whether the model adapter lets the tokenizer add special tokens, such as BOS.
        keeps_suffix: whether the adapter keeps the special tokens that the tokenizer adds after a text, such as EOS.
    """

    def __init__(self, tokenizer: Any, *, special_tokens: bool = True, keeps_suffix: bool = False) -> None:
        self.tokenizer = tokenizer
        self.special_tokens = special_tokens
        self.keeps_suffix = keeps_suffix
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._segments: dict[tuple[str, str], dict[str, int]] = {}

    @functools.cached_property
    def sha256(self) -> str:
        """SHA-256 of everything that determines the tokenizer's output."""
        return tokenizer_sha256(self.tokenizer)

    @functools.cached_property
    def dropped(self) -> AddedTokens:
        """The special tokens that the tokenizer adds and the adapter drops; only a suffix can be dropped."""
        drops = self.special_tokens and not self.keeps_suffix
        return added_tokens(self.tokenizer)._replace(prefix=()) if drops else AddedTokens()

    def encode(self, texts: Sequence[str], *, special_tokens: bool) -> list[list[int]]:
        """Tokenises texts; with `special_tokens`, adds special tokens as the adapter does.

        The adapter adds none to a text that already begins with BOS.
        """
        encoded = self._encoded(texts, special_tokens)
        tokens = [(text if self._backend is None else text.ids, adds) for text, adds in encoded]
        return [self.dropped.without_suffix(ids) if adds else ids for ids, adds in tokens]

    @panics_as_errors(ENCODING)
    def encode_with_offsets(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Tokenises a text as the adapter does, with a fast tokenizer.

        Returns:
            Token ids, and the first and last + 1 character of each token, all int64 [tokens].
        """
        encoding = self._plain_backend().encode(text, add_special_tokens=self.special_tokens)
        ids = self.dropped.without_suffix(encoding.ids)
        offsets = np.array(encoding.offsets[: len(ids)], dtype=np.int64).reshape(-1, 2)
        return np.array(ids, dtype=np.int64), offsets[:, 0], offsets[:, 1]

    def count(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """Returns the token counts of whole prompts as the model sees them, BOS included, int64 [texts]."""
        return self._lengths(texts, special_tokens=True)

    def count_segments(self, segments: Iterable[str], between: tuple[str, str] = LINES) -> NDArray[np.int64]:
        """Returns how many tokens each segment adds inside a text, int64 [segments]; equal segments are counted once.

        Every segment is tokenised between the two texts of `between`, because a tokenizer may treat the start and the
        end of a text differently.
        """
        listed = list(segments)
        known = self._segments.setdefault(between, {})
        if new := [segment for segment in dict.fromkeys(listed) if segment not in known]:
            before, after = between
            lengths = self._lengths([before + segment + after for segment in ["", *new]], special_tokens=False)
            known.update(zip(new, (lengths[1:] - lengths[0]).tolist(), strict=True))
        return np.array([known[segment] for segment in listed], dtype=np.int64)

    def count_starts(self, starts: Iterable[str], after: str) -> NDArray[np.int64]:
        """Counts the tokens of prompts' beginnings, each followed by the text `after`, BOS included, int64 [starts]."""
        distinct = list(dict.fromkeys(starts := list(starts)))
        extra = int(self.count_segments([after], ("a.\n", ""))[0])
        counts = self._lengths([start + after for start in distinct], special_tokens=True) - extra
        by_start = dict(zip(distinct, counts.tolist(), strict=True))
        return np.array([by_start[start] for start in starts], dtype=np.int64)

    def count_pool(self, segments: Sequence[str], between: tuple[str, str] = LINES) -> NDArray[np.int64]:
        """Counts many segments as `count_segments` does, int64 [segments], and caches the counts on disk."""
        digest = hashlib.sha256("\x1e".join([self.sha256, *between, *segments]).encode()).hexdigest()
        return cached_counts(digest, lambda: self.count_segments(segments, between))

    def _lengths(self, texts: Sequence[str], *, special_tokens: bool) -> NDArray[np.int64]:
        dropped = len(self.dropped.suffix) if special_tokens else 0
        encoded = self._encoded(texts, special_tokens)
        return np.array([len(tokens) - dropped * adds for tokens, adds in encoded], dtype=np.int64)

    @panics_as_errors(ENCODING)
    def _encoded(self, texts: Sequence[str], special_tokens: bool) -> list[tuple[Any, bool]]:
        """Returns the tokens of each text, and whether special tokens were added to it.

        A fast tokenizer returns `Encoding` objects; their length is known without converting them to lists.
        """
        may_add = special_tokens and self.special_tokens
        adds = [may_add and not text.startswith(self._beginnings) for text in texts]
        encoded: dict[int, Any] = {}
        for add in dict.fromkeys(adds):
            places = [place for place, added in enumerate(adds) if added is add]
            batch = [texts[place] for place in places]
            if self._backend is None:
                tokens = [self.tokenizer(text, add_special_tokens=add)["input_ids"] for text in batch]
            else:
                tokens = self._plain_backend().encode_batch_fast(batch, add_special_tokens=add)
            encoded.update(zip(places, tokens, strict=True))
        return [(encoded[place], add) for place, add in enumerate(adds)]

    @functools.cached_property
    def _beginnings(self) -> tuple[str, ...]:
        return special_beginnings(self.tokenizer)

    def _plain_backend(self) -> Any:
        self._backend.no_truncation()
        self._backend.no_padding()
        return self._backend


def cached_counts(digest: str, count: Callable[[], NDArray[np.int64]]) -> NDArray[np.int64]:
    """Returns the token counts that are cached on disk under the hash `digest`, int64.

    If there are none, calls `count` and caches its result. `digest` must cover everything that the counts depend on.
    """
    path = cache_folder("ruler") / f"ruler1-counts-{digest[:32]}.arrow"
    if (table := read_table(path)) is not None:
        return np.asarray(table.column("tokens"), dtype=np.int64)
    counts = count()
    keep_table(path, pa.table({"tokens": counts.astype(np.int32)}))
    return counts


def load_counter(metadata: Mapping[str, Any], task: str) -> TokenCounter:
    """Returns a token counter with the tokenizer of the model that lm-eval runs.

    Raises:
        UserError: no tokenizer is named, it cannot be loaded, or it turns text into no tokens.
    """
    bos = metadata.get("add_bos_token")
    counter = TokenCounter(
        model_tokenizer(metadata, task),
        special_tokens=True if bos is None else bool(bos),
        keeps_suffix=metadata.get("template_suffix") == "keep",
    )
    if not len(counter.encode(["The quick brown fox."], special_tokens=False)[0]):
        raise UserError(f"{task}: the tokenizer turns text into no tokens: name the model's tokenizer.")
    return counter


def model_tokenizer(metadata: Mapping[str, Any], task: str) -> Any:
    """Returns the tokenizer of the model that lm-eval runs, as the model's arguments or `--metadata` name it.

    Raises:
        UserError: no tokenizer is named, or it cannot be loaded.
    """
    source = next((value for key in TOKENIZER_KEYS if (value := metadata.get(key))), None)
    if source is None:
        raise UserError(
            f"{task} needs the model's tokenizer and none is named: name the model with --model_args pretrained=..., "
            "or the tokenizer with the key tokenizer in --metadata."
        )
    if not isinstance(source, str):
        return source
    options = {key: metadata[key] for key in _LOADING_KEYS if metadata.get(key) is not None}
    if "subfolder" in options:  # lm-eval parses a subfolder such as 1000 (a training step) as a number
        options["subfolder"] = str(options["subfolder"])
    try:
        return _load_once(_tokenizer_content(source, options.get("revision")), source, **options)
    except UserError as error:
        raise UserError(f"{task}: {error}") from error


def _tokenizer_content(source: str, revision: str | None) -> Hashable:
    """Returns a cache key that changes with a local folder's files (except weights) or with a hub id's commit."""
    return content_of(source, without=WEIGHTS) or hub_commit(source, "models", revision)


@functools.lru_cache(maxsize=4)
def _load_once(_: Hashable, source: str, **options: Any) -> Any:
    return load_tokenizer(source, **options)
