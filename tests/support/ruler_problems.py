"""Tokenizers of three kinds, corpora in RULER's layouts, and tasks built from them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import transformers
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from partial_model import PartialModel
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

import sbeval.tasks
from sbeval.scoring.requests import TargetLogprobs, resolve_sequence

NIAH = (
    *(f"sb_niah_{kind}_{number}" for kind in ("single", "multikey") for number in (1, 2, 3)),
    *("sb_niah_multivalue", "sb_niah_multiquery"),
)
TASKS = (*NIAH, "sb_ruler_vt", "sb_ruler_cwe", "sb_ruler_fwe", "sb_ruler_qa_squad", "sb_ruler_qa_hotpot")
FILLED = (*TASKS, "sb_json_kv", "sb_many_shot_file", "sb_association", "sb_turns", "sb_tally_most")
FILLED += ("sb_longbench2_short",)
"""Tasks whose prompts are filled to a length."""
KINDS = ("byte_level_bpe", "sentencepiece", "character")

_SENTENCES = (
    "Old maps lie about the coast, and sailors learn to laugh at them.",
    'A clerk once asked, "Who will count the stars?"',
    "Nobody in the village had seen 7 lamps burn at noon!",
    "Mr. Hale kept bees behind the mill; he sold the honey in winter.",
    "Was the bridge older than the river's new bed?",
    "It costs 3.50 to cross, i.e. more than the ferry did in 1899.",
    "The special words were hidden in a drawer with the numbers 1234567 and 89.",
)


def write_essays(folder: Path) -> Path:
    """Writes two essays of a few thousand words."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(2):
        text = "\n\n".join(
            " ".join(_SENTENCES[(number + i * 3 + j) % len(_SENTENCES)] for j in range(5)) for i in range(12)
        )
        (folder / f"essay{number}.txt").write_text(text, encoding="utf-8")
    return folder


def write_squad(path: Path) -> Path:
    """Writes questions in the layout of SQuAD 2, some of them impossible."""
    articles = []
    for article in range(6):
        paragraphs = []
        for paragraph in range(4):
            year = 1500 + 20 * article + paragraph
            answers = [{"text": f"in {year}"}, {"text": str(year)}, {"text": str(year)}]
            town = f"{article}-{paragraph}"
            context = f"Town {town} was founded in {year}. " + _SENTENCES[paragraph] * (1 + article)
            questions = [
                {"question": f"When was town {town} founded?", "answers": answers, "is_impossible": False},
                {"question": "Who was its first queen?", "answers": [], "is_impossible": True},
            ]
            paragraphs.append({"context": context, "qas": questions})
        articles.append({"title": str(article), "paragraphs": paragraphs})
    path.write_text(json.dumps({"data": articles}), encoding="utf-8")
    return path


def write_hotpot(path: Path) -> Path:
    """Writes questions in the layout of HotpotQA's distractor setting."""
    entries = [
        {
            "question": f"Who wrote book {number}?",
            "answer": f"Author {number}",
            "context": [[f"Title {number}-{d}", [f"Book {number}, part {d}. ", "It sold well."]] for d in range(4)],
        }
        for number in range(9)
    ]
    path.write_text(json.dumps(entries), encoding="utf-8")
    return path


def write_labelled(path: Path, *, labels: int = 12, rows: int = 240) -> Path:
    """Writes texts whose last word tells the label."""
    with path.open("w", encoding="utf-8") as file:
        for number, label in ((number, number % labels) for number in range(rows)):
            row = {"text": f"Clerk {number} asks for a {chr(97 + label)}{label}", "label": f"x{label}"}
            file.write(json.dumps(row) + "\n")
    return path


def write_long_bench(path: Path, rows: int = 60) -> Path:
    """Writes questions in the layout of LongBench v2, on texts that name the answer at their end."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(rows):
            text = " ".join(_SENTENCES[(number + i) % len(_SENTENCES)] for i in range(40 * (1 + number % 5)))
            choices = {f"choice_{letter}": f"{letter.lower()}{number}" for letter in "ABCD"}
            right = "ABCD"[number % 4]
            row = {"context": f"{text} It is {right}.", "question": f"Which is {number}?", "answer": right, **choices}
            file.write(json.dumps(row) + "\n")
    return path


def byte_level_bpe(
    texts: list[str], vocabulary: int, *, adds_bos: bool, **special: str
) -> transformers.PreTrainedTokenizerFast:
    """Trains a tokenizer that begins and ends a text with <s> and </s>."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"bos_token": "<s>", "eos_token": "</s>", **special}
    options = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[*special.values()], **options)
    tokenizer.train_from_iterator(texts, trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def make_tokenizer(kind: str, texts: list[str]) -> transformers.PreTrainedTokenizerFast:
    """Builds a tokenizer: byte-level BPE, Unigram behind Metaspace that adds BOS, or one token a character."""
    if kind == "byte_level_bpe":
        return byte_level_bpe(texts, 700, adds_bos=False)
    if kind == "sentencepiece":
        tokenizer = tokenizers.Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.Replace("\n", " \u2424 ")
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        alphabet = [chr(code) for code in range(33, 127)] + ["\u2424", "\u2581"]
        trainer = trainers.UnigramTrainer(
            vocab_size=400, special_tokens=["<s>", "</s>", "<unk>"], unk_token="<unk>", initial_alphabet=alphabet
        )
        tokenizer.train_from_iterator(texts, trainer)
        bos = tokenizer.token_to_id("<s>")
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    else:
        vocabulary = {"<s>": 0, "</s>": 1, "<unk>": 2}
        vocabulary |= {chr(code): i for i, code in enumerate([10, *range(32, 127)], start=3)}
        tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("[\\s\\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def write_inputs(folder: Path) -> dict[str, Any]:
    """Writes corpora and tokenizers; returns metadata with the corpora, tokenizers lie in `folder` by kind."""
    essays = write_essays(folder / "essays")
    texts = [path.read_text(encoding="utf-8") for path in sorted(essays.glob("*.txt"))]
    texts += ["The grass is green. VAR ABC = VAR XYZ", "One of the special magic numbers for dry-land is: 7654321."]
    for kind in KINDS:
        make_tokenizer(kind, texts).save_pretrained(folder / kind)
    squad, hotpot = write_squad(folder / "squad.json"), write_hotpot(folder / "hotpot.json")
    write_labelled(folder / "labelled.jsonl")
    long_bench = write_long_bench(folder / "longbench2.jsonl")
    return {"essays": str(essays), "squad": str(squad), "hotpot": str(hotpot), "longbench2": str(long_bench)}


def task_manager(metadata: dict[str, Any] | None = None) -> TaskManager:
    """Returns a task manager with only the packaged tasks."""
    return TaskManager(include_path=str(*sbeval.tasks.__path__), include_defaults=False, metadata=metadata)


def load_task(name: str, metadata: dict[str, Any]) -> Any:
    """Builds a task as lm-eval does from its YAML."""
    return task_manager(metadata).load([name])["tasks"][name]


def evaluated(model: LM, tasks: list[str], metadata: dict[str, Any], **options: Any) -> Any:
    """Runs packaged tasks as `lm_eval` does."""
    return simple_evaluate(model, tasks=tasks, task_manager=task_manager(metadata), bootstrap_iters=10, **options)


def prompts(task: Any, *, limit: int | None = None, **options: Any) -> list[str]:
    """Builds a task's requests and returns their prompts."""
    task.build_all_requests(limit=limit, rank=0, world_size=1, **options)
    return [instance.args[0] for instance in task.instances]


class Chooser(PartialModel):
    """Gives each answer the log-probability that `rate` makes of it and of the right one.

    Args:
        tokenizer: folder of the tokenizer.
        solved: reads the right answer from a prompt.
        rate: log-probability of an answer, given the right one.
        end: the text that the task writes behind each answer.
    """

    def __init__(
        self, tokenizer: str, solved: Callable[[str], str], rate: Callable[[str, str], float], end: str = ""
    ) -> None:
        super().__init__()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer)
        self.solved, self.rate, self.end = solved, rate, end

    def target_logprobs(self, requests: list[Instance], disable_tqdm: bool = False) -> list[TargetLogprobs]:
        answers = []
        for request in requests:
            inputs, positions, targets = resolve_sequence(request.args[0])
            right = self.solved(self.tokenizer.decode(inputs[: positions[0] + 1]))
            answer = self.tokenizer.decode(targets).strip().removesuffix(self.end)
            logprobs = np.full(len(targets), self.rate(answer, right) / len(targets))
            answers.append(TargetLogprobs(logprobs, np.full(len(targets), True)))
        return answers
