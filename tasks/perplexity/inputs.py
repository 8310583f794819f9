"""The corpus and the tokenizer of a task, from what lm-eval hands it."""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from sbeval.corpora import (
    Corpus,
    hub_corpus,
    hub_text,
    local_corpus,
    split_wikitext_pages,
    stdlib_corpus,
    wikitext_corpus,
)
from sbeval.errors import UserError
from sbeval.tasks.perplexity.options import CorpusOptions

HUB_DATASETS = {
    "wikitext": "EleutherAI/wikitext_document_level",
    "pile": "NeelNanda/pile-10k",
    "pg19": "emozilla/pg19-test",
}
_TOKENIZER_ARGUMENTS = ("revision", "subfolder", "trust_remote_code", "add_bos_token")


def load_corpus(name: str, options: CorpusOptions) -> Corpus:
    """Returns the corpus of this name, read from `data_path` or `dataset` where one was given."""
    if name == "wikitext":
        if options.dataset is not None or options.text_field is not None:
            raise UserError(
                "Expected wikitext to come from its own hub dataset or from data_path, found dataset or text_field in "
                "--metadata: use sb_text with the same values for another dataset."
            )
        return wikitext_corpus(lambda: _wikitext_pages(options), detokenize=_detokenize_wikitext)
    if options.data_path is not None:
        return local_corpus(options.data_path, name=name, text_field=options.text_field or "text")
    if name == "stdlib" and options.dataset is None:
        return stdlib_corpus()
    dataset = options.dataset or HUB_DATASETS.get(name)
    if dataset is None:
        raise UserError(
            'Expected a text to read, found none: name one with --metadata \'{"data_path": "..."}\' or '
            '\'{"dataset": "owner/name"}\'.'
        )
    source = hub_text(
        dataset,
        config=options.dataset_config,
        split=options.dataset_split,
        text_field=options.text_field,
    )
    return hub_corpus(source, name=name)


def load_tokenizer(task: str, metadata: Mapping[str, Any]) -> Any:
    """Returns the tokenizer of the model under test: `tokenizer` in the model's arguments, else `pretrained`."""
    source = metadata.get("tokenizer") or metadata.get("pretrained")
    if source is None:
        raise UserError(
            f"{task}: expected the model's tokenizer, found neither tokenizer nor pretrained: "
            "name one in --model_args or --metadata."
        )
    if not isinstance(source, str):
        return source
    options = {key: metadata[key] for key in _TOKENIZER_ARGUMENTS if metadata.get(key) is not None}
    try:
        return _cached_tokenizer(source, tuple(sorted(options.items())))
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{task}: expected a tokenizer at {source!r}, found none that loads ({reason}): "
            "name one with tokenizer= in --model_args."
        ) from error


def model_positions(metadata: Mapping[str, Any]) -> int | None:
    """Returns the learned positions of the model under test, None for a model without or one that is no checkpoint."""
    from sbeval.models.learned_positions import checkpoint_learned_positions

    pretrained = metadata.get("pretrained")
    if not isinstance(pretrained, str):
        return None
    revision = metadata.get("revision")
    return checkpoint_learned_positions(pretrained, revision if isinstance(revision, str) else None)


@lru_cache(maxsize=2)
def _cached_tokenizer(source: str, options: tuple[tuple[str, Any], ...]) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(source, **dict(options))


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
