"""What a tokenizer is to a corpus: how it is loaded, its hash, its separators, and whether it adds BOS."""

import itertools
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4
from weakref import WeakKeyDictionary

from tqdm import tqdm

from sbeval.errors import UserError, first_line, panics_as_errors
from sbeval.keeping.hashes import file_sha256

_ENCODED_TOGETHER = 256
_PROBES = (("a", "b"), ("0", "1"), ("the cat", "a dog"))
_KNOWN_BY_VERSION = {"transformers", *sys.stdlib_module_names}
# settings that no token depends on, of tokenizers with code of their own
_NO_TOKENS = {"auto_map", "is_local", "local_files_only"}
_NO_TOKENS |= {"model_max_length", "chat_template", "padding_side", "truncation_side"}
_THIS_PROCESS = uuid4().hex

_hashes: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def load_tokenizer(source: str | Path, **options: Any) -> Any:
    """Loads the tokenizer of a folder or hub id, with options of `AutoTokenizer.from_pretrained`.

    Raises:
        UserError: none can be loaded.
    """
    from transformers import AutoTokenizer  # seconds, which a command that reads no text does without

    try:
        with panics_as_errors():
            # None would have transformers ask at the terminal whether to run a checkpoint's own code
            tokenizer = AutoTokenizer.from_pretrained(source, **{"trust_remote_code": False, **options})
    except Exception as error:  # a broken file is answered with any class, bare Exception among them
        without_files = Path(source).is_dir() and not options.get("subfolder") and not has_tokenizer_files(Path(source))
        reason = "of its files, such as tokenizer.json" if without_files else f"that loads ({first_line(error)})"
        raise UserError.expected(
            f"a tokenizer at {str(source)!r}", found=f"none {reason}", remedy="give a folder or hub id that holds one"
        ) from error
    tokenizer.init_kwargs.pop("local_files_only", None)  # saved, it would make a file differ by HF_HUB_OFFLINE
    return tokenizer


def has_tokenizer_files(folder: Path) -> bool:
    """Whether a file's name is like those of tokenizers; remote code may keep its vocabulary under any name."""
    likely = re.compile(r"tok|tek|vocab|merges|sentencepiece|spiece|spm|bpe|dict|\.(model|py|gguf)$")
    config = folder / "config.json"
    named = any(likely.search(path.name.lower()) for path in folder.iterdir())
    return named or (config.is_file() and b"auto_map" in config.read_bytes())


@contextmanager
def all_cores() -> Iterator[None]:
    """Lets a tokenizer encode a batch on all cores; lm-eval's command line switches this off for the whole process."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def encode_together(tokenizer: Any, texts: Sequence[str], *, quiet: bool, **options: Any) -> list[list[int]]:
    """Returns the tokens of each text, which are encoded many at a time and on all cores, behind a progress bar."""
    encoded: list[list[int]] = []
    with tqdm(total=len(texts), desc="Tokenizing", disable=quiet or not texts) as bar:
        for start in range(0, len(texts), _ENCODED_TOGETHER):
            some = texts[start : start + _ENCODED_TOGETHER]
            with all_cores():
                encoded += tokenizer(list(some), **options)["input_ids"]
            bar.update(len(some))
    return encoded


def tokenizer_sha256(tokenizer: Any) -> str:
    """Returns a hash of everything that decides a text's tokens, padding and truncation aside."""
    if tokenizer not in _hashes:
        _hashes[tokenizer] = _hash(tokenizer)
    return _hashes[tokenizer]


def _hash(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    code = _code(type(tokenizer))
    state = ""
    if backend is None or code:
        given = getattr(tokenizer, "init_kwargs", {})
        files = {name: given.get(name) for name in (*getattr(tokenizer, "vocab_files_names", ()), "tokenizer_file")}
        read = [file_sha256(Path(path)) for path in files.values() if isinstance(path, str) and Path(path).is_file()]
        apart = {"name_or_path", *files, *(_NO_TOKENS if code else ())}
        kept = {key: value for key, value in given.items() if key not in apart}
        described = [type(tokenizer).__name__, tokenizer.get_vocab(), read, kept, *code]
        state = json.dumps(described, sort_keys=True, default=str)
    if backend is not None:
        truncation, padding = backend.truncation, backend.padding
        backend.no_truncation()
        backend.no_padding()
        state += backend.to_str()
        if truncation is not None:
            backend.enable_truncation(**truncation)
        if padding is not None:
            backend.enable_padding(**padding)
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id]
    if getattr(tokenizer, "split_special_tokens", False):  # the backend's own text leaves it out
        special.append("split")
    return sha256(f"{special}{state}".encode()).hexdigest()


def _code(kind: type) -> list[str]:
    """Returns the hashes of the Python files of a class that no package's version names, and of what these import."""
    hashes = []
    for module in dict.fromkeys(base.__module__ for base in kind.__mro__):
        if (package := module.partition(".")[0]) not in _KNOWN_BY_VERSION:
            files = [getattr(sys.modules.get(module), "__file__", None)]
            if package == "transformers_modules":
                loader = sys.modules["transformers.dynamic_module_utils"]  # which has loaded the class
                files += sorted(loader.get_relative_import_files(files[0]))
            hashes += [file_sha256(Path(file)) if file else _THIS_PROCESS for file in files]
    return hashes


def adds_special_tokens(tokenizer: Any) -> bool:
    """Whether encoding a text adds tokens that are not in it."""
    return len(tokenizer.encode("")) > 0


class AddedTokens(NamedTuple):
    """Token ids that a tokenizer adds to every text: a prefix such as BOS, and a suffix such as EOS."""

    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()

    def to_json(self, tokenizer: Any) -> dict[str, list[str]]:
        """Returns the tokens' names under "prefix" and "suffix"."""
        return {name: list(tokenizer.convert_ids_to_tokens(ids)) for name, ids in self._asdict().items()}

    def without_suffix(self, tokens: list[int]) -> list[int]:
        """Returns the tokens of a text that was encoded with special tokens, without the suffix."""
        kept = len(tokens) - len(self.suffix)
        return tokens[:kept] if self.suffix and tuple(tokens[kept:]) == self.suffix else tokens


def added_tokens(tokenizer: Any) -> AddedTokens:
    """Returns the token ids that a tokenizer adds to a text.

    Two texts without a common token are encoded with and without special tokens. What the encodings with special tokens
    share at their beginning and at their end is the prefix and the suffix. Where a tokenizer's own code does anything
    else to a text, its tokens for an empty text are taken as a prefix.
    """
    for pair in _PROBES:
        plain = [tokenizer.encode(text, add_special_tokens=False) for text in pair]
        whole = [tokenizer.encode(text) for text in pair]
        first = shared_start(whole) - shared_start(plain)
        last = shared_start([tokens[::-1] for tokens in whole]) - shared_start([tokens[::-1] for tokens in plain])
        added = AddedTokens(tuple(whole[0][:first]), tuple(whole[0][len(whole[0]) - last :]))
        around = [[*added.prefix, *bare, *added.suffix] for bare in plain]
        if plain[0] != plain[1] and min(first, last) >= 0 and around == whole:
            return added
    return AddedTokens(tuple(tokenizer.encode("")))


def shared_start(lists: Sequence[Sequence[int]]) -> int:
    """Returns how many first tokens some texts share."""
    alike = (len(set(tokens)) == 1 for tokens in zip(*lists, strict=False))
    return sum(itertools.takewhile(bool, alike))


def special_beginnings(tokenizer: Any) -> tuple[str, ...]:
    """Returns how a text begins that holds its special tokens already, as chat templates write them.

    These are BOS, and the tokenizer's whole prefix if no ordinary text is cut into its tokens.
    `text.startswith(special_beginnings(tokenizer))` tells such a text.
    """
    prefix = added_tokens(tokenizer).prefix
    special = set(prefix) <= tokenizer.added_tokens_decoder.keys()
    whole = "".join(tokenizer.convert_ids_to_tokens(prefix)) if special else ""
    return tuple(text for text in (tokenizer.bos_token, whole) if text)


def adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer puts BOS in front of a text by itself."""
    return tokenizer.bos_token_id is not None and added_tokens(tokenizer).prefix[:1] == (tokenizer.bos_token_id,)


def prefix_token_id(tokenizer: Any) -> int:
    """Returns the token lm-eval's rolling log-likelihood feeds before a document: BOS, else EOS."""
    for token_id in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    raise UserError(
        "Expected a tokenizer with a BOS or EOS token to put before a text's first token, found neither: "
        'set one, or name a separator with --metadata \'{"separator": "..."}\'.'
    )


def separator_ids(tokenizer: Any, separator: str | None) -> tuple[int, ...]:
    """Returns the tokens put between joined documents: those of a text, by default the EOS token."""
    if separator is not None:
        return tuple(tokenizer.encode(separator, add_special_tokens=False))
    if tokenizer.eos_token_id is None:
        raise UserError(
            "Expected a tokenizer with an EOS token to put between documents, found none: "
            'name a separator with --metadata \'{"separator": "\\n\\n"}\'.'
        )
    return (int(tokenizer.eos_token_id),)
