"""The configuration keys of the public sources, as `config_keys.json` keeps them, read anew from clones of theirs.

    python -m tests.checkpoints.config_keys FOLDER

FOLDER holds clones named lm-engine, dolomite-engine-branches (shawntan/dolomite-engine), flash-linear-attention,
forgetting-transformer (zhixuan-lin) and ModuleFormer. Every version in their histories counts: checkpoints outlive the
code that wrote them.
"""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

KEYS_FILE = Path(__file__).with_name("config_keys.json")
_DOLOMITE = "dolomite_engine/hf_models"
_BLOCK_FILES = (f"{_DOLOMITE}/config/*.py", "lm_engine/hf_models/config/*.py", "lm_engine/modeling_utils/*/*/config.py")


class Source(NamedTuple):
    """Where the keys of one part of a configuration are declared.

    Attributes:
        clone: folder of the repository.
        revisions: which histories, as `git log` takes them.
        paths: the files.
        classes: the classes that declare them, base classes included.
    """

    clone: str
    revisions: tuple[str, ...]
    paths: tuple[str, ...]
    classes: tuple[str, ...]


_FLAT = (f"{_DOLOMITE}/config.py", *(f"{_DOLOMITE}/models/{name}/config.py" for name in ("gpt_dolomite", "*stickbr*")))
_FLAT_CLASSES = ("CommonConfig", "GPTDolomiteConfig", "StickBreakingConfig", "SBDolomiteConfig")
_MOE = f"{_DOLOMITE}/models/moe_dolomite/config.py"
_FOX = "src/forgetting_transformer/model"
_BRANCHES = ("sb-moe", "forgetting", "forgetting-default-init", "moe-stickbreaking-tp", "stickbreaking", "sb-new")
SOURCES: dict[str, tuple[Source, ...]] = {
    "flat": (
        # before attention_blocks, 2025-02-06
        Source("lm-engine", ("e0376695~1",), _FLAT, _FLAT_CLASSES),
        Source("dolomite-engine-branches", _BRANCHES, _FLAT, _FLAT_CLASSES),
    ),
    "flat mixture": (
        Source("lm-engine", ("e0376695~1",), (_MOE,), ("MoEDolomiteConfig",)),
        Source("dolomite-engine-branches", _BRANCHES, (_MOE,), ("MoEDolomiteConfig",)),
    ),
    "blocks": (
        # since stick-breaking was merged with blocks, 2025-02-28
        Source(
            "lm-engine",
            ("7656a933~1..HEAD",),
            (f"{_DOLOMITE}/config/__init__.py", "lm_engine/hf_models/config/__init__.py", "lm_engine/model_config.py"),
            ("CommonConfig",),
        ),
    ),
    "softmax_attention": (
        Source("lm-engine", ("7656a933~1..HEAD",), _BLOCK_FILES, ("_SoftmaxAttentionArgs", "SoftmaxAttentionArgs")),
    ),
    "stickbreaking_attention": (
        Source("lm-engine", ("7656a933~1..HEAD",), _BLOCK_FILES, ("_StickbreakingAttentionArgs",)),
    ),
    "MLP": (Source("lm-engine", ("7656a933~1..HEAD",), _BLOCK_FILES, ("_MLPArgs", "MLPArgs")),),
    "MoE": (Source("lm-engine", ("7656a933~1..HEAD",), _BLOCK_FILES, ("_MLPArgs", "MLPArgs", "_MoEArgs", "MoEArgs")),),
    "fla": (
        Source(
            "flash-linear-attention",
            ("--all",),  # added and taken back in September 2025, in releases since 0.6.0
            ("fla/models/stickbreaking_attn/configuration_stickbreaking_attn.py",),
            ("StickBreakingAttentionConfig",),
        ),
    ),
    "fla forgetting": (
        Source(
            "flash-linear-attention",
            ("--all",),
            ("fla/models/forgetting_transformer/configuration_forgetting_transformer.py",),
            ("ForgettingTransformerConfig",),
        ),
    ),
    "fox": (
        Source(
            "forgetting-transformer",
            ("HEAD",),
            (f"{_FOX}/forgetting_transformer/configuration_forgetting_transformer.py",),
            ("ForgettingTransformerConfig",),
        ),
    ),
    "fox softmax": (
        Source(
            "forgetting-transformer",
            ("HEAD",),
            (f"{_FOX}/transformer/configuration_transformer.py",),
            ("TransformerConfig",),
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
                arguments = [*node.args.args, *node.args.kwonlyargs]
                keys.update(one.arg for one in arguments if one.arg != "self")
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
                text = git("show", f"{commit}:{path}")
                for key in sorted(declared_keys(text, source.classes)):
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
