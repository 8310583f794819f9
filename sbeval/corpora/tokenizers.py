"""Loads and hashes tokenizers, and finds the special tokens that they add to a text."""

import itertools
import json
import os
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
from sbeval.foreign_files import has_tokenizer_files
from sbeval.keeping.hashes import file_sha256

_BATCH_TEXTS = 256
_PROBES = (("a", "b"), ("0", "1"), ("the cat", "a dog"))
_KNOWN_BY_VERSION = {"transformers", *sys.stdlib_module_names}
# settings of tokenizers with remote code that have no influence on the tokens of a text
_NO_TOKENS = {"auto_map", "is_local", "local_files_only"}
_NO_TOKENS |= {"model_max_length", "chat_template", "padding_side", "truncation_side"}
_THIS_PROCESS = uuid4().hex

_hashes: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def load_tokenizer(source: str | Path, **options: Any) -> Any:
    """Loads the tokenizer of a folder or hub id; `options` go to `AutoTokenizer.from_pretrained`.

    Raises:
        UserError: there is no tokenizer, or it does not load.
    """
    from transformers import AutoTokenizer  # takes seconds to import

    try:
        with panics_as_errors():
            # with None transformers would ask on the terminal whether to run remote code
            tokenizer = AutoTokenizer.from_pretrained(source, **{"trust_remote_code": False, **options})
    except Exception as error:  # damaged files raise exceptions of many classes, even a bare Exception
        without_files = Path(source).is_dir() and not options.get("subfolder") and not has_tokenizer_files(Path(source))
        if without_files:
            raise UserError(
                f"{str(source)!r} holds no tokenizer files, such as tokenizer.json: give a folder or hub id with a "
                "tokenizer."
            ) from error
        raise UserError(
            f"The tokenizer at {str(source)!r} does not load ({first_line(error)}): give a folder or hub id with a "
            "working tokenizer."
        ) from error
    tokenizer.init_kwargs.pop("local_files_only", None)  # otherwise saved files would depend on HF_HUB_OFFLINE
    return tokenizer


@contextmanager
def all_cores() -> Iterator[None]:
    """Lets fast tokenizers use all cores inside the block; lm-eval's command line disables this for the process."""
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
    """Encodes texts in batches on all cores, with a progress bar unless `quiet`. Returns the token ids of each text."""
    encoded: list[list[int]] = []
    with tqdm(total=len(texts), desc="Tokenizing", disable=quiet or not texts) as bar:
        for start in range(0, len(texts), _BATCH_TEXTS):
            batch = texts[start : start + _BATCH_TEXTS]
            with all_cores():
                encoded += tokenizer(list(batch), **options)["input_ids"]
            bar.update(len(batch))
    return encoded


def tokenizer_sha256(tokenizer: Any) -> str:
    """Returns the SHA-256 of everything that determines the tokens of a text, without padding and truncation."""
    if tokenizer not in _hashes:
        _hashes[tokenizer] = _hash(tokenizer)
    return _hashes[tokenizer]


def _hash(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    code = _code(type(tokenizer))
    state = ""
    if backend is None or code:
        init_kwargs = getattr(tokenizer, "init_kwargs", {})
        files = {
            name: init_kwargs.get(name) for name in (*getattr(tokenizer, "vocab_files_names", ()), "tokenizer_file")
        }
        file_hashes = [
            file_sha256(Path(path)) for path in files.values() if isinstance(path, str) and Path(path).is_file()
        ]
        excluded = {"name_or_path", *files, *(_NO_TOKENS if code else ())}
        settings = {key: value for key, value in init_kwargs.items() if key not in excluded}
        description = [type(tokenizer).__name__, tokenizer.get_vocab(), file_hashes, settings, *code]
        state = json.dumps(description, sort_keys=True, default=str)
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
    if getattr(tokenizer, "split_special_tokens", False):  # not part of the backend's serialisation
        special.append("split")
    return sha256(f"{special}{state}".encode()).hexdigest()


def _code(kind: type) -> list[str]:
    """Returns hashes of the Python files that define a class outside transformers and the standard library.

    For remote code this includes the files that it imports.
    """
    hashes = []
    for module in dict.fromkeys(base.__module__ for base in kind.__mro__):
        if (package := module.partition(".")[0]) not in _KNOWN_BY_VERSION:
            files = [getattr(sys.modules.get(module), "__file__", None)]
            if package == "transformers_modules":
                loader = sys.modules["transformers.dynamic_module_utils"]  # loaded, since it loaded the class
                files += sorted(loader.get_relative_import_files(files[0]))
            hashes += [file_sha256(Path(file)) if file else _THIS_PROCESS for file in files]
    return hashes


def adds_special_tokens(tokenizer: Any) -> bool:
    """Whether the tokenizer adds special tokens when it encodes a text."""
    return len(tokenizer.encode("")) > 0


class AddedTokens(NamedTuple):
    """Token ids that a tokenizer adds to every text: a `prefix` such as BOS before it, a `suffix` such as EOS after."""

    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()

    def to_json(self, tokenizer: Any) -> dict[str, list[str]]:
        """Returns the tokens as strings, under "prefix" and "suffix"."""
        return {name: list(tokenizer.convert_ids_to_tokens(ids)) for name, ids in self._asdict().items()}

    def without_suffix(self, tokens: list[int]) -> list[int]:
        """Removes the suffix from the tokens of a text that was encoded with special tokens."""
        end = len(tokens) - len(self.suffix)
        return tokens[:end] if self.suffix and tuple(tokens[end:]) == self.suffix else tokens


def added_tokens(tokenizer: Any) -> AddedTokens:
    """Finds the token ids that a tokenizer adds to every text.

    Two texts without common tokens are encoded with special tokens. The tokens that both encodings share at the start
    are the prefix, those that they share at the end the suffix. Both texts are also encoded without special tokens. If
    the encodings differ by more than prefix and suffix, the tokens of the empty text are returned as prefix.
    """
    for pair in _PROBES:
        plain = [tokenizer.encode(text, add_special_tokens=False) for text in pair]
        special = [tokenizer.encode(text) for text in pair]
        prefix_tokens = shared_start(special) - shared_start(plain)
        suffix_tokens = shared_start([tokens[::-1] for tokens in special]) - shared_start(
            [tokens[::-1] for tokens in plain]
        )
        added = AddedTokens(tuple(special[0][:prefix_tokens]), tuple(special[0][len(special[0]) - suffix_tokens :]))
        rebuilt = [[*added.prefix, *bare, *added.suffix] for bare in plain]
        if plain[0] != plain[1] and min(prefix_tokens, suffix_tokens) >= 0 and rebuilt == special:
            return added
    return AddedTokens(tuple(tokenizer.encode("")))


def shared_start(lists: Sequence[Sequence[int]]) -> int:
    """Returns the length of the common prefix of several token lists."""
    are_equal = (len(set(tokens)) == 1 for tokens in zip(*lists, strict=False))
    return sum(itertools.takewhile(bool, are_equal))


def special_beginnings(tokenizer: Any) -> tuple[str, ...]:
    """Returns strings that show, at the start of a text, that the text already contains its special tokens.

    Chat templates write such texts. The strings are BOS, and all tokens that the tokenizer adds before a text if they
    are special tokens. Use `text.startswith(special_beginnings(tokenizer))`.
    """
    prefix = added_tokens(tokenizer).prefix
    special = set(prefix) <= tokenizer.added_tokens_decoder.keys()
    whole = "".join(tokenizer.convert_ids_to_tokens(prefix)) if special else ""
    return tuple(text for text in (tokenizer.bos_token, whole) if text)


def adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer adds BOS at the start of every text."""
    return tokenizer.bos_token_id is not None and added_tokens(tokenizer).prefix[:1] == (tokenizer.bos_token_id,)


def prefix_token_id(tokenizer: Any) -> int:
    """Returns the token id that lm-eval's rolling log-likelihood feeds before a document: BOS, or EOS without BOS.

    Raises:
        UserError: the tokenizer has neither.
    """
    for token_id in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    raise UserError(
        "The tokenizer has neither a BOS nor an EOS token to feed before a text's first token: "
        'set one, or name a separator with --metadata \'{"separator": "..."}\'.'
    )


def separator_ids(tokenizer: Any, separator: str | None) -> tuple[int, ...]:
    """Returns the token ids that separate joined documents: those of the text `separator`, or EOS if it is None.

    Raises:
        UserError: `separator` is None and the tokenizer has no EOS token.
    """
    if separator is not None:
        return tuple(tokenizer.encode(separator, add_special_tokens=False))
    if tokenizer.eos_token_id is None:
        raise UserError(
            "The tokenizer has no EOS token to put between documents: "
            'name a separator with --metadata \'{"separator": "\\n\\n"}\'.'
        )
    return (int(tokenizer.eos_token_id),)
