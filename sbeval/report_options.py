"""Options of `sbeval report`: the contents of its page, the comparison of two models, and publishing."""

import typer

PATHS = typer.Argument(help="Results files of lm-eval, or folders with results files.")
OUTPUT = typer.Option("--output", "-o", help="Folder for index.html, figures and tables.")
LABEL = typer.Option(metavar="OLD=NEW", help="Show the model or text OLD under the name NEW; repeatable.")
BASELINE = typer.Option(help="Model that differences are taken against; the first RoPE model if not given.")
ONLY = typer.Option(metavar="NAME", help="Name or pattern of models or tasks to show; repeatable.")
AXIS = typer.Option(
    help="Lengths in figures: in tokens, or in multiples of each model's training or declared length; pages can switch."
)
WITHIN = typer.Option(
    metavar="NATS", min=0.0, help="A context is long enough if NLL is at most this much above that of the longest one."
)
PAPER = typer.Option(metavar="DIR", help="Also write figures as PDF, captions and tables as LaTeX for a paper.")
FIGURE = typer.Option(metavar="NAME", help="With --paper: name or pattern of a figure's file to write; repeatable.")
COMPARE = typer.Option(
    metavar="A B",
    help="Print B minus A on the same targets instead of a page: results folders, or models below PATHS.",
)
FAIL_IF_WORSE = typer.Option(
    "--fail-if-worse",
    help="With --compare: exit code 1 if B is worse by more than --least-effect, or has a shorter effective length.",
)
LEAST_EFFECT = typer.Option(
    metavar="X",
    help="With --compare: B counts as worse if a whole confidence band exceeds this, in nats, bits or a score's unit; "
    "0.02 if not given.",
)
GATE = typer.Option(
    metavar="FILE",
    help="With --compare: judge B by the rules of a YAML file; exit code 1 if a rule fails, 3 if none fails but one "
    "lacks data or cannot be compared.",
)
HUB_RESULTS = typer.Option(
    metavar="DIR", help="Also write evaluation result files for the hub, a folder for each model."
)
HUB_DATASET = typer.Option(metavar="TASK=OWNER/NAME", help="With --hub-results: the data set of a task; repeatable.")
WANDB = typer.Option(metavar="PROJECT", help="Also log the curves to wandb.")
TRACKIO = typer.Option(metavar="PROJECT", help="Also log the curves to trackio.")
