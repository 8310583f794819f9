"""`generate_until`: from lm-eval's requests to their answers."""

from collections.abc import Sequence

from lm_eval.api.instance import Instance
from lm_eval.models.utils import normalize_gen_kwargs

from sbeval.errors import UserError
from sbeval.model_adapters.answers import Answers, request_name
from sbeval.model_adapters.encoding import encode_prompts
from sbeval.model_adapters.generate.answers import answers_of
from sbeval.model_adapters.session import Session, Tally
from sbeval.model_adapters.truncation import fit_prompts, record_facts
from sbeval.scoring.non_finite import NoText


def generate_until(session: Session, requests: Sequence[Instance], *, quiet: bool) -> list[str]:
    """Returns the continuation of each prompt up to its first stop sequence, without the model's thinking."""
    opened = session.opened
    settings = [normalize_gen_kwargs(request.args[1], opened.max_gen_toks) for request in requests]
    if session.thinking is not None and (begun := {r.task_name for r in requests if _begins_its_answer(session, r)}):
        remedy = "leave thinking_tokens out for them, or pass it in the metadata of tasks of this project too"
        raise UserError(
            "A model cannot think before an answer that the prompt has already begun, as prompts do in "
            f"{', '.join(sorted(map(str, begun)))}: {remedy}."
        )
    encoded = encode_prompts(opened, [request.args[0] for request in requests], quiet=quiet or session.quiet)
    session.check_tokens((request_name(request), [tokens]) for request, tokens in zip(requests, encoded, strict=True))
    prompts = fit_prompts(session, encoded, settings, [request.task_name for request in requests])
    arguments = dict(enumerate(request.args[:2] for request in requests))
    answers: Answers[int, str] = Answers(session, "generate_until", arguments, quiet=quiet)
    with answers:
        for index, text in answers.each(answers_of(session, prompts)):
            if isinstance(text, NoText) and session.scorer.non_finite == "error":
                answers.fail(text.error.of(request_name(requests[index])))
            else:
                answers.give(index, text)
    if session.cache_hook.dbdict is None:
        count_answers(session, requests, answers.in_order())
    return answers.in_order()


def count_answers(session: Session, requests: Sequence[Instance], answers: Sequence[str]) -> None:
    """Counts answers, also those from a response cache, and adds facts such as `answer_cut` to the logged samples."""
    tally = Tally()
    for request, answer in zip(requests, answers, strict=True):
        if (facts := getattr(answer, "facts", None)) is None:  # an earlier version cached the answer, without facts
            continue
        tally.add(facts)
        ends = session.tally.chat or session.thinking is not None  # base models never end their answers
        record_facts(request, **facts if ends else {**facts, "answer_cut": None})
    session.tally.merge(tally)


def _begins_its_answer(session: Session, request: Instance) -> bool:
    """Whether a prompt ends inside the model's answer. The model then continues it, and cannot think before it."""
    text, doc = request.args[0], request.doc if isinstance(request.doc, dict) else {}
    prefix = doc.get("answer_prefix") or doc.get("gen_prefix")  # RULER's documents, here and in lm-eval
    ends_with_prefix = (
        prefix and "answer_prefix" not in request.args[1] and text.rstrip().endswith(str(prefix).rstrip())
    )
    return bool(ends_with_prefix) or hash(text) in session.begun
