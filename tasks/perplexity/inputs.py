"""Loads a task's corpus, and determines the token before a window's first target and the model's learned positions."""

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from sbeval import corpora
from sbeval.corpora import TokenizedCorpus
from sbeval.corpora.documents import Changes
from sbeval.corpora.seen import seen_documents
from sbeval.corpora.split import split_corpus
from sbeval.corpora.windows import Window
from sbeval.errors import UserError
from sbeval.hub_names import local_path
from sbeval.tasks.perplexity.options import HUB_DATASETS, CorpusOptions

# hash of the words of wikitext-2's test split; it does not depend on the line ends of a copy
_WIKITEXT_WORDS_SHA256 = "06f8f4136de90fcf1b32ffda9136ecab621b3e437c370b5cdd27b37e9e9e9efc"


def load_corpus(name: str, options: CorpusOptions, tokenizer: Any) -> corpora.Corpus:
    """Returns the corpus of a task: the text of the option `data_path` or `dataset` if set, else the YAML's corpus.

    Args:
        name: the corpus that the task's YAML names.
        options: may name another text; its corpus then has another name.
        tokenizer: needed only if the option `split` splits documents by tokens.

    Raises:
        UserError: there is no such text, or it cannot be read or split.
    """
    options.check_text(name)
    corpus = _whole_corpus(name, options)
    return corpus if options.split is None else split_corpus(corpus, options.split, tokenizer)


def _whole_corpus(name: str, options: CorpusOptions) -> corpora.Corpus:
    if name == "wikitext":
        path = options.data_path
        is_wikitext = path is None or words_sha256(path) == _WIKITEXT_WORDS_SHA256
        corpus_name = name if path is None or is_wikitext else local_name(path)
        changes: Changes = {}
        pages = functools.partial(_wikitext_pages, options, changes)
        return corpora.wikitext_corpus(pages, detokenize=_detokenize_wikitext, name=corpus_name, changes=changes)
    if options.data_path is not None:
        name = local_name(options.data_path)
        return corpora.local_corpus(options.data_path, name=name, text_field=options.text_field or "text")
    if name == "stdlib" and options.dataset is None:
        return corpora.stdlib_corpus()
    source = corpora.hub_text(
        options.dataset or HUB_DATASETS[name],
        config=options.dataset_config,
        split=options.dataset_split,
        text_field=options.text_field,
    )
    return corpora.hub_corpus(source, name=options.dataset or name)


def local_name(path: Path) -> str:
    """Returns a corpus name for a local file or folder: its name without suffixes.

    If a packaged corpus has that name, the parent folder's name is put before it ("texts/stdlib").
    """
    place = local_path(path).resolve()
    name = corpora.text_name(place)
    return f"{place.parent.name}/{name}" if name in (*HUB_DATASETS, "stdlib", "text") else name


def words_sha256(path: Path) -> str:
    """Returns the hash of a local text's words, joined by single spaces."""
    digest = sha256()
    between = b""
    for document in corpora.local_corpus(path).documents():
        digest.update(between + " ".join(document.text.split()).encode("utf-8", "surrogatepass"))
        between = b" "
    return digest.hexdigest()


def model_positions(metadata: Mapping[str, Any]) -> int | None:
    """Returns the number of learned position embeddings of the evaluated model.

    Returns None if the model has none, or if it is not loaded from a checkpoint.
    """
    # imported late: it imports torch, which `sbeval inspect` may not need
    from sbeval.models.learned_positions import checkpoint_learned_positions

    pretrained = metadata.get("pretrained")
    if not isinstance(pretrained, str):
        return None
    revision = metadata.get("revision")
    return checkpoint_learned_positions(pretrained, revision if isinstance(revision, str) else None)


def trained_on(metadata: Mapping[str, Any], corpus: TokenizedCorpus, documents: Iterable[int]) -> list[str] | None:
    """Returns the names of those of the `documents` (indices) that are in the model's training text.

    Returns None if the model's folder holds no record of its training text for this corpus's tokenizer.
    """
    pretrained, subfolder = metadata.get("pretrained"), metadata.get("subfolder")
    if not isinstance(pretrained, str):
        return None
    return seen_documents(local_path(pretrained) / str(subfolder or ""), corpus, documents)


def _wikitext_pages(options: CorpusOptions, changes: Changes) -> Iterator[str]:
    """Yields the pages with line feeds as line ends, as lm-eval's detokeniser expects, and records the changes."""
    if options.data_path is None:
        yield from (page for _, page in corpora.hub_text(HUB_DATASETS["wikitext"]).texts())
        return
    corpus = corpora.local_corpus(options.data_path)
    for document in corpus.documents():
        text = document.text.replace("\r\n", "\n").replace("\r", "\n")
        if text != document.text:
            changes.setdefault("line ends made line feeds", set()).add(document.name)
        yield from corpora.split_wikitext_pages(text)
    changes.update(corpus.changes or {})


def _detokenize_wikitext(page: str) -> str:
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer  # only wikitext needs it

    text: str = wikitext_detokenizer({"page": page})
    return text


@dataclass(frozen=True, kw_only=True, slots=True)
class LeadIn:
    """The rule for the token that is fed before a window's first target; it is the same at every context length.

    Attributes:
        policy: "text" feeds the token that precedes the window in the text. "window" always feeds BOS. "hf" feeds
            lm-eval's prefix token (BOS, else EOS) at the start of a document and the preceding token elsewhere.
        token: the token that is fed instead of the preceding one: at the start of the text ("text"), before every
            window ("window"), or at the start of a document ("hf").
    """

    policy: str
    token: int

    @classmethod
    def settle(cls, task: str, tokenizer: Any, *, requested: str | None, separator: tuple[int, ...]) -> "LeadIn":
        """Returns the rule with the requested policy; by default "window" if the tokenizer adds BOS, otherwise "text".

        Raises:
            UserError: the policy needs BOS, and the tokenizer has none.
        """
        policy = requested or ("window" if corpora.adds_bos(tokenizer) else "text")
        if policy == "text":
            return cls(policy=policy, token=separator[-1] if separator else corpora.prefix_token_id(tokenizer))
        if tokenizer.bos_token_id is None:
            raise UserError(f'{task}: expected a tokenizer with a BOS token for bos "window", found none: use "text".')
        return cls(policy=policy, token=int(tokenizer.bos_token_id))

    def before(self, window: Window, corpus: TokenizedCorpus) -> int:
        """Returns the token that is fed before a window's first target."""
        begins = self.policy == "window" or window.start == 0
        if self.policy == "hf" and not begins:
            begins = window.start == int(corpus.starts[corpus.document_at(window.start)])
        return self.token if begins else int(corpus.tokens(window.start - 1, window.start)[0])
