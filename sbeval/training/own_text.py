"""Tokenises a user's own text into token arrays, cached under a hash of text and tokenizer.

The arrays hold no recall text. One token in `HELD_OUT_EVERY` is held out of training and written to `held_out.jsonl`
beside the arrays: whole documents, or the end of each document if there are fewer than `HELD_OUT_EVERY` documents.
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
from sbeval.processes.ranks import print_on_rank_0
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
    """A text to train on, as the options of `sbeval train --text` describe it.

    Attributes:
        source: a file, a folder or the name of a hub data set.
        split: how documents are split into smaller ones, see `sbeval.corpora.split`.
        field: field or column that holds the text.
        dataset_config: configuration of the hub data set.
        dataset_split: split of the hub data set.
    """

    source: str
    split: str | None = None
    field: str | None = None
    dataset_config: str | None = None
    dataset_split: str | None = None


def check_text(text: OwnText, *, has_tokenizer: bool) -> None:
    """Checks, before a tokenizer is loaded, that a text exists and can be split.

    Raises:
        UserError: there is no such text, or it is to be split by tokens and there is no tokenizer yet.
    """
    if text.split is not None and counts_tokens(text.split) and not has_tokenizer:
        raise UserError(
            f"--split {text.split!r} needs --tokenizer: name a tokenizer, or split by paragraph or a regular expression"
        )
    text_corpus(text._replace(split=None))


def text_corpus(text: OwnText, tokenizer: Any = None) -> Corpus:
    """Returns the documents of a file, a folder or a hub data set, split as `text.split` says.

    `tokenizer` is needed only to split by tokens.

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
            f"Expected a file, a folder or the name of a hub data set (owner/name), found nothing at {text.source!r}: "
            "check the path"
        )
    return corpus if text.split is None else split_corpus(corpus, text.split, tokenizer)


def tokenised_text(text: OwnText, tokenizer: Any, *, holding_out: bool) -> Path:
    """Tokenises a text, or finds its token arrays in the cache.

    Args:
        text: the text.
        tokenizer: a Hugging Face tokenizer; None trains a byte-level BPE on the text.
        holding_out: whether one token in `HELD_OUT_EVERY` is held out of the arrays for evaluation.

    Returns:
        The folder of the token arrays.

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
    """Returns the name of a file, a folder or a hub data set, used for models trained on it and in figures."""
    path = local_path(source)
    return text_name(path.resolve()) if path.exists() else source.rpartition("/")[2]


def print_held_out(folder: Path) -> None:
    """Prints how many tokens and documents are held out, as the record in the folder of token arrays says."""
    held_out = load_arrays(folder).record["held_out"]
    documents = held_out["documents"]
    if documents:
        amount = f"{held_out['tokens']:,} tokens of {documents} document{'s' * (documents > 1)}"
        print_on_rank_0(f"{amount} are held out of training for --report (one token in {HELD_OUT_EVERY})")


def settings_of_text(text: OwnText, folder: Path) -> dict[str, Any]:
    """Returns the recipe settings that the text determines.

    These are its path, the vocabulary size, the ids of special tokens, and a share of 0 for recall text.
    """
    tokenizer = load_tokenizer(folder / "tokenizer")
    begin = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    vocabulary = -(-len(tokenizer) // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    return {
        "model": {"vocab_size": vocabulary, "bos_token_id": begin, "eos_token_id": tokenizer.eos_token_id},
        "data": {"folder": text.source, "recall_share": 0.0},
    }


def one_epoch(mapping: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns values for optimization settings that are null in a recipe: one epoch of the text, and the warm-up.

    `folder` holds the token arrays of the text.
    """
    sections = {key: mapping.get(key) for key in ("model", "data", "optimization")}
    model, data, optimization = (settings if isinstance(settings, dict) else {} for settings in sections.values())
    length, batch = model.get("training_length_tokens"), optimization.get("batch_tokens")
    validation = data.get("validation_tokens", 0)
    if not all(isinstance(size, int) for size in (length, batch, validation)) or not length or not batch:
        return {}  # these settings are wrong or missing; the recipe is checked when it is read
    # one window less: each epoch starts at a random offset within a window
    windows = (load_arrays(folder).record["unique_tokens"] - validation - length) // length
    filled = {}
    if (total := optimization.get("total_tokens")) is None:
        total = filled["total_tokens"] = max(0, windows * length // batch * batch)
    if optimization.get("warmup_steps", 0) is None and isinstance(total, int):
        filled["warmup_steps"] = usual_warmup_steps(total_tokens=total, batch_tokens=batch)
    return {"optimization": filled}


def lengths_to_report(folder: Path, length_tokens: int) -> tuple[int, ...]:
    """Returns the context lengths, in tokens, at which `--report` evaluates the trained model.

    These are 0.25 to 16 times the training length, as long as four windows fit into the held-out text.

    Raises:
        UserError: the held-out text is too short for the training length.
    """
    held_out = load_arrays(folder).record["held_out"]
    longest = (held_out["tokens"] + held_out["documents"]) // _LEAST_BLOCKS
    lengths = [length for step in _LENGTH_STEPS if (length := int(length_tokens * step)) <= longest]
    if length_tokens not in lengths:
        raise UserError(
            f"Expected at least {_LEAST_BLOCKS * length_tokens} held-out tokens for --report, found "
            f"{held_out['tokens']}: one token in {HELD_OUT_EVERY} is held out, so give more text, split it into "
            "documents with --split paragraph, train at a shorter length (--set model.training_length_tokens=N), or "
            "remove --report"
        )
    return tuple(lengths)


def _write(folder: Path, corpus: Corpus, content: str, tokenizer: Any, *, holding_out: bool) -> None:
    """Writes token arrays, held-out text, tokenizer and record; `content` is the corpus's hash."""
    if tokenizer is None:
        texts = (document.text for document in _beginning(corpus))
        save_tokenizer(train_tokenizer(texts, TRAINED_VOCABULARY), folder / "tokenizer")
        tokenizer = load_tokenizer(folder / "tokenizer")
    else:
        tokenizer.save_pretrained(folder / "tokenizer")
    end = tokenizer.eos_token_id
    if end is None:
        raise UserError(
            "The tokenizer has no end-of-text token (eos_token) to put between documents: name another --tokenizer, or "
            "remove --tokenizer to train one on the text"
        )
    dtype = token_dtype(len(tokenizer))
    cuts_ends = holding_out and len(list(itertools.islice(corpus.documents(), HELD_OUT_EVERY))) < HELD_OUT_EVERY
    documents = _with_ends_apart(corpus) if cuts_ends else corpus.documents()
    counts = {"documents": 0, "unique_tokens": 0}
    held_out_counts = {"documents": 0, "tokens": 0}
    digest = sha256()
    with ExitStack() as stack:
        stack.enter_context(all_cores())
        held_out_file: IO[str] = stack.enter_context((folder / HELD_OUT_FILE).open("w", encoding="utf-8"))
        raw_tokens: IO[bytes] = stack.enter_context((folder / "tokens").open("wb"))
        is_held_out = False
        for batch in batches(documents):
            encoded = tokenizer([document.text for document in batch], add_special_tokens=False, verbose=False)
            for document, ids in zip(batch, encoded["input_ids"], strict=True):
                tokens_so_far = counts["unique_tokens"] + held_out_counts["tokens"] + len(ids)
                missing_tokens = tokens_so_far / HELD_OUT_EVERY - held_out_counts["tokens"]
                # never hold out two documents in a row: after a huge training document, all small documents that follow
                # it would be held out
                is_due = not cuts_ends and not is_held_out and missing_tokens >= len(ids) / 2
                is_held_out = holding_out and (is_due or document.name == _END)
                if is_held_out:
                    held_out_file.write(json.dumps({"text": document.text}) + "\n")
                    held_out_counts["documents"] += 1
                    held_out_counts["tokens"] += len(ids)
                    continue
                tokens = np.asarray([*ids, end], np.int32)
                digest.update(tokens.tobytes())
                raw_tokens.write(tokens.astype(dtype).tobytes())
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
    record |= {"tokens_sha256": digest.hexdigest(), "held_out": held_out_counts}
    (folder / "record.json").write_text(json.dumps(record, indent=1), encoding="utf-8")


def _beginning(corpus: Corpus) -> Iterator[Document]:
    """Yields the first `_TRAINED_ON_CHARACTERS` characters of a corpus, which a tokenizer is trained on."""
    characters = 0
    for document in corpus.documents():
        yield document._replace(text=document.text[:_TRAINED_ON_CHARACTERS])
        characters += len(document.text)
        if characters >= _TRAINED_ON_CHARACTERS:
            return


def _with_ends_apart(corpus: Corpus) -> Iterator[Document]:
    """Yields each document without its last twentieth, followed by this last twentieth as a document named `_END`."""
    for document in corpus.documents():
        text = document.text
        most = len(text) - len(text) // HELD_OUT_EVERY
        least = most - len(text) // HELD_OUT_EVERY  # some writing systems have no white space over long distances
        cut = max(text.rfind(" ", least, most), text.rfind("\n", least, most)) + 1 or most
        yield document._replace(text=text[:cut])
        if cut < len(text):
            yield document._replace(text=text[cut:], name=_END)
