"""How many tokens a step of greedy decoding would give if drafts were looked up in the prompt, from answers that exist.

    python -m research.decoding_studies.prompt_lookup CHECKPOINT SAMPLES.jsonl ... [--drafts 7] [--match 2]

After each token the text so far is searched for the newest earlier place of its last `--match` tokens, and what
followed there is the draft. A step gives the drafts that are the answer's own next tokens, and one token more; answers
are those of lm-eval's samples files, by prompt length. A step that checks drafts takes at least as long as one that
does not, so the number is the most that decoding could gain.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer


def steps(prompt: Sequence[int], answer: Sequence[int], *, drafts: int, match: int) -> int:
    """Returns how many steps give the answer.

    Args:
        prompt: tokens, at least `match`.
        answer: tokens that the model chose after it.
        drafts: most tokens looked up at a time.
        match: how many tokens are searched for.
    """
    text = list(prompt)
    followed: dict[tuple[int, ...], int] = {}
    searched = match
    taken = done = 0
    while done < len(answer):
        for end in range(searched, len(text)):  # the last tokens are not followed by anything yet
            followed[tuple(text[end - match : end])] = end
        searched = max(searched, len(text))
        start = followed.get(tuple(text[-match:]), len(text))
        draft = text[start : start + drafts]
        right = 0
        while right < len(draft) and done + right < len(answer) - 1 and draft[right] == answer[done + right]:
            right += 1
        text += answer[done : done + right + 1]
        done += right + 1
        taken += 1
    return taken


def main() -> None:
    """Prints a line for each file and prompt length."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("samples", nargs="+", type=Path)
    parser.add_argument("--drafts", type=int, default=7)
    parser.add_argument("--match", type=int, default=2)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.checkpoint)
    print("| samples | prompts of | answers | tokens an answer | tokens a step |\n|---|---|---|---|---|")
    for file in arguments.samples:
        counts: dict[int, list[tuple[int, int]]] = defaultdict(list)
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                sample = json.loads(line)
                for asked, (text, *_) in zip(sample["arguments"].values(), sample["resps"], strict=True):
                    prompt = tokenizer.encode(asked["arg_0"])
                    answer = tokenizer.encode(text, add_special_tokens=False)
                    if answer:
                        taken = steps(prompt, answer, drafts=arguments.drafts, match=arguments.match)
                        counts[1 << len(prompt).bit_length()].append((len(answer), taken))
        for length, found in sorted(counts.items()):
            tokens, taken = (sum(numbers) for numbers in zip(*found, strict=True))
            name = file.name.removeprefix("samples_").rpartition("_")[0]
            print(
                f"| {name} | up to {length} tokens | {len(found)} | {tokens / len(found):.0f} | {tokens / taken:.2f} |"
            )


if __name__ == "__main__":
    main()
