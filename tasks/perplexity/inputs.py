"""The corpus of a task and the positions of its model, from what lm-eval hands it."""

from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from sbeval.corpora import (
    Corpus,
    hub_corpus,
    hub_text,
    local_corpus,
    split_wikitext_pages,
    stdlib_corpus,
    text_name,
    wikitext_corpus,
)
from sbeval.corpora.split import split_corpus
from sbeval.tasks.perplexity.options import HUB_DATASETS, CorpusOptions

# over the words of wikitext-2's test split: copies share them, whatever their line ends
_WIKITEXT_WORDS_SHA256 = "06f8f4136de90fcf1b32ffda9136ecab621b3e437c370b5cdd27b37e9e9e9efc"


def load_corpus(name: str, options: CorpusOptions, tokenizer: Any) -> Corpus:
    """Returns the corpus of this name, or what `data_path` or `dataset` name, under a name of its own.

    Args:
        name: of the corpus.
        options: which text is read, and how it is split.
        tokenizer: the model's, which counts tokens to split by.

    Raises:
        UserError: there is no such text, or it cannot be read or split as asked.
    """
    options.check_text(name)
    corpus = _whole_corpus(name, options)
    if options.split is None:
        return corpus
    return split_corpus(corpus, options.split, tokenizer)


def _whole_corpus(name: str, options: CorpusOptions) -> Corpus:
    if name == "wikitext":
        path = options.data_path
        read = name if path is None or words_sha256(path) == _WIKITEXT_WORDS_SHA256 else _local_name(path)
        return wikitext_corpus(lambda: _wikitext_pages(options), detokenize=_detokenize_wikitext, name=read)
    if options.data_path is not None:
        return local_corpus(
            options.data_path, name=_local_name(options.data_path), text_field=options.text_field or "text"
        )
    if name == "stdlib" and options.dataset is None:
        return stdlib_corpus()
    source = hub_text(
        options.dataset or HUB_DATASETS[name],
        config=options.dataset_config,
        split=options.dataset_split,
        text_field=options.text_field,
    )
    return hub_corpus(source, name=options.dataset or name)


def _local_name(path: Path) -> str:
    """Returns the name of a file or folder, with its parent's where it would be taken for a corpus known here."""
    place = path.expanduser().resolve()
    name = text_name(place)
    return f"{place.parent.name}/{name}" if name in (*HUB_DATASETS, "stdlib", "text") else name


def words_sha256(path: Path) -> str:
    """Returns the hash over the words of a local text, single spaces between them."""
    digest, between = sha256(), b""
    for document in local_corpus(path).documents():
        digest.update(between + " ".join(document.text.split()).encode("utf-8", "surrogatepass"))
        between = b" "
    return digest.hexdigest()


def model_positions(metadata: Mapping[str, Any]) -> int | None:
    """Returns the learned positions of the model under test, None for a model without or one that is no checkpoint."""
    from sbeval.models.learned_positions import checkpoint_learned_positions

    pretrained = metadata.get("pretrained")
    if not isinstance(pretrained, str):
        return None
    revision = metadata.get("revision")
    return checkpoint_learned_positions(pretrained, revision if isinstance(revision, str) else None)


def _wikitext_pages(options: CorpusOptions) -> Iterator[str]:
    if options.data_path is None:
        yield from (page for _, page in hub_text(HUB_DATASETS["wikitext"]).texts())
        return
    for document in local_corpus(options.data_path).documents():
        yield from split_wikitext_pages(document.text)


def _detokenize_wikitext(page: str) -> str:
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    text: str = wikitext_detokenizer({"page": page})
    return text
