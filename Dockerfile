# sbeval on one machine with NVIDIA GPUs. Build it in a checkout: docker build --tag sbeval .
# It was not built by its authors, who had no Docker: docs/slurm.md says what was tried.
# torch's wheels for Linux bring CUDA's libraries and Triton the compiler of kernels' binaries, so that the base needs the
# driver's interface alone; gcc builds Triton's launchers at run time.
FROM nvidia/cuda:13.0.2-base-ubuntu24.04

ARG DEBIAN_FRONTEND=noninteractive
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/sbeval/bin:$PATH
COPY constraints.txt /tmp/
RUN python3 -m venv /opt/sbeval \
    && pip install --no-cache-dir --constraint /tmp/constraints.txt torch

WORKDIR /tmp/checkout
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt . \
    && sbeval --help

# no root from here on; mount results and the hub's cache where this user may write
RUN useradd --create-home --uid 10001 evaluator \
    && cp /usr/share/common-licenses/GPL-3 /opt/sbeval/health.txt \
    && install --directory --owner evaluator /work /home/evaluator/.cache
USER 10001
WORKDIR /work
# what is read once and kept: token arrays, the hub's files, Triton's kernels
VOLUME ["/home/evaluator/.cache"]

# the shipped checkpoints past their training length on a short text: the whole way from files to a page
HEALTHCHECK --interval=24h --timeout=15m --start-period=15m --retries=1 \
    CMD ["/bin/bash", "-c", "folder=$(mktemp -d) && trap 'rm -r $folder' EXIT && cd $folder && sbeval demo --text /opt/sbeval/health.txt"]
ENTRYPOINT ["sbeval"]
CMD ["--help"]
