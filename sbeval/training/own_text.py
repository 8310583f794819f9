"""A person's own text as token arrays, in the cache folder by the content of text and tokenizer.

There is no recall text in them. One token in `HELD_OUT_EVERY` is kept out of training and lies beside them in
`held_out.jsonl`: whole documents, or of fewer than `HELD_OUT_EVERY` documents the end of each.
"""

import itertools
import json
from collections.abc import Iterator
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from filelock import FileLock

from sbeval.corpora import Corpus, Document, corpus_sha256, hub_corpus, hub_text, local_corpus, text_name
from sbeval.corpora.split import counts_tokens, split_corpus
from sbeval.corpora.store import batches
from sbeval.corpora.tokenizers import all_cores, load_tokenizer, tokenizer_sha256
from sbeval.errors import UserError
from sbeval.hub_names import local_path
from sbeval.keeping.cache import cache_folder
from sbeval.keeping.writing import writing_to, written_beside
from sbeval.processes.ranks import say
from sbeval.training.arrays import load_arrays
from sbeval.training.recipe import usual_warmup_steps
from sbeval.training.tokenizer import save_tokenizer, token_dtype, train_tokenizer

HELD_OUT_EVERY = 20
HELD_OUT_FILE = "held_out.jsonl"
TRAINED_VOCABULARY = 4096
_TRAINED_ON_CHARACTERS = 20_000_000
_FORMAT = "training2"
_VOCABULARY_MULTIPLE = 64
_LENGTH_STEPS = (0.25, 0.5, 1, 2, 4, 8, 16)
_LEAST_BLOCKS = 4
_END = "end"


class OwnText(NamedTuple):
    """A text to train on: a file, a folder or the name of a hub data set, and how documents are cut into smaller ones.

    `field` is the field or column that holds the text.
    """

    source: str
    split: str | None = None
    field: str | None = None
    dataset_config: str | None = None
    dataset_split: str | None = None


def check_text(text: OwnText, *, has_tokenizer: bool) -> None:
    """Refuses a text that is not there or cannot be split as asked, before a tokenizer is loaded.

    Raises:
        UserError: naming it.
    """
    if text.split is not None and counts_tokens(text.split) and not has_tokenizer:
        raise UserError(f"Expected --tokenizer with --split {text.split!r}, found none: name one, or split otherwise")
    text_corpus(text._replace(split=None))


def text_corpus(text: OwnText, tokenizer: Any = None) -> Corpus:
    """Returns the documents of a file, a folder or a hub data set, split by the tokens that a tokenizer counts.

    Raises:
        UserError: there is no such text, or it cannot be read.
    """
    path = local_path(text.source)
    if path.exists():
        corpus = local_corpus(path, name=text_name(path.resolve()), text_field=text.field or "text")
    elif text.source.count("/") == 1 and not text.source.startswith((".", "/", "~")):
        source = hub_text(text.source, config=text.dataset_config, split=text.dataset_split, text_field=text.field)
        corpus = hub_corpus(source, name=text.source)
    else:
        raise UserError(
            f"Expected a file, a folder or the name of a hub data set (owner/name) with text, found nothing at "
            f"{text.source!r}: check the path"
        )
    return corpus if text.split is None else split_corpus(corpus, text.split, tokenizer)


def tokenised_text(text: OwnText, tokenizer: Any, *, holding_out: bool) -> Path:
    """Returns the folder of a text's token arrays, made where they are not there yet.

    Without a tokenizer a byte-level BPE is trained on the text; `holding_out` keeps documents out of the arrays.

    Raises:
        UserError: the text cannot be read, the tokenizer has no EOS token, or the folder cannot be written.
    """
    corpus = text_corpus(text, tokenizer)
    kind = f"bpe{TRAINED_VOCABULARY}" if tokenizer is None else tokenizer_sha256(tokenizer)
    content = corpus_sha256(corpus)
    key = sha256(f"{content} {kind} {holding_out}".encode()).hexdigest()[:20]
    folder = cache_folder("training") / f"{_FORMAT}-{key}"
    with writing_to(folder.parent, "token arrays"), FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            with written_beside(folder) as unfinished:
                _write(unfinished, corpus, content, tokenizer, holding_out=holding_out)
    return folder


def name_of_text(source: str) -> str:
    """Returns the name of a file, a folder or a hub data set, as models trained on it and its figures are called."""
    path = local_path(source)
    return text_name(path.resolve()) if path.exists() else source.rpartition("/")[2]


def say_what_is_kept_out(folder: Path) -> None:
    """Prints how many documents are not trained on, given the folder of a text's token arrays."""
    record = load_arrays(folder).record
    if kept_out := record["held_out"]["documents"]:
        what = f"{record['held_out']['tokens']:,} tokens of {kept_out} document{'s' * (kept_out > 1)}"
        say(f"{what} are kept out of training, one token in {HELD_OUT_EVERY}, for --report")


def settings_of_text(text: OwnText, folder: Path) -> dict[str, Any]:
    """Returns what a recipe takes from its text: where that is, vocabulary and special tokens, and no recall text."""
    tokenizer = load_tokenizer(folder / "tokenizer")
    begin = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    vocabulary = -(-len(tokenizer) // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    return {
        "model": {"vocab_size": vocabulary, "bos_token_id": begin, "eos_token_id": tokenizer.eos_token_id},
        "data": {"folder": text.source, "recall_share": 0.0},
    }


def one_epoch(mapping: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the optimization settings that are null in a recipe, and so follow from the folder of its text's token
    arrays.
    """
    sections = {key: mapping.get(key) for key in ("model", "data", "optimization")}
    model, data, optimization = (settings if isinstance(settings, dict) else {} for settings in sections.values())
    length = model.get("training_length_tokens")
    batch = optimization.get("batch_tokens")
    kept_out = data.get("validation_tokens", 0)
    if not all(isinstance(size, int) for size in (length, batch, kept_out)) or not length or not batch:
        return {}  # the recipe's reader says what is wrong with them
    # offsets are drawn within a window
    windows = (load_arrays(folder).record["unique_tokens"] - kept_out - length) // length
    filled = {}
    if (total := optimization.get("total_tokens")) is None:
        total = filled["total_tokens"] = max(0, windows * length // batch * batch)
    if optimization.get("warmup_steps", 0) is None and isinstance(total, int):
        filled["warmup_steps"] = usual_warmup_steps(total_tokens=total, batch_tokens=batch)
    return {"optimization": filled}


def lengths_to_report(folder: Path, length_tokens: int) -> tuple[int, ...]:
    """Returns the context lengths in tokens to evaluate a trained model at, as far as the text kept out reaches.

    Raises:
        UserError: too little was kept out.
    """
    held_out = load_arrays(folder).record["held_out"]
    longest = (held_out["tokens"] + held_out["documents"]) // _LEAST_BLOCKS
    lengths = [length for step in _LENGTH_STEPS if (length := int(length_tokens * step)) <= longest]
    if length_tokens not in lengths:
        raise UserError(
            f"Expected at least {_LEAST_BLOCKS * length_tokens} tokens kept out of training for --report, found "
            f"{held_out['tokens']}: one token in {HELD_OUT_EVERY} is kept out, so give more text, cut it into "
            "documents with --split paragraph, train at a shorter length (--set model.training_length_tokens=N), or "
            "leave --report out"
        )
    return tuple(lengths)


def _write(folder: Path, corpus: Corpus, content: str, tokenizer: Any, *, holding_out: bool) -> None:
    if tokenizer is None:
        texts = (document.text for document in _beginning(corpus))
        save_tokenizer(train_tokenizer(texts, TRAINED_VOCABULARY), folder / "tokenizer")
        tokenizer = load_tokenizer(folder / "tokenizer")
    else:
        tokenizer.save_pretrained(folder / "tokenizer")
    if (end := tokenizer.eos_token_id) is None:
        raise UserError(
            "Expected a tokenizer with an end-of-text token (eos_token) to put between documents, found none: name "
            "another --tokenizer, or leave it out to have one trained on the text"
        )
    dtype = token_dtype(len(tokenizer))
    few = holding_out and len(list(itertools.islice(corpus.documents(), HELD_OUT_EVERY))) < HELD_OUT_EVERY
    documents = _with_ends_apart(corpus) if few else corpus.documents()
    counts, kept_out = {"documents": 0, "unique_tokens": 0}, {"documents": 0, "tokens": 0}
    digest = sha256()
    with ExitStack() as stack:
        stack.enter_context(all_cores())
        held_out: IO[str] = stack.enter_context((folder / HELD_OUT_FILE).open("w", encoding="utf-8"))
        raw: IO[bytes] = stack.enter_context((folder / "tokens").open("wb"))
        kept_last = False
        for batch in batches(documents):
            encoded = tokenizer([document.text for document in batch], add_special_tokens=False, verbose=False)
            for document, ids in zip(batch, encoded["input_ids"], strict=True):
                due = (counts["unique_tokens"] + kept_out["tokens"] + len(ids)) / HELD_OUT_EVERY - kept_out["tokens"]
                # never two in turn: a huge document is not made up for by all the small ones behind it
                spare = not few and not kept_last and due >= len(ids) / 2
                kept_last = holding_out and (spare or document.name == _END)
                if kept_last:
                    held_out.write(json.dumps({"text": document.text}) + "\n")
                    kept_out = {"documents": kept_out["documents"] + 1, "tokens": kept_out["tokens"] + len(ids)}
                    continue
                tokens = np.asarray([*ids, end], np.int32)
                digest.update(tokens.tobytes())
                raw.write(tokens.astype(dtype).tobytes())
                counts["documents"] += 1
                counts["unique_tokens"] += len(tokens)
    np.save(folder / "tokens.npy", np.memmap(folder / "tokens", dtype=dtype, mode="r"))
    (folder / "tokens").unlink()
    np.save(folder / "recall.npy", np.empty((0, 1), dtype))
    record: dict[str, Any] = {
        "source": corpus.name,
        "detail": corpus.recorded_detail(),
        "corpus_sha256": content,
        **counts,
    }
    record |= {"tokens_sha256": digest.hexdigest(), "held_out": kept_out}
    (folder / "record.json").write_text(json.dumps(record, indent=1), encoding="utf-8")


def _beginning(corpus: Corpus) -> Iterator[Document]:
    """Yields the first documents, as far as a tokenizer is trained on them."""
    characters = 0
    for document in corpus.documents():
        yield document._replace(text=document.text[:_TRAINED_ON_CHARACTERS])
        characters += len(document.text)
        if characters >= _TRAINED_ON_CHARACTERS:
            return


def _with_ends_apart(corpus: Corpus) -> Iterator[Document]:
    """Yields each document without its last words, then those under the name `_END`."""
    for document in corpus.documents():
        text = document.text
        most = len(text) - len(text) // HELD_OUT_EVERY
        least = most - len(text) // HELD_OUT_EVERY  # some writing has no white space for long
        cut = max(text.rfind(" ", least, most), text.rfind("\n", least, most)) + 1 or most
        yield document._replace(text=text[:cut])
        if cut < len(text):
            yield document._replace(text=text[cut:], name=_END)
