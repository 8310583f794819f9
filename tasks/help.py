"""Which keys may `--metadata` have, for the help of `sbeval run`; read from the settings themselves, without torch."""

from sbeval.settings import described
from sbeval.tasks.metadata import SampleOptions, TaskOptions
from sbeval.tasks.perplexity.options import CorpusOptions, PerplexityOptions
from sbeval.tasks.recall import options as recall
from sbeval.tasks.ruler import options as ruler

_OF: tuple[tuple[str, type[TaskOptions]], ...] = (
    ("every sb_ task", TaskOptions),
    ("perplexity and attention spans: which text", CorpusOptions),
    ("perplexity: sb_wikitext, sb_stdlib, sb_pile, sb_pg19, sb_text", PerplexityOptions),
    ("attention spans: sb_span", recall.SpanOptions),
    ("tasks that draw samples: RULER, recall, copying", SampleOptions),
    ("RULER: sb_ruler", ruler.RulerOptions),
    ("needles: sb_niah, sb_niah_forced, sb_json_kv", ruler.NiahOptions),
    ("variable tracking: sb_ruler_vt", ruler.VtOptions),
    ("common words: sb_ruler_cwe", ruler.CweOptions),
    ("frequent words: sb_ruler_fwe", ruler.FweOptions),
    ("associative recall: sb_mqrar, sb_mqrar_text", recall.MqrarTextOptions),
    ("sb_mqrar, where it differs from sb_mqrar_text", recall.MqrarOptions),
    ("flip-flops: sb_flipflop", recall.FlipFlopOptions),
    ("copying: sb_copy", recall.CopyOptions),
    ("a passage: sb_copy_passage", recall.PassageOptions),
    ("marked words: sb_copy_selective", recall.SelectiveOptions),
    ("phrases by distance: sb_copy_phrase", recall.PhraseOptions),
    ("many-shot classification: sb_many_shot", recall.ManyShotOptions),
)


def metadata_keys() -> list[tuple[str, list[tuple[str, str]]]]:
    """Returns, for each kind of task, the keys that no kind above it shares with the same meaning."""
    found = []
    for title, kind in _OF:
        above = {line for parent in kind.__mro__[1:] for line in _lines(parent)}
        if own := [line for line in described(kind, without=kind.fixed) if line not in above]:
            found.append((title, own))
    return found


def _lines(kind: type[object]) -> list[tuple[str, str]]:
    return described(kind) if issubclass(kind, TaskOptions) else []
