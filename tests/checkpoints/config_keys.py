"""The configuration keys of the public sources, as `config_keys.json` keeps them, read anew from clones of theirs.

    python -m tests.checkpoints.config_keys FOLDER

FOLDER holds clones named lm-engine, dolomite-engine-branches (shawntan/dolomite-engine), flash-linear-attention,
forgetting-transformer (zhixuan-lin), forgetting-transformer-fork (Lanni-ni) and ModuleFormer. Every version in their
histories counts: checkpoints outlive the code that wrote them.
"""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

KEYS_FILE = Path(__file__).with_name("config_keys.json")


class Source(NamedTuple):
    """A clone, histories in it as `git log` takes them, the files that declare keys, and classes with their bases."""

    clone: str
    revisions: tuple[str, ...]
    paths: tuple[str, ...]
    classes: tuple[str, ...]


_DOLOMITE, _FOX = "dolomite_engine/hf_models", "src/forgetting_transformer/model"
_FLAT = (f"{_DOLOMITE}/config.py", *(f"{_DOLOMITE}/models/{name}/config.py" for name in ("gpt_dolomite", "*stickbr*")))
_FLAT_CLASSES = ("CommonConfig", "GPTDolomiteConfig", "StickBreakingConfig", "SBDolomiteConfig")
_MOE = (f"{_DOLOMITE}/models/moe_dolomite/config.py",), ("MoEDolomiteConfig",)
_BLOCKS = (f"{_DOLOMITE}/config/__init__.py", "lm_engine/hf_models/config/__init__.py", "lm_engine/model_config.py")
_BLOCK = (f"{_DOLOMITE}/config/*.py", "lm_engine/hf_models/config/*.py", "lm_engine/modeling_utils/*/*/config.py")
# before attention_blocks, 2025-02-06, and since stick-breaking was merged with blocks, 2025-02-28
_OLDER, _NEWER = ("lm-engine", ("e0376695~1",)), ("lm-engine", ("7656a933~1..HEAD",))
_BRANCHES = ("sb-moe", "forgetting", "forgetting-default-init", "moe-stickbreaking-tp", "stickbreaking", "sb-new")
_OF_BRANCHES = ("dolomite-engine-branches", _BRANCHES)
# stick-breaking was added and taken back in September 2025, and is in releases since 0.6.0
_FLA, _AUTHORS = ("flash-linear-attention", ("--all",)), ("forgetting-transformer", ("HEAD",))
_FORGETTING = "forgetting_transformer/configuration_forgetting_transformer.py", ("ForgettingTransformerConfig",)
_STICKS = "fla/models/stickbreaking_attn/configuration_stickbreaking_attn.py"
SOURCES: dict[str, tuple[Source, ...]] = {
    "flat": tuple(Source(*history, _FLAT, _FLAT_CLASSES) for history in (_OLDER, _OF_BRANCHES)),
    "flat mixture": tuple(Source(*history, *_MOE) for history in (_OLDER, _OF_BRANCHES)),
    "blocks": (Source(*_NEWER, _BLOCKS, ("CommonConfig",)),),
    "softmax_attention": (Source(*_NEWER, _BLOCK, ("_SoftmaxAttentionArgs", "SoftmaxAttentionArgs")),),
    "stickbreaking_attention": (Source(*_NEWER, _BLOCK, ("_StickbreakingAttentionArgs",)),),
    "MLP": (Source(*_NEWER, _BLOCK, ("_MLPArgs", "MLPArgs")),),
    "MoE": (Source(*_NEWER, _BLOCK, ("_MLPArgs", "MLPArgs", "_MoEArgs", "MoEArgs")),),
    "fla": (Source(*_FLA, (_STICKS,), ("StickBreakingAttentionConfig",)),),
    "fla forgetting": (Source(*_FLA, (f"fla/models/{_FORGETTING[0]}",), _FORGETTING[1]),),
    "fox": (Source(*_AUTHORS, (f"{_FOX}/{_FORGETTING[0]}",), _FORGETTING[1]),),
    "fox softmax": (Source(*_AUTHORS, (f"{_FOX}/transformer/configuration_transformer.py",), ("TransformerConfig",)),),
    "fox stickbreaking": (
        Source(
            "forgetting-transformer-fork",
            ("HEAD",),
            (f"{_FOX}/stickbreaking/configuration_stickbreaking.py",),
            ("StickbreakingConfig",),
        ),
    ),
    "moduleformer": (
        Source("ModuleFormer", ("HEAD",), ("moduleformer/configuration_moduleformer.py",), ("ModuleFormerConfig",)),
    ),
}


def declared_keys(text: str, classes: tuple[str, ...]) -> set[str]:
    """Returns the fields, arguments and attributes that classes of a Python file declare."""
    keys: set[str] = set()
    for found in ast.walk(ast.parse(text)):
        if not isinstance(found, ast.ClassDef) or found.name not in classes:
            continue
        for node in found.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                keys.add(node.target.id)
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                keys.update(one.arg for one in [*node.args.args, *node.args.kwonlyargs] if one.arg != "self")
                targets = [t for n in ast.walk(node) if isinstance(n, ast.Assign) for t in n.targets]
                keys.update(t.attr for t in targets if isinstance(t, ast.Attribute) and ast.unparse(t.value) == "self")
    return keys


def keys_of(folder: Path, source: Source) -> dict[str, str]:
    """Returns every key a source ever declared with the first commit that did."""

    def git(*arguments: str) -> str:
        found = subprocess.run(
            ["git", "-C", str(folder / source.clone), *arguments], check=True, capture_output=True, text=True
        )
        return found.stdout

    first: dict[str, str] = {}
    globs = [f":(glob){path}" for path in source.paths]
    for commit in git("log", "--reverse", "--format=%H", *source.revisions, "--", *globs).split():
        for path in git("ls-tree", "-r", "--name-only", commit).splitlines():
            if any(Path(path).match(pattern) for pattern in source.paths):
                for key in sorted(declared_keys(git("show", f"{commit}:{path}"), source.classes)):
                    first.setdefault(key, commit)
    return first


def main() -> None:
    """Writes the keys of every source."""
    folder = Path(sys.argv[1])
    parts: dict[str, dict[str, str]] = {}
    for part, sources in SOURCES.items():
        keys: dict[str, str] = {}
        for source in sources:
            for key, commit in keys_of(folder, source).items():
                keys.setdefault(key, f"{source.clone} {commit[:10]}")
        parts[part] = dict(sorted(keys.items()))
    KEYS_FILE.write_text(json.dumps(parts, indent=1) + "\n")


if __name__ == "__main__":
    main()
