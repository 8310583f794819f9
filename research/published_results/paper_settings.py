"""The settings of the paper's experiments beside those of this project, for the page of claims.

Numbers of this project come from the code that uses them; the paper's were read from its text (arXiv 2410.17980).
"""

from research.paper_experiments.mqrar import LEARNING_RATES, RecallRun
from research.published_results.found import Found, table
from sbeval.models import preset
from sbeval.sweep.suites import PAPER_LENGTHS
from sbeval.tasks.recall.sequences import LENGTH_TOKENS, PAIRS, VOCABULARY


def settings_section(found: Found) -> list[str]:
    """Returns the lines of the section: what the paper did, what stands here, what differs."""
    run = RecallRun(attention="rope", pairs=PAIRS[0], learning_rate=LEARNING_RATES[0], steps=1)
    missing = sorted(set(PAIRS) - {one["pairs"] for one in found.recall})
    rates = ", ".join(f"{rate:.1e}" for rate in sorted(LEARNING_RATES))
    rows = [
        [
            "Table 1, 5.2",
            "The 350M models have L = 2048 in Table 1 and in the figures on windows; the text of 5.2 says that they "
            "were trained at L = 1024",
            f"presets have Table 1's L ({preset('350m').training_length_tokens:,}, 1B and 3B "
            f"{preset('1b').training_length_tokens:,}); the small models here were trained at {found.length:,} tokens, "
            "which is 1x",
        ],
        [
            "5.2",
            "RoPE, RoPE scaled by f = 1, NoPE, ALiBi, FIRE; windows of 512, 1024 and 2048 at L = 2048; a control at "
            "L = 8192",
            "the same, as multiples of L: windows of 1/4x, 1/2x and 1x, a control at 4x, also with `dynamic:4`",
        ],
        [
            "5.2",
            "The first 15B tokens of SlimPajama; wikitext of lm-eval at 2048 to 64K",
            "Python sources, the standard library at 1/4x to 64x; "
            f"`sbeval sweep --suite paper-length` runs wikitext at {PAPER_LENGTHS[0]:,} to {PAPER_LENGTHS[-1]:,}",
        ],
        [
            "5.1",
            "MQRAR of 32 to 192 pairs in steps of 32, sequences of 768 tokens; 2 layers, 256 dimensions, one head; the "
            "best of four learning rates from 1e-4 to 1e-2. The vocabulary is unstated",
            f"the same: {', '.join(map(str, PAIRS))} pairs, {LENGTH_TOKENS} tokens; {run.layers} layers, "
            f"{run.hidden_size} dimensions; {rates}. {VOCABULARY:,} token ids, as in Zoology"
            + (f". Not yet run: {', '.join(map(str, missing))} pairs" if missing else "")
            + "; a rate is not tried once another has solved its cell",
        ],
        [
            "C.1",
            "6250 steps of 4M tokens at 16K after 4096, from 1e-5 to 1.25e-4 in 150 steps, then exponentially to zero; "
            "softmax with dynamic scaling by 4",
            "the defaults of `sbeval extend`, whose decay is (e^(1-x) - 1) / (e - 1); the extensions published here "
            "are shorter and at another rate, as their page says",
        ],
        [
            "Table 5",
            "One column for ARC, without saying which; MMLU without its shots",
            "the mean of ARC-challenge and ARC-easy; as many shots as are asked for, 0 by default",
        ],
    ]
    return [
        "",
        "## Settings",
        "",
        "What the paper's text says of its experiments, and what stands here in its place. Tables 2 to 5 are in "
        "`sbeval/paper/values.csv`; a report shows them beside what was measured of them.",
        "",
        *table(["where", "the paper", "here"], rows),
    ]
